"""asyncrl.rollouts.packing: same count everywhere, budget kept, every sample once, tokens balanced."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouts.packing import plan, plan_groups

BUDGET = 100
LENGTHS = st.lists(st.integers(1, BUDGET), max_size=60)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_every_plan_is_valid(lengths, ranks):
    """verl #6176, #5591, TuFT #121, prime-rl #1959, #2515: unequal micro-batch counts hang FSDP."""
    packed = plan(lengths, ranks, BUDGET)
    assert len(packed.rank) == ranks
    assert {len(rank.micro) for rank in packed.rank} == {packed.micro_batches}
    used = [index for rank in packed.rank for batch in rank.micro for index in batch]
    assert sorted(used) == list(range(len(lengths)))
    for rank in range(ranks):
        for micro in range(packed.micro_batches):
            assert packed.tokens(rank, micro) <= BUDGET
    assert packed == plan(lengths, ranks, BUDGET)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(1, 5))
def test_few_micro_batches(lengths, ranks):
    """First-fit decreasing leaves no two bins that would fit into one, so it uses at most 2 * total / budget + 1."""
    bins = 2 * sum(lengths) / BUDGET + 1
    assert plan(lengths, ranks, BUDGET).micro_batches <= max(1, -(-int(bins) // ranks))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 4))
def test_ranks_differ_by_at_most_one_sample_when_one_micro_batch_is_enough(lengths, ranks):
    packed = plan(lengths, ranks, 20 * 60)
    totals = [packed.tokens(rank, 0) for rank in range(ranks)]
    assert max(totals) - min(totals) <= max(lengths)


def test_fewer_samples_than_ranks_leaves_empty_micro_batches():
    packed = plan([5, 7], 4, 10)
    assert packed.micro_batches == 1
    assert sorted(len(rank.micro[0]) for rank in packed.rank) == [0, 0, 1, 1]


def test_nothing_to_train_is_still_one_micro_batch_everywhere():
    assert [rank.micro for rank in plan([], 3, 10).rank] == [[[]], [[]], [[]]]


def test_first_fit_saves_a_micro_batch_where_longest_first_overflows():
    # longest first: 5+4 and 5+3 leave the last 3 nowhere; 5+5 and 4+3+3 fit
    assert plan([5, 5, 4, 3, 3], 1, 10).micro_batches == 2


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(2, 5))
def test_bins_of_similar_size_share_a_micro_batch_and_ranks_get_alike(lengths, ranks):
    packed = plan(lengths, ranks, BUDGET)
    loads = [[packed.tokens(rank, micro) for rank in range(ranks)] for micro in range(packed.micro_batches)]
    assert all(min(earlier) >= max(later) for earlier, later in pairwise(loads))
    totals = [sum(column) for column in zip(*loads, strict=True)]
    assert max(totals) - min(totals) <= max(max(load) - min(load) for load in loads)


@pytest.mark.parametrize("lengths, name", [([3, 11], "sample 1 has 11"), ([3, 4, 0], "sample 2 has 0")])
def test_a_sample_that_cannot_be_packed_is_named(lengths, name):
    with pytest.raises(ValueError, match=name):
        plan(lengths, 2, 10)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_imbalance_is_small_on_realistic_lengths(ranks):
    """512 log-normal lengths, a few micro-batches a rank."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6.0, 0.8, 512), 16, 4096).astype(int).tolist()
    packed = plan(lengths, ranks, 16384)
    in_order = -(-sum(lengths) // (ranks * 16384))
    assert packed.micro_batches <= in_order + 1
    assert packed.imbalance < 0.01


def computed(packed, groups, prompts):
    """Tokens of the slowest rank of each micro-batch, every prompt once a micro-batch."""
    total = 0
    for micro in range(packed.micro_batches):
        costs = []
        for rank in packed.rank:
            members = rank.micro[micro]
            own = sum(packed.lengths[i] - prompts[i] for i in members)
            costs.append(own + sum(prompts[i] for i in {groups[i]: i for i in members}.values()))
        total += max(costs)
    return total


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=50), st.integers(1, 4))
def test_a_plan_by_groups_is_valid_and_never_computes_more_than_one_by_samples(pairs, ranks):
    groups = [group for group, _ in pairs]
    prompts = [10 + group for group in groups]
    lengths = [prompt + answer for prompt, (_, answer) in zip(prompts, pairs, strict=True)]
    packed = plan_groups(lengths, groups, prompts, ranks, BUDGET)
    used = [index for rank in packed.rank for batch in rank.micro for index in batch]
    assert sorted(used) == list(range(len(lengths)))
    assert {len(rank.micro) for rank in packed.rank} == {packed.micro_batches}
    assert all(packed.tokens(r, m) <= BUDGET for r in range(ranks) for m in range(packed.micro_batches))
    by_sample = plan(lengths, ranks, BUDGET)
    assert computed(packed, groups, prompts) <= computed(by_sample, groups, prompts)


def test_groups_stay_together_where_prompts_are_long():
    groups = [group for group in range(32) for _ in range(16)]
    prompts, lengths = [30] * 512, [30 + 8] * 512
    packed = plan_groups(lengths, groups, prompts, 2, 16384)
    for rank in packed.rank:
        for micro in rank.micro:
            assert all(sum(groups[i] == groups[j] for j in micro) == 16 for i in micro)
    assert computed(packed, groups, prompts) == 16 * (30 + 16 * 8)


def test_one_group_is_still_spread_over_the_ranks():
    packed = plan_groups([20] * 8, [0] * 8, [2] * 8, 4, 1000)
    assert [len(rank.micro[0]) for rank in packed.rank] == [2, 2, 2, 2]
