from __future__ import annotations

import json
import math

import pytest

from asyncrl.training.clipping import DelayedClip


def test_the_first_step_is_bounded_by_the_clip_norm():
    clip = DelayedClip(["a", "b", "c", "d"], 1.0, 0.5, 4.0)
    assert clip.loss_scale == 1.0
    assert math.hypot(*(clip.limit(u) for u in "abcd")) == pytest.approx(1.0)


def test_the_scale_follows_the_average_of_the_norms_before():
    clip = DelayedClip(["a"], 1.0, 0.25, 0.0)
    clip.learn({"a": 1.0})  # its limit is still the share
    clip.learn({"a": 5.0})
    assert clip.norm == pytest.approx(0.25 * 1.0 + 0.75 * 5.0)
    assert clip.loss_scale == pytest.approx(1.0 / (clip.norm + 1e-6))
    clip.learn({"a": 0.01})
    assert clip.loss_scale == pytest.approx(1.0 / (0.25 * 4.0 + 0.75 * 0.01 + 1e-6))


def test_without_memory_it_is_the_norm_of_the_last_step():
    clip = DelayedClip(["a"], 1.0, 0.0, 0.0)
    for norm in (1.0, 7.0, 2.0):
        clip.learn({"a": norm})
    assert clip.loss_scale == 1.0 / (2.0 + 1e-6)


def test_a_spike_is_cut_and_moves_the_averages_by_the_guard_at_most():
    clip = DelayedClip(["a", "b"], 0.1, 0.0, 3.0)
    for _ in range(30):
        clip.learn({"a": 2.0, "b": 1.0})
    assert clip.unit_norms == {"a": 2.0, "b": 1.0}
    assert clip.limit("a") == 6.0 and clip.limit("b") == 3.0
    clip.learn({"a": 2000.0, "b": 1.0})
    assert clip.unit_norms["a"] == 6.0 and clip.norm == pytest.approx(math.hypot(6.0, 1.0))


def test_a_small_unit_is_never_cut_below_its_share():
    """A gradient that begins at zero (the A of a new adapter) must be able to grow."""
    clip = DelayedClip(["a", "b"], 1.0, 0.9, 2.0)
    clip.learn({"a": 0.0, "b": 0.5})
    assert clip.limit("a") == pytest.approx(1 / math.sqrt(2)) and clip.limit("b") == pytest.approx(1.0)


def test_what_is_not_finite_teaches_nothing():
    clip = DelayedClip(["a", "b"], 1.0, 0.0, 2.0)
    clip.learn({"a": 0.5, "b": 0.5})
    clip.learn({"a": math.nan, "b": 0.25})
    assert clip.unit_norms == {"a": 0.5, "b": 0.25} and clip.norm == 0.25
    clip.learn({"a": math.inf, "b": math.inf})
    assert clip.norm == 0.25


def test_the_state_goes_through_json_exactly():
    clip, other = (DelayedClip(["a", "b"], 1.0, 0.3, 2.0) for _ in range(2))
    for norm in (0.1, 1 / 3, 7.7):
        clip.learn({"a": norm, "b": norm / 7})
    other.load(json.loads(json.dumps(clip.state())))
    assert other.state() == clip.state() and other.limit("a") == clip.limit("a")
    fewer = DelayedClip(["b"], 1.0, 0.3, 2.0)
    fewer.load(clip.state())
    assert list(fewer.unit_norms) == ["b"]
