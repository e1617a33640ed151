"""The order of one source: a permutation an epoch, any place of it at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.order import Order, enciphered, permuted

KEYS = st.tuples(st.integers(0, 2**32), st.integers(0, 1000))


@given(total=st.integers(1, 300), key=KEYS)
@settings(max_examples=60, deadline=None)
def test_the_cipher_is_a_permutation(total, key):
    assert sorted(enciphered(at, total, key) for at in range(total)) == list(range(total))


def test_the_cipher_has_no_pattern():
    """Of 4096 numbers: as few fixed points and neighbours that stay as of a random permutation (1 and 2 expected)."""
    images = np.array([[enciphered(at, 4096, (seed, 0)) for at in range(4096)] for seed in range(8)])
    assert (images == np.arange(4096)).sum() < 25
    assert (np.abs(np.diff(images)) == 1).sum() < 40
    correlation = [abs(np.corrcoef(np.arange(4096), row)[0, 1]) for row in images]
    assert max(correlation) < 0.07  # 4.5 standard deviations
    assert abs(np.corrcoef(images[0], images[1])[0, 1]) < 0.07


@given(total=st.integers(1, 50), seed=st.integers(0, 99), cuts=st.lists(st.integers(1, 20), max_size=6))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_each_record_once(total, seed, cuts):
    blocks = cuts if len(cuts) > 1 else ()
    total = sum(blocks) or total
    order = Order(total, seed, blocks=blocks)
    for epoch in range(3):
        assert sorted(order.record(epoch * total + at) for at in range(total)) == list(range(total))


def test_epoch_seed_and_source_decide():
    def epoch(number, *arguments):
        order = Order(*arguments)
        return [order.record(number * 40 + at) for at in range(40)]

    first = epoch(0, 40, 1)
    assert first == epoch(0, 40, 1)
    assert len({tuple(row) for row in (first, epoch(1, 40, 1), epoch(0, 40, 2), epoch(0, 40, 1, 3))}) == 4
    assert first == np.random.default_rng([1, 0]).permutation(40).tolist()


def test_blocks_stay_together():
    order = Order(60, 5, blocks=[10, 20, 30])
    blocks = [np.searchsorted([10, 30], order.record(at), side="right") for at in range(60)]
    assert np.count_nonzero(np.diff(blocks)) == 2
    assert [order.record(at) for at in range(60)] != [order.record(60 + at) for at in range(60)]


@pytest.mark.parametrize("drawn", [0, 10**11, 10**15 + 7])
def test_a_place_far_out_in_a_large_source_costs_nothing(drawn):
    begun = time.process_time()
    order = Order(10**9, 0)
    assert len({order.record(drawn + at) for at in range(100)}) == 100
    assert time.process_time() - begun < 0.5, "an array of the source, or a walk to the place"


def test_an_empty_source_has_no_order():
    with pytest.raises(ValueError, match="needs records"):
        Order(0, 0)


def test_small_sources_are_permuted_by_an_array():
    assert [permuted(at, 9, (3, 0)) for at in range(9)] == np.random.default_rng([3, 0]).permutation(9).tolist()
