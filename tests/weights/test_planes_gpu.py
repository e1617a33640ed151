"""The ipc and nccl planes on a real GPU: CUDA handles between processes, NCCL groups that are aborted and remade.

One GPU is enough: NCCL refuses two ranks of one host on one GPU, and is told here that every process is a host. Its
bytes then go through sockets, so the speed printed for nccl says nothing about two GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = {
    "NCCL_HOSTID": "trainer",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}


def run(plane: str, *scenarios: str, limit_s: float, **environment: str) -> None:
    command = [sys.executable, "-m", "tests.weights.plane_trainer", plane, *scenarios]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": path} | environment
    process = subprocess.Popen(
        command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\n-- killed after {limit_s} s"
    print(output)
    assert process.returncode == 0, output[-6000:]


def test_ipc():
    run("ipc", "life", "throughput", limit_s=90)


def test_nccl():
    run("nccl", "life", "silence", "throughput", limit_s=120, **ONE_GPU)
