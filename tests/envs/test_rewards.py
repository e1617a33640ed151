"""The reward pool with real worker processes and scorers that misbehave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.schema import EnvConfig, RewardConfig
from asyncrl.envs.rewards import RewardError, RewardPool, RewardResult

USER = f"{Path(__file__).parent / 'user_task.py'}:task"
FUNCTION = EnvConfig(kind="function", function=USER)


def score(texts, split="train", **reward):
    """Results for one completion an item, item i being index i."""

    async def run():
        async with RewardPool(FUNCTION, RewardConfig(**reward)) as pool:
            return await pool.score_many(split, [(text, {"index": i, "data": {}}) for i, text in enumerate(texts)])

    return asyncio.run(run())


def test_order_is_kept():
    results = score([str(i) if i % 3 else "no" for i in range(600)], workers=2)
    assert [r.value for r in results] == [i + float(i % 3 > 0) for i in range(600)]


def test_each_misbehaviour_fails_alone():
    texts = ["0", "raise no digits", "2", "return nan", "return inf", "return none", "return text", "segfault", "8",
             "exit 3", "10", "sysexit 1", "print", "13", "return true"]  # fmt: skip
    results = score(texts)
    failures = {i: r.failure for i, r in enumerate(results) if r.failure}
    assert {i: f.partition(":")[0] for i, f in failures.items()} == {
        1: "raised", 3: "not_finite", 4: "not_finite", 5: "bad_value", 6: "bad_value", 7: "died", 9: "died",
        11: "raised",
    }  # fmt: skip
    assert failures[1] == "raised: ValueError: no digits"
    assert failures[3] == "not_finite: nan"
    assert failures[7] == "died: killed by SIGSEGV"
    assert failures[9] == "died: exit code 3"
    assert [results[i].value for i in (0, 2, 8, 10, 12, 13, 14)] == [1, 3, 9, 11, 12, 14, 1]


def test_only_the_hanging_item_times_out():
    results = score(["0", "hang", "2", "3"], deadline_s=1.0)
    assert results[1] == RewardResult(None, "timeout: no answer within 1 s")
    assert [results[i].value for i in (0, 2, 3)] == [1, 3, 4]


def test_split_reaches_the_function():
    assert [r.value for r in score(["split heldout", "split train"], split="heldout")] == [1, 0]


def test_a_worker_that_cannot_start_says_why():
    async def run():
        async with RewardPool(EnvConfig(kind="function", function="no_such_module:task"), RewardConfig()):
            pass

    with pytest.raises(RewardError, match="no module no_such_module"):
        asyncio.run(run())
