"""asyncrl.rollouts.prompts: every item once an epoch, another order each epoch, resumable at any position."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouts.prompts import PromptCursor, PromptError, permuted
from asyncrl.rollouts.types import Prompt


def prompt_of_length(length: int):
    return lambda index: Prompt(f"train:{index}", index, np.zeros(length, np.int32), {})


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(permuted(position, size, seed, epoch) for position in range(size)) == list(range(size))


def test_epochs_and_seeds_have_different_orders():
    orders = {
        (seed, epoch): tuple(permuted(position, 50, seed, epoch) for position in range(50))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(set(orders.values())) == 9


def test_order_never_changes_between_versions():
    """Pinned: a changed order would train a resumed run on other prompts without a word."""
    assert [permuted(position, 1000, 1, 0) for position in range(8)] == [182, 396, 579, 851, 900, 774, 79, 91]


def test_the_order_looks_random():
    """Mean displacement of a uniform permutation is n/3; consecutive items are unrelated."""
    size = 10_000
    order = np.array([permuted(position, size, 3, 0) for position in range(size)])
    assert abs(np.abs(order - np.arange(size)).mean() / (size / 3) - 1) < 0.03
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(0, 100), st.integers(1, 50))
def test_resumes_at_any_position(size, before, after):
    """NeMo #3599, EasyR1 #57: prompts skipped or repeated after a resume."""
    cursor = PromptCursor(size, seed=4)
    for _ in range(before):
        cursor.next()
    resumed = PromptCursor.restore(size, 4, json.loads(json.dumps(cursor.state())))
    assert [resumed.next() for _ in range(after)] == [cursor.next() for _ in range(after)]


def test_epoch_counts_up():
    cursor = PromptCursor(3, seed=0)
    served = [cursor.next() for _ in range(7)]
    assert [epoch for epoch, _ in served] == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("size, seed", [(4, 0), (3, 1)])
def test_another_order_is_refused_on_resume(size, seed):
    """NeMo #2519, EasyR1 #57: data changed on resume."""
    with pytest.raises(PromptError, match="same data"):
        PromptCursor.restore(size, seed, PromptCursor(3, seed=0).state())


def test_long_prompts_are_skipped_whole_and_counted():
    cursor = PromptCursor(10, seed=0)

    def load(index: int) -> Prompt:
        return prompt_of_length(100 if index % 2 else 5)(index)

    served = [cursor.next_prompt(load, max_tokens=50)[1] for _ in range(5)]
    assert sorted(prompt.index for prompt in served) == [0, 2, 4, 6, 8]
    assert all(len(prompt.token_ids) == 5 for prompt in served)
    while cursor.epoch == 0:
        cursor.next_prompt(load, max_tokens=50)
    assert cursor.too_long >= 5
    assert PromptCursor.restore(10, 0, cursor.state()).too_long == cursor.too_long


def test_only_long_prompts_end_with_the_reason():
    with pytest.raises(PromptError, match="all 3 prompts have more than 50 tokens"):
        PromptCursor(3, seed=0).next_prompt(prompt_of_length(51), max_tokens=50)


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError):
        PromptCursor(0, seed=0)
