from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms.advantage import ADVANTAGES, group_mean, group_norm, has_variance


def test_group_mean_by_hand():
    assert group_mean([1.0, 0.0, 0.0, 1.0, 4.0], [3, 3, 3, 3, 8]).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]


def test_group_norm_by_hand():
    # rewards 1, 0, 0, 0: mean 1/4, std sqrt(3)/4
    got = group_norm([1.0, 0.0, 0.0, 0.0], [0] * 4, eps=0.0)
    np.testing.assert_allclose(got, [np.sqrt(3), *[-1 / np.sqrt(3)] * 3], rtol=1e-12)
    eps = group_norm([1.0, 0.0], [0, 0], eps=0.5)
    np.testing.assert_allclose(eps, [0.5, -0.5], rtol=1e-12)


def test_variable_group_sizes_do_not_cross_prompts():
    """AReaL #1454: strides of a fixed group size mixed prompts when groups had different sizes."""
    ids = [5, 2, 5, 2, 2, 9]
    got = group_mean([1.0, 10.0, 0.0, 20.0, 30.0, 7.0], ids)
    assert got.tolist() == [0.5, -10.0, -0.5, 0.0, 10.0, 0.0]


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3], [1e9, 1e9 + 1e-4], [0.0, 0.0], [5.0]])
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_equal_rewards_up_to_float_noise_give_zero(rewards, name):
    assert not has_variance(rewards)
    assert ADVANTAGES[name](rewards, [1] * len(rewards)).tolist() == [0.0] * len(rewards)


def test_small_but_real_differences_count():
    assert has_variance([0.5, 0.5001])
    assert np.abs(group_norm([0.5, 0.5001], [0, 0])).max() > 0.9


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), max_size=30), st.randoms())
def test_sums_to_zero_in_each_group_and_ignores_order(pairs, shuffler):
    ids, rewards = [p[0] for p in pairs], [p[1] for p in pairs]
    got = group_mean(rewards, ids)
    for g in set(ids):
        assert abs(got[np.asarray(ids) == g].sum()) < 1e-9
    order = list(range(len(pairs)))
    shuffler.shuffle(order)
    again = group_mean([rewards[i] for i in order], [ids[i] for i in order])
    np.testing.assert_allclose(again, got[order] if order else got, atol=1e-9)


def test_a_reward_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        group_norm([1.0, float("nan")], [0, 0])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="length"):
        group_mean([1.0, 2.0], [0])
