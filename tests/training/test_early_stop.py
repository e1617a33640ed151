"""When a run stops, evaluation by evaluation."""

from __future__ import annotations

import math

import pytest

from asyncrl.config.schema import Config
from asyncrl.training.early_stop import EarlyStop


def stop(patience=2, metric="eval/loss", position=()):
    cfg = Config(mode="sft")
    cfg.eval.patience, cfg.checkpoint.best_by = patience, metric
    return EarlyStop(cfg, dict(position))


def first_stop(early, values):
    """The number of the evaluation after which it stops; None if it goes on."""
    for step, value in enumerate(values):
        early.see(step, {early.metric: value})
        if early.reason:
            return step
    return None


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("eval/loss", [3, 2, 1, 0.5], None),
        ("eval/loss", [1, 2, 3], 2),
        ("eval/loss", [1, 1, 1], 2),  # equal is no better
        ("eval/loss", [3, 4, 2, 4, 3], 4),  # counted in a row
        ("eval/loss", [3, 4, 2, 4, 1, 4], None),
        ("eval/accuracy", [0.1, 0.2, 0.3], None),
        ("eval/accuracy", [0.3, 0.2, 0.1], 2),
        ("eval/loss", [math.nan, 3, 2, 1], None),  # what is not finite is never the best
        ("eval/loss", [-math.inf, 3, 2, 1], None),
        ("eval/loss", [math.nan, math.nan], 1),
        ("eval/loss", [1, math.nan, math.inf], 2),
    ],
)
def test_it_stops_after_so_many_in_a_row_that_are_no_better(metric, values, expected):
    assert first_stop(stop(metric=metric), values) == expected
    assert first_stop(stop(0, metric), values) is None


@pytest.mark.parametrize("cut", range(6))
def test_it_goes_on_from_a_position_as_if_nothing_had_been(cut):
    values = [3, 2, 2.5, 1, 4, 1]
    whole, before = stop(), stop()
    assert first_stop(whole, values) == 5 and whole.reason.startswith("stopped early: eval/loss was best at step 3, 1 ")
    for step, value in enumerate(values[:cut]):
        before.see(step, {"eval/loss": value})
    after = stop(position=before.position())
    for step, value in enumerate(values[cut:], cut):
        after.see(step, {"eval/loss": value})
    assert (after.reason, after.position()) == (whole.reason, whole.position())


def test_another_metric_is_no_history():
    early = stop()
    first_stop(early, [1, 2, 3])
    assert early.reason and not stop(metric="eval/accuracy", position=early.position()).reason
    assert stop(0).position() == {} and stop(5, position=early.position()).waited == 2


def test_an_evaluation_without_the_metric_does_not_count():
    early = stop()
    for step in range(5):
        early.see(step, {"eval/accuracy": 0.5})
    assert not early.reason
