"""The plugin: harmless outside our generators, and deadly inside when the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]

PARENT = r"""
import os, sys, time
from asyncrl.weights import vllm_plugin
vllm_plugin._register_backend = lambda: None
for _ in range(2):
    vllm_plugin.register()
if os.fork() == 0:
    if os.fork() == 0:
        os.write(1, b"%d\n" % os.getpid())
        time.sleep(600)
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(600)
time.sleep(600)
"""


def start(**variables: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process that registers, forks a child and that a grandchild."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    process = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [psutil.Process(int(process.stdout.readline())) for _ in range(2)]


def test_in_a_generator_forked_processes_end_with_their_parent():
    process, family = start(ASYNCRL_GENERATOR="generator/0")
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_elsewhere_they_are_left_alone():
    process, family = start(ASYNCRL_GENERATOR="")
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=0.5)
    assert len(alive) == 2
    for child in alive:
        child.kill()


def test_a_parent_that_ended_before_the_call_is_noticed():
    code = "from asyncrl.weights.vllm_plugin import end_with_parent; end_with_parent(1); print('alive')"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert result.returncode == -signal.SIGKILL


def test_the_backend_is_registered_once_under_its_name():
    code = (
        "from asyncrl.weights.vllm_plugin import register; register(); register();"
        "from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as f;"
        "print(f._registry['zmq']().__name__)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "ZmqWeightTransferEngine"
