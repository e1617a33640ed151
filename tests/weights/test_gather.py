"""Gathers of sharded parameters in real process groups of 2 to 4 ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from asyncrl.weights.gather import local_of
from tests.training.forks import run_group

LIMIT_S = 600  # a machine that does other things too may take minutes to import torch
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def run(world: int, folder: Path, *scenarios: str) -> None:
    """Run all ranks; fails with their output."""
    run_group(
        [sys.executable, "-m", "tests.weights.gather_ranks", str(world), str(folder / "store"), *scenarios], LIMIT_S
    )


def test_two_ranks_gather_fsdp_shards_and_push_them(tmp_path):
    """Also: a damaged gather is found before an engine loads it."""
    run(2, tmp_path, "fsdp", "publish", "damaged")


def test_no_rank_gathers_before_the_engines_are_ready(tmp_path):
    """prime-rl #2337: unmatched collectives, waiting for each other until a watchdog killed them."""
    run(2, tmp_path, "unready", "publish")


def test_three_ranks_of_which_some_hold_nothing(tmp_path):
    run(3, tmp_path, "fsdp", "placements")


def test_four_ranks_in_every_placement(tmp_path):
    run(4, tmp_path, "placements")


def test_a_plain_tensor_shares_the_parameters_storage():
    parameter = torch.nn.Parameter(torch.zeros(3))
    local = local_of("a", parameter)
    assert local.tensor.data_ptr() == parameter.data_ptr() and not local.tensor.requires_grad
