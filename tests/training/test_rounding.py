"""The random bits that round bf16 weights: each element of a sharded tensor has its own, whatever the shards."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.training.in_backward import UnitOptimizer
from asyncrl.training.rules import AdamWRule, first_of_shard, local_shard
from tests.training.ranks import run_ranks

SPLITS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "rows of rows": [_StridedShard(0, split_factor=2), Shard(0)],
    "columns of rows": [Shard(0), Shard(1)],
    "columns, twice": [Replicate(), Shard(1)],
}


@pytest.mark.parametrize("shape", [(16, 24), (7, 5), (10, 9), (3, 2)])
@pytest.mark.parametrize("split", SPLITS)
def test_no_two_elements_of_a_tensor_share_their_bits(split, shape):
    """Eight elements take the bits of one counter, so a counter belongs to one shard; copies of a shard agree."""
    placements, owners = SPLITS[split], {}
    mesh = [2] * len(placements)
    for place in itertools.product(*map(range, mesh)):
        first, size = first_of_shard(list(shape), placements, mesh, list(place)), list(shape)
        for placement, at in zip(placements, place, strict=True):
            if not placement.is_replicate():
                chunk = -(-size[placement.dim] // 2)
                size[placement.dim] = min(chunk, max(0, size[placement.dim] - at * chunk))
        shard = tuple(at for placement, at in zip(placements, place, strict=True) if not placement.is_replicate())
        assert first % 8 == 0
        for counter in range(first // 8, first // 8 + -(-math.prod(size) // 8)):
            assert owners.setdefault(counter, shard) == shard, (counter, place)
    assert len(owners) >= math.prod(shape) / 8


def stepped(split: list[Shard] | None) -> list[np.ndarray]:
    """Three bf16 tensors that begin alike and get the same gradient, after one step: only the bits differ."""
    whole = torch.full((16, 24), 0.02, dtype=torch.bfloat16)
    parameters = []
    for _ in range(3):
        x = whole if split is None else distribute_tensor(whole, init_device_mesh("cpu", (2,)), split)
        parameters.append(nn.Parameter(x.clone()))
        parameters[-1].grad = torch.ones_like(parameters[-1])
    rule = AdamWRule(seed=5)
    UnitOptimizer({"one": parameters}, [{"params": parameters, "lr": 1e-5}], rule, in_backward=False).step()
    return [local_shard(p.detach()).float().numpy() for p in parameters]


def job(rank, world):
    return {split: stepped(SPLITS[split]) for split in ("rows", "columns")}


def test_shards_draw_the_bits_of_the_whole_tensor_one_after_the_other():
    """Rows draw what the same rows of the whole would; columns are laid behind each other."""
    whole, ranks = stepped(None), run_ranks(2, job)
    for number, one in enumerate(whole):
        assert 0.01 < np.mean(one != one.flat[0]) < 0.99
        assert not any(np.array_equal(one, other) for other in whole[:number])
        for split in ("rows", "columns"):
            found = np.concatenate([rank[split][number].ravel() for rank in ranks])
            assert np.array_equal(found, one.ravel()), (split, number)
