"""RolloutDesk after a restart that lost a batch: what waits is asked for when the slots say so, and not before."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from asyncrl.actors.evaluation import Evaluation
from asyncrl.actors.rollout_desk import RolloutDesk
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.envs.rewards import RewardResult
from asyncrl.report.keys import declared
from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.slot_state import SlotState
from asyncrl.rollouts.slots import Slots
from asyncrl.rollouts.types import Group, Prompt, Sample


def test_waiting_groups_are_asked_for_once_their_turn_comes():
    cfg = Config()
    cfg.batch.groups, cfg.batch.group_size, cfg.staleness.max_steps = 2, 2, 1
    outbox = MagicMock()
    desk = RolloutDesk(cfg, MagicMock(), MagicMock(), MagicMock(), MagicMock(), outbox)
    open_groups = {2: False, 3: True, 4: False, 5: True, 6: False, 7: False}  # N = 4: groups 6 and 7 wait
    desk.slots = Slots.restore(2, 1, 1, SlotState(version=1, floor=1, next_ordinal=8, trained=2, open=open_groups))
    desk.evaluated.add(1)
    for ordinal in (2, 4, 6, 7):
        desk.restore(Group(ordinal, Prompt(f"train:{ordinal}", ordinal, np.zeros(3, np.int32), {})), {0, 1})
    desk.fleet.join("generator/0")
    desk.committed("generator/0", 1)

    def asked() -> list[int]:
        desk.pump(desk.slots.floor)
        ordinals = [call.args[2]["ordinal"] for call in outbox.put.call_args_list]
        outbox.put.reset_mock()
        return sorted(ordinals)

    assert asked() == [2, 4]
    assert asked() == []
    desk.slots.finish(2)
    assert desk.slots.take() == [2, 3]
    assert asked() == []
    desk.slots.mark_trained(1)
    desk.committed("generator/0", 2)
    assert asked() == [6, 7]


def scored_group(desk: RolloutDesk, rewards: list[float | None], failure: str = "raised: ValueError") -> Group:
    """An admitted group of ``desk`` whose samples have these rewards; None is a failed one."""
    ordinal = desk.slots.admit()
    assert ordinal is not None
    samples = [
        Sample(ordinal, i, np.ones(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "generator/0",
               reward=reward, failure=failure if reward is None else None)
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    desk.groups[ordinal] = Group(ordinal, Prompt(f"train:{ordinal}", ordinal, np.zeros(3, np.int32), {}), samples)
    return desk.groups[ordinal]


DOCS = Path(__file__).resolve().parents[2] / "docs" / "ledger.md"


def test_an_answer_of_a_generator_that_was_given_up_is_dropped_and_on_record(tmp_path):
    """generator/0 is given up, generator/1 answers in its place, then generator/0 does after all."""
    cfg = Config()
    cfg.batch.groups, cfg.batch.group_size = 1, 1
    with Ledger(tmp_path, {}) as ledger:
        prompts = MagicMock()
        prompts.next.return_value = (Prompt("train:0", 0, np.zeros(3, np.int32), {}), 0)
        prompts.cursor.too_long, prompts.cursor.state.return_value = 0, {}
        prompts.heldout.return_value = ([], 0)
        prompts.text.return_value = ""
        desk = RolloutDesk(cfg, prompts, MagicMock(), ledger, MagicMock(), MagicMock())
        desk.tasks = MagicMock()
        desk.tasks.create_task.side_effect = lambda score: score.close()  # no reward worker is there
        for name in ("generator/0", "generator/1"):
            desk.fleet.join(name)
            desk.committed(name, 0)
        desk.pump(0)
        assert desk.fleet.load("generator/0") == 1

        def answer(generator: str, ordinal: int = 0, tokens: int = 2) -> None:
            floats = np.zeros(tokens, np.float32)
            ids, versions = np.ones(tokens, np.int32), np.zeros(tokens, np.int32)
            desk.sample(Sample(ordinal, 0, ids, floats, versions, "stop", generator), generator)

        desk.lose("generator/0")
        desk.pump(0)
        answer("generator/1")
        answer("generator/0", tokens=3)
        answer("generator/1")
        answer("generator/0", ordinal=-1)
        question = re.search(r"SELECT detail ->>[^;]*", DOCS.read_text())
        assert question is not None
        found = sorted(ledger.db.execute(question.group()).fetchall())
        assert found == [("generator/0", "not owed", 2, 5), ("generator/1", "not owed", 1, 2)]
        assert [sample.generator for sample in ledger.samples(0)] == ["generator/1"]
        assert [sample.generator for sample in desk.groups[0].samples] == ["generator/1"]


def small_desk(**algorithm) -> RolloutDesk:
    cfg = Config()
    cfg.batch.groups, cfg.batch.group_size = 2, 2
    for key, value in algorithm.items():
        setattr(cfg.algorithm, key, value)
    return RolloutDesk(cfg, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())


def test_verl_953_a_run_of_equal_rewards_ends_with_the_diagnosis():
    """verl #953, DAPO #22: all groups filtered, an error or endless generation."""
    desk = small_desk(max_filtered_groups=3)
    for _ in range(2):
        desk.decide(scored_group(desk, [1.0, 1.0]))
    desk.decide(scored_group(desk, [1.0, 0.0]))  # variance: the count starts anew
    for _ in range(2):
        desk.decide(scored_group(desk, [0.0, 0.0]))
    with pytest.raises(RunFailed, match="0 of the last 3 groups had reward variance"):
        desk.decide(scored_group(desk, [0.0, 0.0]))
    assert desk.slots.counters()["filtered"] == {"equal rewards": 5}


def test_a_group_of_failed_rewards_fails_with_its_reason_and_frees_its_slot():
    desk = small_desk()
    desk.decide(scored_group(desk, [None, 1.0]))
    assert desk.slots.counters()["failed"] == {"raised": 1}
    assert desk.slots.counters()["slots_held"] == 0 and not desk.groups


def test_too_many_failed_rewards_end_the_run_with_the_last_reason():
    desk = small_desk()
    desk._group_scored(scored_group(desk, [None, 1.0], "timeout: no answer within 10 s"), [])
    with pytest.raises(RunFailed, match=r"3 of the last 4 rewards failed, the last with: timeout: no answer"):
        desk._group_scored(scored_group(desk, [None, None], "timeout: no answer within 10 s"), [])


def test_metrics_say_which_version_and_which_weights_each_engine_serves():
    """TRL #5312, #5313: users could not tell whether the engine had been updated."""
    desk = small_desk()
    for name, version in (("generator/0", 2), ("generator/1", 2)):
        desk.fleet.join(name)
        desk.fleet.committed(name, version)
    desk.fleet.serves("generator/0", 2, "00000000000000ff")
    metrics = desk.metrics()
    assert {key: value for key, value in metrics.items() if key.startswith("weights/")} == {
        "weights/version/generator_0": 2,
        "weights/digest/generator_0": "00000000000000ff",
    }
    for key in metrics:
        declared(key)


def test_completions_of_zero_tokens_cost_their_sample_and_a_group_without_others_fails_with_the_reason():
    desk = small_desk()
    desk.cfg.batch.group_size = 3
    none = np.zeros(0, np.int32)
    group = scored_group(desk, [1.0, 0.0, None], "no tokens")
    group.samples[2].token_ids = none
    desk.decide(group)
    assert group.ordinal in desk.groups and desk.slots.counters()["buffered"] == 1
    empty = scored_group(desk, [None, None, None], "no tokens")
    desk.decide(empty)
    assert desk.slots.counters()["failed"] == {"no tokens": 1} and empty.ordinal not in desk.groups


def test_a_sample_of_zero_tokens_is_a_failure_and_is_not_scored():
    desk = small_desk()
    desk.tasks = MagicMock()
    ordinal = desk.slots.admit()
    desk.groups[ordinal] = Group(ordinal, Prompt("train:0", 0, np.zeros(3, np.int32), {}))
    desk.fleet.join("generator/0")
    desk.committed("generator/0", 0)
    desk.fleet.assign(ordinal, {0, 1})
    sample = Sample(ordinal, 0, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "stop", "")
    desk.sample(sample, "generator/0")
    assert sample.failure == "no tokens" and desk.groups[ordinal].samples == [sample]


def test_the_first_prompt_that_is_too_long_is_told_once():
    desk = small_desk()
    desk.prompts.cursor.too_long = 0
    found = iter([0, 2, 3])

    def following():
        desk.prompts.cursor.too_long = next(found)
        return "prompt", 0

    desk.prompts.next, desk.prompts.room = following, 56
    for _ in range(3):
        desk._next_prompt()
    (call,) = desk.progress.event.call_args_list
    assert "a training prompt is longer than the 56 tokens" in call.args[0] and "prompts/too_long" in call.args[0]


def test_a_generator_that_was_given_up_for_its_predecessor_is_live_once_it_commits():
    desk = small_desk()
    desk.fleet.join("generator/0")
    desk.lose("generator/0")  # the word of the old one's silence came after the new one's hello
    desk.committed("generator/0", 0)
    assert [engine.name for engine in desk.fleet.live] == ["generator/0"]
    assert list(desk.slots.generators) == ["generator/0"]


def test_answers_that_the_scorer_cannot_read_are_wrong_and_counted_in_training_and_in_evaluation():
    desk = small_desk()
    told = desk.progress.event
    results = {"ok": RewardResult(1.0, None), "??": RewardResult(0.0, None, "ValueError: no number")}

    async def score_many(split, items):
        return [results[text] for text, _ in items]

    desk.rewards.score_many, desk.tasks, desk.post = score_many, MagicMock(), lambda react: react()
    desk.tasks.create_task.side_effect = asyncio.run
    prompt = Prompt("train:0", 0, np.zeros(3, np.int32), {})
    desk.evaluation = Evaluation.of(0, [prompt])
    seen = []
    for ordinal, texts in ((0, ["ok", "??"]), (1, ["??", "??"]), (-1, ["??"])):
        empty = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
        samples = [Sample(ordinal, i, *empty, "stop", "generator/0", text=text) for i, text in enumerate(texts)]
        desk._score(samples, prompt, lambda samples=samples: seen.extend(s.reward for s in samples))
    assert seen == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert desk.metrics()["reward/unreadable"] == 3 and desk.evaluation.unreadable == 1
    declared("reward/unreadable")
    assert told.call_count == 1 and "'??' (ValueError: no number): it is worth 0" in told.call_args.args[0]
