"""Real processes, SIGKILL on either end: the consumer's file holds every number once and in order."""

from __future__ import annotations

import pytest

from benchmarks import restarts


def check(total: int, every: tuple[int, int], seed: int, kills: int) -> None:
    outcome = restarts.run(total, every, seed)
    assert (outcome["messages"], outcome["lost"], outcome["doubled"], outcome["in_order"]) == (total, 0, 0, True)
    assert outcome["kills"]["consumer"] >= 1 and outcome["kills"]["producer"] >= 1
    assert sum(outcome["kills"].values()) >= kills


def test_nothing_lost_or_doubled_through_kills_of_either_end() -> None:
    check(30_000, (2_000, 7_000), seed=3, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_kills(seed: int) -> None:
    check(100_000, (500, 5_000), seed, kills=10)
