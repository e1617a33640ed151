"""Counts of steps and learning rates, against the libraries whose rules torchtune's recipes follow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_cosine_schedule_with_warmup

from asyncrl.config.schema import OptimConfig
from asyncrl.data.torchtune.steps import Batch
from asyncrl.training.optim import learning_rate


@given(
    count=st.integers(0, 400), size=st.integers(1, 5), ranks=st.integers(1, 5), accumulation=st.integers(1, 4)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_steps_of_an_epoch_are_those_of_torchs_loader(count, size, ranks, accumulation):
    """The recipes use DistributedSampler's rule and drop what fills no batch."""
    data = list(range(count))
    loaded = 0
    if data:
        sampler = DistributedSampler(data, num_replicas=ranks, rank=0, shuffle=False)
        loaded = len(DataLoader(data, batch_size=size, sampler=sampler, drop_last=True))
    assert Batch(size, ranks, accumulation).steps(count) == loaded // accumulation


@pytest.mark.parametrize(("warmup", "total"), [(0, 7), (5, 30), (10, 10)])
def test_the_schedule_is_torchtunes_one_step_ahead(warmup, total):
    """torchtune's schedule is that of transformers, whose first step has a learning rate of 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = get_cosine_schedule_with_warmup(optimizer, warmup, total).lr_lambdas[0]
    cfg = OptimConfig(lr=0.3, warmup_steps=warmup, schedule="cosine", final_lr_share=0.0)
    for step in range(total):
        assert learning_rate(step, total, cfg) == pytest.approx(0.3 * theirs(step + 1), abs=1e-15)
