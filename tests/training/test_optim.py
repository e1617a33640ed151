from __future__ import annotations

import math

import pytest
import torch

from asyncrl.config.schema import OptimConfig
from asyncrl.training.optim import build_optimizer, clip_factor, learning_rate, local_square_norm


def rates(schedule, warmup=2, total=6):
    cfg = OptimConfig(lr=1.0, warmup_steps=warmup, schedule=schedule, final_lr_share=0.1)
    return [learning_rate(s, total, cfg) for s in range(total)]


def test_schedules_by_hand():
    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1])
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert rates("cosine") == pytest.approx([0.5, 1.0, *cosine])


def test_steps_after_the_last_stay_at_the_final_rate():
    cfg = OptimConfig(lr=1.0, warmup_steps=0, schedule="linear", final_lr_share=0.2)
    assert learning_rate(50, 10, cfg) == pytest.approx(0.2)


def test_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match="schedule"):
        learning_rate(5, 10, OptimConfig(schedule="step"))


def test_vectors_are_not_decayed():
    matrix, vector = (torch.nn.Parameter(torch.ones(n)) for n in ((2, 2), (2,)))
    optimizer = build_optimizer([matrix, vector], OptimConfig(lr=0.1, weight_decay=0.5))
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(matrix, torch.tensor(1 - 0.1 * 0.5)) and torch.equal(vector, torch.ones(2))


def test_clip_factor_and_norm():
    p = torch.nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert local_square_norm([p.grad]).item() == pytest.approx(25.0)
    assert clip_factor(5.0, 1.0) == pytest.approx(0.2, rel=1e-6)
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(5.0, 0.0) == 1.0
