"""Slots and ledger together, over restarts at random moments with damaged files.

Each schedule runs the loop on a fake clock with a real ledger, stops it between two actions (what a kill inside a
ledger call leaves behind is shown in test_kill), damages some records, goes back to a checkpoint and goes on. Shown: no
group is trained twice in the surviving history, no token is older than S or from weights that are gone, a batch is
applied again on the same samples, conservation holds in slots and ledger alike, and the loop never gets stuck.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.recovery import recover
from asyncrl.rollouts.segments import segment_path
from asyncrl.rollouts.slots import Slots, age_of_tokens
from asyncrl.rollouts.types import Group, Sample
from tests.rollouts.books import SIZE, make_group

TERMS = ("dispatched", "trained", "skipped", "filtered", "failed", "buffered", "in_training", "in_flight")


class Loop:
    """Controller, trainer and two generators. ``history[v]`` is what the weights of version v were trained on."""

    def __init__(self, path: Path, random: Random, settings: tuple[int, int, int]) -> None:
        self.path, self.random, self.settings = path, random, settings
        self.checkpoint = 0
        self.history: list[dict[int, list]] = []
        self.restarts = self.lost = self.abandoned = self.readmitted = 0
        self.start()

    def start(self) -> None:
        self.ledger = Ledger(self.path, {"settings": self.settings}, segment_bytes=2000)
        recovery = recover(self.ledger, self.checkpoint)
        self.lost += len(recovery.lost)
        self.abandoned += len(recovery.abandoned)
        self.slots = Slots.restore(*self.settings, recovery.slots)
        before, self.history = self.history, self.history[: self.checkpoint]
        self.running: dict[int, list[int]] = {}
        self.waiting: dict[int, list[int]] = {}
        for version, groups in self.ledger.cuts_since(self.checkpoint):
            batch = contents(groups)
            if version < len(before):
                assert batch == before[version]
            self.train(version, batch)
        assert len(self.history) == recovery.version
        self.taken = recovery.version
        for group in recovery.finished:
            self.decide(group.ordinal)
        for pending in recovery.pending:
            prompt = pending.prompt or make_group(pending.ordinal).prompt
            group = Group(pending.ordinal, prompt, pending.samples, pending.epoch)
            self.ledger.dispatched(group, "again", size=SIZE, version=self.slots.floor)
            (self.waiting if pending.ordinal in self.slots.waiting else self.running)[pending.ordinal] = pending.missing
            for sample in pending.samples:
                if sample.reward is None and sample.failure is None:
                    self.ledger.scored(sample.ordinal, sample.index, reward=1.0)
            if not pending.missing:
                (self.running if pending.ordinal in self.running else self.waiting).pop(pending.ordinal)
                self.decide(pending.ordinal)
        self.holds = {name: recovery.version for name in ("a", "b")}
        for name, version in self.holds.items():
            self.slots.join(name, version)
        self.check()

    def act(self) -> None:
        self.random.choice((self.admit, self.admit, self.sample, self.sample, self.sample, self.advance, self.commit))()

    def admit(self) -> None:
        again = self.slots.readmit()
        if again is not None:
            self.readmitted += 1
            self.running[again] = self.waiting.pop(again)
            return
        ordinal = self.slots.admit()
        if ordinal is not None:
            cursor = {"position": ordinal + 1}
            floor = self.slots.floor
            self.ledger.dispatched(make_group(ordinal), "a", size=SIZE, version=floor, cursor=cursor)
            self.running[ordinal] = list(range(SIZE))

    def sample(self) -> None:
        """A generator finishes one sample; it may have begun it as early as the floor."""
        if not self.running:
            return
        ordinal = self.random.choice(list(self.running))
        missing = self.running[ordinal]
        index = missing.pop(self.random.randrange(len(missing)))
        newest = self.random.choice(list(self.holds.values()))
        versions = np.sort([self.random.randint(self.slots.floor, newest) for _ in range(4)]).astype(np.int32)
        ids = np.array([self.random.randrange(1000) for _ in range(4)], np.int32)
        sample = Sample(ordinal, index, ids, np.full(4, -0.5, np.float32), versions, "stop", "a")
        assert self.ledger.sample(sample)
        if self.random.random() < 0.9 or missing:  # a kill may come between the last sample and its score
            self.ledger.scored(ordinal, index, reward=1.0)
            if not missing:
                del self.running[ordinal]
                self.decide(ordinal)
        elif not missing:
            self.restart()

    def decide(self, ordinal: int) -> None:
        if self.random.random() < 0.1:
            self.filter(ordinal)
        else:
            self.slots.finish(ordinal)

    def filter(self, ordinal: int) -> None:
        self.slots.filter(ordinal, "equal rewards")
        self.ledger.filtered(ordinal, "equal rewards")

    def advance(self) -> None:
        """Take a batch if there is one, else train the next; in whichever order, as the trainer lags."""
        ordinals = self.slots.take() if self.random.random() < 0.7 else None
        if ordinals is not None:
            version = self.taken
            self.ledger.cut(version, ordinals)
            self.taken += 1
            groups = [self.ledger.group(ordinal) for ordinal in ordinals]
            age_of_tokens([s.versions for g in groups for s in g.samples], version, self.settings[1])
            self.check()
        elif len(self.history) < self.taken:
            version = len(self.history)
            (batch,) = [groups for number, groups in self.ledger.cuts_since(version) if number == version]
            self.train(version, contents(batch))

    def train(self, version: int, batch: dict[int, list]) -> None:
        assert version == len(self.history)
        self.history.append(batch)
        if self.random.random() < 0.1:
            self.slots.mark_skipped(version, "not finite")
            self.ledger.step(version, "skipped", {}, "not finite")
        else:
            self.slots.mark_trained(version)
            self.ledger.step(version, "trained", {})
        if self.random.random() < 0.2:
            self.checkpoint = version + 1

    def commit(self) -> None:
        name = self.random.choice(list(self.holds))
        if self.holds[name] < len(self.history):
            self.holds[name] = len(self.history)
            self.slots.committed(name, self.holds[name])

    def restart(self) -> None:
        self.restarts += 1
        self.ledger.close()
        for path in self.random.sample(sorted((self.path / "segments").iterdir()), self.random.choice((0, 0, 1))):
            size = path.stat().st_size
            if size and self.random.random() < 0.5:
                with open(path, "r+b") as file:
                    file.truncate(self.random.randrange(size))
            else:
                segment_path(path.parent, int(path.stem)).unlink()
        self.start()

    def check(self) -> None:
        self.slots.check_conservation()
        slots, ledger = self.slots.counters(), self.ledger.counters()
        assert {term: slots[term] for term in TERMS} == {term: ledger[term] for term in TERMS}
        trained = [ordinal for batch in self.history for ordinal in batch]
        assert len(trained) == len(set(trained))


def contents(groups: list[Group]) -> dict[int, list]:
    return {
        g.ordinal: [(s.index, s.token_ids.tolist(), s.versions.tolist(), s.reward) for s in g.samples] for g in groups
    }


def run(path: Path, seed: int, actions: int) -> Loop:
    random = Random(seed)
    loop = Loop(path, random, random.choice([(1, 0, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 3)]))
    for _ in range(actions):
        loop.act()
        if random.random() < 0.02:
            loop.restart()
    goal = len(loop.history) + 2
    for _ in range(5000):
        if len(loop.history) >= goal:
            break
        loop.act()
    assert len(loop.history) >= goal, f"stuck: {loop.slots.counters()}"
    loop.check()
    loop.ledger.close()
    return loop


def test_random_restarts(tmp_path):
    """AReaL #1345, #1471: capacity inflated after recovery. prime-rl #3004: resume deadlocks."""
    loops = [run(tmp_path / str(seed), seed, 150) for seed in range(12)]
    assert sum(loop.restarts for loop in loops) > 20
    assert sum(loop.lost for loop in loops) > 0
    assert sum(loop.abandoned for loop in loops) > 0
    assert sum(loop.readmitted for loop in loops) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_restarts(tmp_path, seed):
    run(tmp_path, seed, 400)
