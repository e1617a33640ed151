"""The model of step times, and its fit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.lora.cost import Load, OnlineFit, StepTime, fit, job_load, nonnegative_least_squares, total

TRUE = StepTime(floor=0.008, fixed=0.001, per_token=4e-5, per_square=2e-9, per_rank_token=1e-8, per_job=2e-4)


def packs(count: int, seed: int = 0) -> list[Load]:
    draw = random.Random(seed)
    return [
        total(
            job_load([draw.randint(8, 400)] * draw.randint(1, 4), draw.choice([8, 32, 128]))
            for _ in range(draw.randint(1, 12))
        )
        for _ in range(count)
    ]


def test_by_hand():
    assert job_load([3, 4], rank=2) == Load(7, 25, 14, 1)
    cost = StepTime(floor=10, fixed=1, per_token=2, per_square=1, per_rank_token=0.5, per_job=3)
    assert cost(Load(1, 1, 2, 1)) == 10 + 1 + 3
    assert cost(Load(7, 25, 14, 1)) == (1 + 14 + 25) + 7 + 3


def test_the_fit_recovers_what_made_the_times():
    loads = packs(60) + [job_load([n], 8) for n in range(1, 40, 3)]
    found = fit(loads, [TRUE(load) for load in loads])
    for load in packs(200, seed=1):
        assert found(load) == pytest.approx(TRUE(load), rel=1e-6)


def test_a_few_noisy_probes_are_enough_for_packs_between_them():
    draw = random.Random(0)
    loads = packs(24)
    found = fit(loads, [TRUE(load) * draw.uniform(0.98, 1.02) for load in loads])
    errors = [abs(found(load) / TRUE(load) - 1) for load in packs(200, seed=1)]
    assert max(errors) < 0.1 and np.mean(errors) < 0.02


def test_one_probe_is_a_constant():
    assert fit([job_load([10], 8)], [0.5])(job_load([10], 8)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="took time"):
        fit([], [])


@given(st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_nonnegative_least_squares_meets_the_optimality_conditions(seed):
    """x >= 0, the gradient of the residual is >= 0 and zero where x > 0 (Karush, Kuhn, Tucker): the only minimum."""
    generator = np.random.default_rng(seed)
    rows, wanted = generator.normal(size=(9, 4)), generator.normal(size=9)
    x = nonnegative_least_squares(rows, wanted)
    gradient = rows.T @ (rows @ x - wanted)
    assert (x >= 0).all() and (gradient > -1e-8).all() and np.abs(gradient[x > 0]).max(initial=0) < 1e-8


def test_the_online_fit_follows_a_machine_that_becomes_slower():
    online = OnlineFit(TRUE)
    assert not any(online.see(load, TRUE(load)) for load in packs(50))
    assert online.model is TRUE and online.residual < 1e-9
    slower = StepTime(*(1.5 * a for a in (0.008, 0.001, 4e-5, 2e-9, 1e-8, 2e-4)))
    changes = [online.see(load, slower(load)) for load in packs(400, seed=2)]
    assert any(changes)
    assert np.mean([abs(online.model(load) / slower(load) - 1) for load in packs(50, seed=3)]) < 0.05
