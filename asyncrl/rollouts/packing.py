"""Which sample goes to which rank and micro-batch.

Every rank runs the same number of micro-batches, because FSDP's collectives run once a micro-batch on every rank; a
micro-batch may be empty and still takes part. Ranks wait for each other in every micro-batch, so what a step costs is

    sum over micro-batches of the largest token count among the ranks

and the plan keeps it near the floor, total tokens / ranks. With the fewest micro-batches that hold the samples, each
sample goes, longest first, to the bin with the fewest tokens (LPT); if a sample fits nowhere that way, to the first bin
that has room (first-fit decreasing, which needs at most 11/9 of the fewest bins plus 6/9). Bins of similar size then
share a micro-batch. Deterministic: equal lengths keep their order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankPlan:
    """``micro[m]`` holds the indices of the samples in micro-batch m of this rank, ascending; it may be empty."""

    micro: list[list[int]]


@dataclass(frozen=True)
class PackingPlan:
    """``rank[r].micro[m]``; ``lengths`` as given to :func:`plan`."""

    rank: list[RankPlan]
    lengths: list[int]

    @property
    def micro_batches(self) -> int:
        """Of every rank."""
        return len(self.rank[0].micro)

    def tokens(self, rank: int, micro: int) -> int:
        return sum(self.lengths[index] for index in self.rank[rank].micro[micro])

    @property
    def imbalance(self) -> float:
        """Cost of the step over its floor, minus 1: 0.1 is ten per cent of waiting. See the module's docstring."""
        total = sum(self.lengths)
        if not total:
            return 0.0
        ranks = range(len(self.rank))
        cost = sum(max(self.tokens(rank, micro) for rank in ranks) for micro in range(self.micro_batches))
        return cost * len(self.rank) / total - 1.0


def plan(lengths: Sequence[int], ranks: int, token_budget: int) -> PackingPlan:
    """Pack samples of ``lengths`` tokens for ``ranks`` ranks.

    Args:
        lengths: prompt and completion tokens of each sample, at least 1.
        token_budget: most tokens in one micro-batch of one rank.

    Raises:
        ValueError: a sample is longer than the budget or has no tokens, or ranks < 1.
    """
    sizes = [int(length) for length in lengths]
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1: {ranks}")
    for index, size in enumerate(sizes):
        if not 1 <= size <= token_budget:
            raise ValueError(
                f"sample {index} has {size} tokens; a micro-batch holds 1 to {token_budget} (trainer.token_budget)"
            )
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    micro_batches = max(1, -(-sum(sizes) // (ranks * token_budget)))
    while True:
        count = ranks * micro_batches
        bins = _longest_first(sizes, order, count, token_budget) or _first_fit(sizes, order, count, token_budget)
        if bins is not None:
            return _arrange(bins, sizes, ranks)
        micro_batches += 1


def plan_groups(
    lengths: Sequence[int], groups: Sequence[int], prompts: Sequence[int], ranks: int, token_budget: int
) -> PackingPlan:
    """A plan for a trainer that computes a prompt once for all samples of a micro-batch that share it.

    Groups then belong together; but whole groups balance worse than samples. Of the plan by groups and the plan by
    samples, the one whose step computes fewer tokens (see the module's docstring; a group's prompt counted once a
    micro-batch). The budget still bounds the tokens of the samples, shared or not.

    Args:
        groups: number of each sample's group; its samples have one prompt.
        prompts: how many of the ``lengths`` tokens are the prompt.

    Raises:
        ValueError: as :func:`plan`.
    """
    by_sample = plan(lengths, ranks, token_budget)
    units = _units(lengths, groups, token_budget)
    packed = plan([sum(lengths[index] for index in unit) for unit in units], ranks, token_budget)
    by_group = PackingPlan(
        [RankPlan([sorted(i for u in micro for i in units[u]) for micro in rank.micro]) for rank in packed.rank],
        by_sample.lengths,
    )
    return min(by_group, by_sample, key=lambda candidate: _computed(candidate, groups, prompts))


def _units(lengths: Sequence[int], groups: Sequence[int], budget: int) -> list[list[int]]:
    """The samples of each group, cut where a group exceeds the budget."""
    units: list[list[int]] = []
    current: dict[int, int] = {}  # group -> its newest unit
    size: dict[int, int] = {}
    for index, group in enumerate(groups):
        if group not in current or size[group] + lengths[index] > budget:
            current[group] = len(units)
            size[group] = 0
            units.append([])
        units[current[group]].append(index)
        size[group] += lengths[index]
    return units


def _computed(packing: PackingPlan, groups: Sequence[int], prompts: Sequence[int]) -> int:
    """Tokens that the slowest ranks compute, a prompt once a micro-batch."""

    def tokens(members: list[int]) -> int:
        shared = {groups[index]: prompts[index] for index in members}
        return sum(packing.lengths[index] - prompts[index] for index in members) + sum(shared.values())

    micro_batches = range(packing.micro_batches)
    return sum(max(tokens(rank.micro[micro]) for rank in packing.rank) for micro in micro_batches)


def _longest_first(sizes: list[int], order: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Longest sample to the emptiest bin; None if that overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in order:
        load, number = heap[0]
        if load + sizes[index] > budget:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (load + sizes[index], number))
    return bins


def _first_fit(sizes: list[int], order: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Longest sample to the first bin with room; None if there is none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    for index in order:
        number = next((number for number, left in enumerate(room) if left >= sizes[index]), None)
        if number is None:
            return None
        bins[number].append(index)
        room[number] -= sizes[index]
    return bins


def _arrange(bins: list[list[int]], sizes: list[int], ranks: int) -> PackingPlan:
    """Bins of similar load share a micro-batch; within one, the rank with the fewest tokens so far gets the most."""
    loads = [sum(sizes[index] for index in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda number: (-loads[number], number))
    micro: list[list[list[int]]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for start in range(0, len(order), ranks):
        poorest = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        for rank, number in zip(poorest, order[start : start + ranks], strict=True):
            micro[rank].append(sorted(bins[number]))
            total[rank] += loads[number]
    return PackingPlan([RankPlan(batches) for batches in micro], sizes)
