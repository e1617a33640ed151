"""Random schedules of the whole loop on a fake clock: generators, trainer and controller reduced to what slots see.

Adverse on purpose: a group's first token is sampled by the slowest live generator the moment it is
admitted (worst case of the proof), and groups finish, generators commit, die and join in any order.
"""

from __future__ import annotations

from random import Random

from asyncrl.rollouts.slots import Slots, StalenessError


class Schedule:
    """One run: ``run`` performs random actions, ``drain`` then shows that nothing is stuck."""

    def __init__(self, slots: Slots, random: Random, generators: int) -> None:
        self.slots = slots
        self.random = random.random
        self.trained = 0  # versions the trainer has made
        self.next_name = generators
        self.live: list[str] = []
        self.holds: dict[str, int] = {}
        self.running: list[int] = []
        self.buffered: list[int] = []
        self.batches: list[list[int]] = []  # taken, not trained
        self.sampled_by: dict[int, int] = {}  # ordinal -> version of its oldest token
        self.oldest = 0  # largest age trained so far
        # how eager each kind of event is in this schedule
        self.bias = [random.random() for _ in range(6)]
        for index in range(generators):
            self._add(f"g{index}", 0)

    def run(self, actions: int) -> None:
        random, bias = self.random, self.bias
        admit, finish, take, train, commit, rare = bias
        total = admit + finish + take + train + commit + 0.25 * rare
        finish_at, take_at = admit + finish, admit + finish + take
        train_at, commit_at = take_at + train, take_at + train + commit
        for _ in range(actions):
            draw = random() * total
            if draw < admit:
                self.admit()
            elif draw < finish_at:
                self.finish()
            elif draw < take_at:
                self.take()
            elif draw < train_at:
                self.train()
            elif draw < commit_at:
                self.commit()
            else:
                self.rare()

    def pick(self, items: list) -> int:
        return int(self.random() * len(items))

    def admit(self) -> None:
        if not self.live:
            return
        ordinal = self.slots.admit()
        if ordinal is not None:
            self.running.append(ordinal)
            self.sampled_by[ordinal] = min(self.holds.values())

    def finish(self) -> None:
        if self.running and self.live:
            ordinal = self.running.pop(self.pick(self.running))
            self.slots.finish(ordinal)
            self.buffered.append(ordinal)

    def take(self) -> bool:
        ordinals = self.slots.take()
        if ordinals is None:
            return False
        version = self.slots.version - 1
        assert len(ordinals) == self.slots.groups_per_step
        for ordinal in ordinals:
            self.buffered.remove(ordinal)
            age = version - self.sampled_by.pop(ordinal)
            if age > self.oldest:
                self.oldest = age
                if age > self.slots.max_staleness:
                    raise StalenessError(f"group {ordinal} is trained at age {age}")
        self.batches.append(ordinals)
        self.check()
        return True

    def train(self) -> None:
        if self.batches:
            self.batches.pop(0)
            if self.random() < 0.2:
                self.slots.mark_skipped(self.trained, "no variance")
            else:
                self.slots.mark_trained(self.trained)
            self.trained += 1

    def commit(self) -> None:
        """Some live generator gets the newest version or any one between (pushes may be skipped)."""
        if self.live:
            name = self.live[self.pick(self.live)]
            behind = self.trained - self.holds[name]
            if behind:
                self.holds[name] += 1 + int(self.random() * behind)
                self.slots.committed(name, self.holds[name])

    def rare(self) -> None:
        draw = self.random()
        if draw < 0.2 and self.running:
            self.slots.fail(self.running.pop(self.pick(self.running)), "engine")
        elif draw < 0.5 and self.buffered:
            self.slots.filter(self.buffered.pop(self.pick(self.buffered)), "equal rewards")
        elif draw < 0.75 and self.live:
            name = self.live.pop(self.pick(self.live))  # its groups are dispatched again: they stay in ``running``
            del self.holds[name]
            self.slots.leave(name)
        elif len(self.live) < 4:
            lowest = self.slots.floor
            self._add(f"g{self.next_name}", lowest + int(self.random() * (self.trained - lowest + 1)))
            self.next_name += 1

    def rejoin(self) -> None:
        """After a restart: one generator, with the newest weights."""
        self._add(f"g{self.next_name}", self.trained)
        self.next_name += 1

    def drain(self, batches: int = 2) -> None:
        """A fair schedule from here on must make batch after batch, or the slots are stuck."""
        if not self.live:
            self._add("last", self.trained)
        for _ in range(batches):
            while True:
                before = self.slots.free
                self.admit()
                if self.slots.free == before:
                    break
            while self.running:
                self.finish()
            taken = 0
            while self.take():
                taken += 1
            assert taken or self.batches or self._behind(), f"stuck: {self.slots.counters()}"
            while self.batches:
                self.train()
            while self._behind():
                self.commit()
        self.check()

    def check(self) -> None:
        """Conservation, against this model's own books as well."""
        slots = self.slots
        slots.check_conservation()
        assert len(self.running) + len(self.buffered) == len(slots._open)
        assert slots.version == self.trained + len(self.batches)

    def _behind(self) -> bool:
        return any(version < self.trained for version in self.holds.values())

    def _add(self, name: str, version: int) -> None:
        self.live.append(name)
        self.holds[name] = version
        self.slots.join(name, version)
