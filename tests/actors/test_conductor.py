"""What the controller counts as progress, and what it says when there is none for too long.

Prompts, rewards, ledger and links are fakes; the conductor and its rollout desk are real.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from asyncrl.actors.conductor import Conductor
from asyncrl.actors.messages import sample_message
from asyncrl.actors.patience import Patience
from asyncrl.actors.rollout_desk import RolloutDesk
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.rollouts.types import Prompt, Sample
from asyncrl.transport.frames import Message

BATCH_S, START_S, SAVE_S = 10.0, 50.0, 20.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Links:
    """In the place of the listener: what is put into ``mail`` arrives."""

    def __init__(self) -> None:
        self.mail: asyncio.Queue[Message] = asyncio.Queue()

    async def recv(self, **_: Any) -> Message:
        return await self.mail.get()

    def done(self, message: Message) -> None:
        """Nobody resends."""


def make(steps: int = 5, ready: bool = True) -> Conductor:
    """A conductor of one trainer; if ``ready`` it is there, and generator/0 serves and has been asked for samples."""
    cfg = Config()
    cfg.batch.groups, cfg.batch.group_size, cfg.staleness.max_steps, cfg.trainer.steps = 2, 2, 0, steps
    cfg.deadline.batch_s, cfg.deadline.start_s, cfg.checkpoint.every = BATCH_S, START_S, 0
    cfg.deadline.checkpoint_s = SAVE_S
    prompts, outbox, rewards = MagicMock(), MagicMock(), MagicMock()
    prompts.heldout.return_value, prompts.cursor.too_long = ([], 0), 0
    prompts.next.side_effect = lambda: (Prompt("train:0", 0, np.zeros(3, np.int32), {}), 0)
    outbox.flush = AsyncMock()
    desk = RolloutDesk(cfg, prompts, rewards, MagicMock(), MagicMock(), outbox)
    desk.tasks, desk.post = MagicMock(), MagicMock()
    desk.tasks.create_task.side_effect = lambda score: score.close()  # no reward worker is there
    conductor = Conductor(cfg, 1, Links(), desk, MagicMock(), MagicMock(), outbox)  # type: ignore[arg-type]
    if ready:
        conductor.trainers[0] = "trainer/0"
        desk.fleet.join("generator/0")
        desk.committed("generator/0", 0)
        conductor._pump()
        assert desk.fleet.in_flight == 4
    return conductor


def sample(ordinal: int, index: int, **more: Any) -> Message:
    ids = np.ones(2, np.int32)
    made = Sample(ordinal, index, ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "generator/0")
    header, arrays = sample_message(made)
    return Message("sample", header, tuple(memoryview(a).cast("B") for a in arrays), "generator/0", 1, 1)


def committed(version: int = 0) -> Message:
    header = {"version": version, "seconds": 1.0, "bytes": 1, "pause_s": 0.1}
    return Message("committed", header, (), "generator/0", 1, 1)


def step(version: int = 0) -> Message:
    header = {"version": version, "skipped": None, "metrics": {}, "busy_s": 1.0}
    return Message("step", header, (), "trainer/0", 1, 1)


def react(conductor: Conductor, *reactions: Callable[[], None]) -> None:
    """As the conductor's loop does."""
    for reaction in reactions:
        reaction()
    conductor._pump()
    conductor._check_patience()


def with_clock(conductor: Conductor) -> Clock:
    clock = Clock()
    conductor._patience = Patience(conductor.cfg.deadline, clock)
    react(conductor)
    return clock


def finish_groups(conductor: Conductor) -> None:
    """Both groups of batch 0 are answered and scored: it is cut."""
    for ordinal, rewards in ((0, (0.0, 1.0)), (1, (0.0, 1.0))):
        for index, reward in enumerate(rewards):
            conductor._handle(sample(ordinal, index))
            conductor.desk.groups[ordinal].samples[index].reward = reward
        conductor.desk.decide(conductor.desk.groups[ordinal])
    conductor.desk.scoring = 0  # the workers are fakes: this is what they do when they are done
    conductor._pump()
    assert list(conductor.batches) == [0]


def test_messages_that_bring_nothing_nearer_do_not_prolong_the_wait():
    async def scenario() -> None:
        conductor = make()
        conductor.cfg.deadline.batch_s = 0.3

        async def chatter() -> None:
            while True:
                conductor.listener.mail.put_nowait(committed())
                await asyncio.sleep(0.01)

        talking = asyncio.create_task(chatter())
        async with asyncio.timeout(60):
            with pytest.raises(BaseExceptionGroup) as caught:
                await conductor.run()
        talking.cancel()
        (failure,) = caught.value.exceptions
        assert isinstance(failure, RunFailed)
        reason = "the controller waited 0.3 s for generator/0 to answer 4 samples (deadline.batch_s)"
        assert str(failure) == reason

    asyncio.run(scenario())


def test_a_silent_run_ends_too():
    async def scenario() -> None:
        conductor = make(ready=False)
        conductor.cfg.deadline.start_s = 0.2
        async with asyncio.timeout(60):
            with pytest.raises(BaseExceptionGroup) as caught:
                await conductor.run()
        (failure,) = caught.value.exceptions
        assert str(failure) == "the controller waited 0.2 s for trainer ranks [0] to start (deadline.start_s)"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "message",
    [
        committed(),
        sample(7, 0),  # of a group that nobody asked for
        Message("$joined", {"session": 1}, (), "generator/5", 1),
        Message("generator_hello", {"pid": 1, "host": "h", "start_s": 1.0}, (), "generator/5", 1, 1),
        Message("served", {"generator": "generator/0", "version": 0, "digest": "d"}, (), "trainer/0", 1, 1),
    ],
    ids=lambda message: message.kind,
)
def test_what_may_be_repeated_for_ever_is_no_progress(message):
    conductor = make()
    clock = with_clock(conductor)
    clock.now = BATCH_S - 1
    react(conductor, lambda: conductor._handle(message))
    clock.now = BATCH_S
    with pytest.raises(RunFailed, match=re.escape("waited 10 s for generator/0 to answer 4 samples")):
        react(conductor)


def test_every_sample_and_every_decided_group_is_progress():
    conductor = make()
    clock = with_clock(conductor)
    for ordinal, index in ((0, 0), (1, 1), (0, 1)):
        clock.now += BATCH_S - 1
        react(conductor, lambda o=ordinal, i=index: conductor._handle(sample(o, i)))
    clock.now += BATCH_S - 1
    group = conductor.desk.groups[0]
    group.samples[0].reward, group.samples[1].reward = 0.0, 1.0
    react(conductor, lambda: conductor.desk.decide(group))
    clock.now += BATCH_S - 1
    react(conductor)
    clock.now += 1
    with pytest.raises(RunFailed, match="waited 10 s for generator/0 to answer 1 samples"):
        react(conductor, lambda: conductor._handle(sample(1, 1)))  # a repeat


def test_a_step_and_a_checkpoint_are_progress():
    conductor = make(steps=1)
    clock = with_clock(conductor)
    finish_groups(conductor)
    react(conductor)
    clock.now += BATCH_S - 1
    react(conductor, lambda: conductor._handle(step()))
    clock.now += BATCH_S - 1
    saved = Message("saved", {"version": 1, "path": "p"}, (), "trainer/0", 1, 1)
    react(conductor, lambda: conductor._handle(saved))
    assert conductor._patience.left_s == BATCH_S


@pytest.mark.parametrize(
    ("arrange", "limit_s", "reason"),
    [
        (lambda c: None, BATCH_S, "the trainers to report step 1 (deadline.batch_s)"),
        (
            lambda c: setattr(c.desk, "scoring", 3),
            BATCH_S,
            "rewards of 3 samples and the trainers to report step 1 (deadline.batch_s)",
        ),
        (
            lambda c: c._handle(step()),
            SAVE_S,
            "generator/0 to serve version 1 and the trainers to save version 1 (deadline.checkpoint_s)",
        ),
    ],
    ids=["trainers", "rewards", "checkpoint"],
)
def test_the_reason_names_all_that_is_waited_for(arrange, limit_s, reason):
    conductor = make(steps=1)
    finish_groups(conductor)
    arrange(conductor)
    clock = with_clock(conductor)
    clock.now = limit_s - 1
    react(conductor)
    clock.now = limit_s
    with pytest.raises(RunFailed, match=re.escape(f"waited {limit_s:g} s for {reason}")):
        react(conductor)


def test_a_run_ends_once_its_last_checkpoint_is_complete():
    conductor = make(steps=4)
    conductor.version, conductor.saved_version = 4, 2
    conductor.desk.evaluated.update({0, 4})
    assert not conductor._finished
    conductor._on_saved(Message("saved", {"version": 4, "path": "x"}, (), "trainer/0", 1, 1))
    assert conductor._finished


def test_without_a_generator_the_time_to_start_one_counts_from_its_loss():
    conductor = make()
    clock = with_clock(conductor)
    clock.now = BATCH_S - 1
    react(conductor, lambda: conductor.desk.lose("generator/0"))
    clock.now += START_S - 1
    react(conductor)
    clock.now += 1
    reason = "waited 50 s for a generator to serve version 0 (deadline.start_s); see the run's logs folder"
    with pytest.raises(RunFailed, match=re.escape(reason)):
        react(conductor)


def test_a_generator_that_serves_at_last_has_time_for_its_first_sample():
    conductor = make()
    clock = with_clock(conductor)
    react(conductor, lambda: conductor.desk.lose("generator/0"))
    clock.now = START_S - 1
    react(conductor, lambda: conductor.desk.committed("generator/1", 0))
    clock.now += BATCH_S - 1
    react(conductor)
