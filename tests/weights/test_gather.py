"""Gathers of sharded parameters in real process groups of 2 to 4 ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from asyncrl.weights.gather import local_of

ROOT = Path(__file__).resolve().parents[2]


def run(world: int, folder: Path, *scenarios: str) -> None:
    """Run all ranks; fails with the output of those that failed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.weights.gather_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder / "store"), *scenarios],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    failed = [f"rank {r}:\n{outputs[r][-3000:]}" for r, process in enumerate(ranks) if process.returncode]
    assert not failed, "\n".join(failed)


def test_two_ranks_gather_fsdp_shards_and_push_them(tmp_path):
    """Also: a damaged gather is found before an engine loads it."""
    run(2, tmp_path, "fsdp", "publish", "damaged")


def test_three_ranks_of_which_some_hold_nothing(tmp_path):
    run(3, tmp_path, "fsdp", "placements")


def test_four_ranks_in_every_placement(tmp_path):
    run(4, tmp_path, "placements")


def test_a_plain_tensor_shares_the_parameters_storage():
    parameter = torch.nn.Parameter(torch.zeros(3))
    local = local_of("a", parameter)
    assert local.tensor.data_ptr() == parameter.data_ptr() and not local.tensor.requires_grad
