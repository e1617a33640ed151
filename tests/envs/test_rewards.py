"""The reward pool with real worker processes and scorers that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.schema import EnvConfig, RewardConfig
from asyncrl.envs import load_env
from asyncrl.envs.rewards import RewardError, RewardPool, RewardResult

USER = f"{Path(__file__).parent / 'user_task.py'}:task"
FUNCTION = EnvConfig(kind="function", function=USER)
GYM = EnvConfig(task="spell_backward", size=1000, heldout_size=20)


def items(*texts, first=0):
    return [(text, {"index": first + i, "data": {}}) for i, text in enumerate(texts)]


def with_pool(use, env=FUNCTION, **reward):
    """``await use(pool)`` in a pool of its own."""

    async def run():
        async with RewardPool(env, RewardConfig(**reward)) as pool:
            return await use(pool)

    return asyncio.run(run())


def score(*texts, split="train", **reward):
    """The results of one completion an item, item i having index i."""
    return with_pool(lambda pool: pool.score_many(split, items(*texts)), **reward)


def kinds(results):
    return [r.kind for r in results]


def eventually(true, what, within_s=30.0):
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def alive(pid):
    """Running: neither gone nor a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("workers", [1, 3])
def test_order_is_kept(workers):
    results = score(*[str(i) if i % 3 else "no" for i in range(600)], workers=workers)
    assert [r.value for r in results] == [i + float(i % 3 > 0) for i in range(600)]


def test_calls_at_the_same_time_get_their_own_results():
    async def use(pool):
        calls = [pool.score_many(("train", "heldout")[i % 2], items(*["no"] * 7, first=100 * i)) for i in range(20)]
        return await asyncio.gather(*calls)

    for i, results in enumerate(with_pool(use, workers=2)):
        assert [r.value for r in results] == [100 * i + j for j in range(7)]


def test_nothing_to_score():
    assert score() == []


def test_every_worker_takes_a_share():
    async def use(pool):
        return {r.value for _ in range(20) for r in await pool.score_many("train", items(*["pid"] * 16))}

    assert len(with_pool(use, workers=2)) == 2


def test_each_misbehaviour_fails_alone():
    texts = ["0", "raise no digits", "2", "return nan", "return inf", "return none", "return text", "segfault", "8",
             "exit 3", "10", "sysexit 1", "print", "13", "return true", "unprintable", "return huge", "17"]  # fmt: skip
    results = score(*texts)
    failures = {i: r.failure for i, r in enumerate(results) if r.failure}
    assert {i: results[i].kind for i in failures} == {
        1: "raised", 3: "not_finite", 4: "not_finite", 5: "bad_value", 6: "bad_value", 7: "died", 9: "died",
        11: "raised", 15: "raised", 16: "bad_value",
    }  # fmt: skip
    assert failures[1] == "raised: ValueError: no digits"
    assert failures[3] == "not_finite: nan"
    assert failures[5].endswith("task with a completion returned NoneType None; a reward is a number")
    assert failures[7] == "died: killed by SIGSEGV"
    assert failures[9] == "died: exit code 3"
    assert failures[11] == "raised: SystemExit: 1"
    assert [results[i].value for i in (0, 2, 8, 10, 12, 13, 14, 17)] == [1, 3, 9, 11, 1, 14, 1, 18]


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_hanging_items_time_out(workers):
    """AReaL #1426, NeMo-Gym #1354: a scorer that hangs. A timeout is not a reward of 0."""
    results = score("0", "hang", "2", "3", "hang", "5", deadline_s=2.0, workers=workers)
    assert [results[i] for i in (1, 4)] == [RewardResult(None, "timeout: no answer within 2 s")] * 2
    assert [results[i].value for i in (0, 2, 3, 5)] == [1, 3, 4, 6]


def test_the_deadline_is_for_one_item_not_for_the_batch():
    results = score(*["wait 0.4"] * 10, deadline_s=3.0)
    assert [r.value for r in results] == [1.0] * 10, "4 s in all, each far within 3 s"


def test_an_answer_that_this_process_was_too_busy_to_read_counts():
    async def use(pool):
        call = asyncio.create_task(pool.score_many("train", items("wait 0.1", "1")))
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # noqa: ASYNC251 - the event loop is held up beyond the deadline
        return await call

    assert [r.value for r in with_pool(use, deadline_s=1.0)] == [1, 2]


def test_a_scorer_may_limit_itself_with_an_alarm():
    """verl #6673, #5635, #5839, TRL #5281: signal.alarm scores 0 off the main thread."""
    results = score("impatient", "alarm", "wait 0.5", "3")
    assert results[0].failure == "raised: TimeoutError: my own limit"
    assert [r.value for r in results[1:]] == [1, 1, 4], "an alarm left pending must not strike the next item"


def test_a_scorer_that_forks_or_reads_stdin():
    results = score("fork", "1", "fork", "3", "read")
    assert [r.value for r in results] == [1, 2, 1, 4, 0]


def test_death_behind_a_forked_child_is_seen():
    results = score("forkdie", "1", deadline_s=1.0)
    assert results[0].failure == "died: exit code 7" and results[1].value == 2


def test_what_a_hanging_scorer_started_is_killed_too(tmp_path):
    file = tmp_path / "pid"
    assert kinds(score(f"child {file}", deadline_s=3.0)) == ["timeout"]
    eventually(lambda: not alive(int(file.read_text())), "the scorer's child is still there")


def test_a_worker_killed_while_idle_costs_no_item():
    async def use(pool):
        pid = int((await pool.score_many("train", items("pid")))[0].value)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(pool._workers[0]._process.wait(), 30)
        return await pool.score_many("train", items("0", "1"))

    assert [r.value for r in with_pool(use)] == [1, 2]


def test_a_caller_that_gives_up_leaves_the_pool_working():
    async def use(pool):
        call = asyncio.create_task(pool.score_many("train", items(*["wait 0.02"] * 500)))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return await asyncio.wait_for(pool.score_many("train", items("0")), 60)

    assert with_pool(use, workers=1)[0].value == 1


def test_splits_queued_together_are_kept_apart():
    async def use(pool):
        calls = [pool.score_many(split, items(f"split {split}")) for split in ["train", "heldout", "heldout"] * 5]
        return await asyncio.gather(*calls)

    assert with_pool(use) == [[RewardResult(1.0, None)]] * 15


def test_split_reaches_the_function():
    assert [r.value for r in score("split heldout", "split train", split="heldout")] == [1, 0]


def test_odd_text_and_integers_beyond_64_bits():
    async def use(pool):
        texts = ["\ud800", "\x00", "é 漢 🎉", "x" * 10**6, str(2**80)]
        entries = [{"index": 0, "data": {}}] * 4 + [{"index": 2**80, "data": {"n": [2**80]}}]
        return await pool.score_many("train", list(zip(texts, entries, strict=True)))

    assert [r.value for r in with_pool(use)] == [0, 0, 0, 0, 2.0**80]


def test_the_gyms_scores_are_its_own():
    env = load_env(GYM, "train")
    entries = [env.item(i).entry for i in range(32)]
    pairs = [(text, entry) for entry in entries for text in (entry["answer"], "abc", "", " " + entry["answer"][:2])]
    results = with_pool(lambda pool: pool.score_many("heldout", pairs), env=GYM)
    assert [r.value for r in results] == [env.score(text, entry) for text, entry in pairs]


def test_an_answer_that_the_gyms_scorer_raises_on_is_worth_0_and_told_apart_from_a_wrong_one():
    gym = EnvConfig(task="prime_factorization", size=10, heldout_size=0)
    entry = load_env(gym, "train").item(0).entry
    broken = {**entry, "answer": "x"}  # the right answer cannot be read either
    pairs = [("two times three", entry), ("1", entry), (entry["answer"], entry), ("two", broken)]
    unreadable, wrong, right, failed = with_pool(lambda pool: pool.score_many("train", pairs), env=gym)
    assert unreadable.value == 0.0 and unreadable.failure is None and "ValueError" in unreadable.unreadable
    assert wrong == RewardResult(0.01, None) and right == RewardResult(1.0, None), "the task's own scores"
    assert failed.value is None and failed.kind == "raised" and failed.unreadable is None


# ---- start and end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (EnvConfig(kind="function", function="no_such_module:task"), "no module no_such_module"),
        (EnvConfig(task="spel_backward"), "did you mean spell_backward"),
    ],
)
def test_a_worker_that_cannot_start_says_why(env, text):
    async def use(pool):
        raise AssertionError("entered")

    with pytest.raises(RewardError, match=text):
        with_pool(use, env=env, workers=2)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import os; os._exit(4)", "ended while loading the train split: exit code 4"),
        ("import time; time.sleep(60)", "did not load the train split within 2 s.*reward.load_deadline_s"),
        ("raise SystemExit('go away')", "SystemExit: go away"),
    ],
)
def test_a_module_that_goes_wrong_at_import(tmp_path, source, text):
    (tmp_path / "bad.py").write_text(source)
    env = EnvConfig(kind="function", function=f"{tmp_path / 'bad.py'}:task")
    with pytest.raises(RewardError, match=text):
        with_pool(lambda pool: pool.score_many("train", []), env=env, load_deadline_s=2.0)


def test_a_worker_that_cannot_be_replaced_ends_the_waiting(tmp_path):
    file = tmp_path / "once.py"
    file.write_text(Path(USER.rpartition(":")[0]).read_text())

    async def use(pool):
        file.unlink()
        with pytest.raises(RewardError, match="no file"):
            await pool.score_many("train", items("exit 1", "1", "2"))
        with pytest.raises(RewardError, match="no file"):
            await pool.score_many("train", items("0"))

    with_pool(use, env=EnvConfig(kind="function", function=f"{file}:task"))


def test_leaving_ends_a_hanging_worker_at_once():
    async def run():
        async with RewardPool(FUNCTION, RewardConfig(deadline_s=600.0)) as pool:
            pid = int((await pool.score_many("train", items("pid")))[0].value)
            call = asyncio.create_task(pool.score_many("train", items("hang", "1")))
            await asyncio.sleep(0.3)
        with pytest.raises(RewardError, match="ended"):
            await asyncio.wait_for(call, 30)
        return pid

    assert not alive(asyncio.run(run()))


PARENT = """
import asyncio, sys
from tests.envs.test_rewards import FUNCTION, RewardConfig, RewardPool, items
async def main():
    async with RewardPool(FUNCTION, RewardConfig(workers=2, deadline_s=600.0)) as pool:
        print(*(worker._process.pid for worker in pool._workers), flush=True)
        await pool.score_many("train", items("hang", "1", "2"))
asyncio.run(main())
"""


def test_no_worker_outlives_a_killed_parent():
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environ, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        parent.kill()
    eventually(lambda: not any(map(alive, pids)), "a worker outlives its parent")
