"""Real processes, SIGKILL on either end: the consumer's file holds every number once and in order."""

from __future__ import annotations

import pytest

from benchmarks import restarts


def check(total: int, every: tuple[int, int], seed: int, first: str) -> None:
    outcome = restarts.run(total, every, seed, first)
    assert (outcome["messages"], outcome["lost"], outcome["doubled"], outcome["in_order"]) == (total, 0, 0, True)
    assert outcome["kills"][first] >= 1  # more on a machine that is not too busy to notice in time


@pytest.mark.parametrize("first", ["consumer", "producer"])
def test_nothing_lost_or_doubled_through_kills_of_either_end(first: str) -> None:
    check(30_000, (500, 5_000), seed=1, first=first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_kills(seed: int) -> None:
    check(100_000, (500, 5_000), seed, first=["consumer", "producer"][seed % 2])
