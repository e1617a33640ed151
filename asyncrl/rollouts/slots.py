"""Staleness slots and the windowed FIFO: who may start, who may be trained, and when a place is free again.

Symbols: B groups a step, S allowed staleness in steps, W window, N slots. Version v of the weights is the number of
batches consumed, so the batch with number v trains at version v and makes version v+1. The age of a token is the
version it is trained at minus the version that sampled it.

Rules
  admit   A group takes a slot and the next ordinal; refused while N slots are held.
  take    The head is the oldest group that is neither taken, filtered nor failed. A finished group may be taken if its
          ordinal is in [head, head + W - 1]. A step takes exactly B groups or none.
  free    A slot is free when the group is filtered or failed, or when *every live generator* holds the version made by
          the batch that took the group. Taking frees nothing; with no live generator nothing is freed.
  join    A generator joins with a version that is at least the slowest live one (the last slowest if none is live).
A group that is dispatched again keeps its ordinal and its slot.
  readmit A restart may go back to older weights than those a group was admitted under (a lost batch: see recovery).
          A group that needs new samples then waits until the groups before it and the held batches are fewer than N:
          the condition under which it would be admitted now. Nothing new is admitted while one waits.

Bound. Let group i be admitted while the slowest live generator holds v (the floor). The floor never falls, so every
token of i has version >= v. Which groups can be trained before i?
  1. Those without a slot when i is admitted: their batches were numbered below v. At most v*B.
  2. Those that hold a slot then: at most N - 1.
  3. Later ordinals taken before i: while i is not taken the head is at most i, so their ordinals are at most
     i + W - 1. At most W - 1.
So at most v*B + N + W - 2 groups come before i, i is in the batch numbered at most floor((v*B + N + W - 2) / B), and
the age of each of its tokens is at most floor((N + W - 2) / B). With

    N = (S + 1) * B - (W - 1)

N + W - 2 = (S + 1) * B - 1, and the bound is exactly S. Filtering and failing only remove groups from the count.
Nothing is dropped for its age. The same count holds for a group readmitted at floor v: later ordinals are in 3,
whenever they were admitted. Example: B = 8, S = 1, W = 5 gives N = 16 - 4 = 12 and floor((12 + 5 - 2) / 8) = 1; one
slot more would give floor(16 / 8) = 2.

Liveness. When all batches are committed everywhere, all N held slots belong to groups that are not taken. Once they
have all finished the window covers them one after the other, so a batch is available if N >= B, that is if
W <= S * B + 1. S = 0 forces W = 1 and N = B: the synchronous loop.

While one batch trains, N - B = S*B - (W - 1) groups can be in generation: a wide window costs lead. At the widest,
W = S * B + 1, none can, and the loop is synchronous again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollouts.slot_state import SlotState


class SlotsError(RuntimeError):
    """The controller asked for something that its state does not allow; the message says what."""


class StaleGeneratorError(SlotsError):
    """A generator wants to join with weights older than the slowest live generator's: send it newer ones first."""


class ConservationError(AssertionError):
    """Groups were lost or counted twice; the message holds all the numbers."""


class StalenessError(AssertionError):
    """A token is older than allowed, or younger than the weights that train it."""


def slot_count(groups_per_step: int, max_staleness: int, window: int) -> int:
    """N = (S + 1) * B - (W - 1).

    Raises:
        ValueError: B < 1, S < 0, W < 1, or W > S * B + 1 (a batch could never fill).
    """
    if groups_per_step < 1 or max_staleness < 0 or window < 1:
        raise ValueError(f"need groups >= 1, max_steps >= 0, window >= 1: {groups_per_step}, {max_staleness}, {window}")
    if window > max_staleness * groups_per_step + 1:
        raise ValueError(
            f"staleness.window={window} leaves fewer slots than the {groups_per_step} groups of a step: "
            f"it may be at most max_steps * groups + 1 = {max_staleness * groups_per_step + 1}"
        )
    return (max_staleness + 1) * groups_per_step - (window - 1)


class Slots:
    """The state machine; see the module's docstring for its rules. No clock, no I/O; every call is O(1) or O(B + W)."""

    def __init__(self, groups_per_step: int, max_staleness: int, window: int) -> None:
        """See :func:`slot_count` for what is refused."""
        self.n_slots = slot_count(groups_per_step, max_staleness, window)
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.window = window
        self._next_ordinal = 0
        self._version = 0  # of the next batch to be taken
        self._floor = 0  # the slowest live generator's version; never falls
        self._held = 0
        self._open: dict[int, bool] = {}  # ordinal -> finished; in order of ordinals
        self._buffered = 0
        self._waiting: set[int] = set()  # in flight, but not to be dispatched yet
        self._batches: dict[int, list[int]] = {}  # version -> ordinals, slots still held
        self._untrained: dict[int, int] = {}  # version -> groups in training
        self._trained = 0
        self._skipped: Counter[str] = Counter()
        self._filtered: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._live: dict[str, int] = {}

    # groups

    def admit(self) -> int | None:
        """Take a slot for a new group; its ordinal, or None while all slots are held or a group waits."""
        if self._held >= self.n_slots or self._waiting:
            return None
        ordinal = self._next_ordinal
        self._next_ordinal = ordinal + 1
        self._open[ordinal] = False
        self._held += 1
        return ordinal

    def readmit(self) -> int | None:
        """Take a slot for the oldest waiting group and dispatch it again; None if there is none or it must wait on."""
        if not self._waiting:
            return None
        ordinal = min(self._waiting)
        if not self._may_sample(ordinal):
            return None
        self._hold(ordinal)
        return ordinal

    def finish(self, ordinal: int) -> None:
        """All samples of an in-flight group are there and scored: it may be taken."""
        if self._open.get(ordinal, True):
            raise SlotsError(f"group {ordinal} cannot finish: it is {self.where(ordinal)}")
        self._hold(ordinal)
        self._open[ordinal] = True
        self._buffered += 1

    def filter(self, ordinal: int, reason: str) -> None:
        """Drop a group that has nothing to teach; its slot is free at once."""
        self._remove(ordinal)
        self._filtered[reason] += 1

    def fail(self, ordinal: int, reason: str) -> None:
        """Give a group up for good; its slot is free at once."""
        self._remove(ordinal)
        self._failed[reason] += 1

    def take(self) -> list[int] | None:
        """The B groups of the next batch in order of ordinals, or None while the window does not hold B.

        The batch gets number ``version`` as read before the call.
        """
        if self._buffered < self.groups_per_step:
            return None
        picked: list[int] = []
        last = None  # of the window; open until the first unfinished group becomes the head
        for ordinal, finished in self._open.items():
            if last is not None and ordinal > last:
                return None
            if finished:
                picked.append(ordinal)
                if len(picked) == self.groups_per_step:
                    break
            elif last is None:
                last = ordinal + self.window - 1
        else:
            return None
        for ordinal in picked:
            del self._open[ordinal]
        self._buffered -= len(picked)
        self._batches[self._version] = picked
        self._untrained[self._version] = len(picked)
        self._version += 1
        return picked

    def mark_trained(self, version: int) -> None:
        """The optimizer stepped on the batch of ``version``."""
        self._trained += self._resolve(version)

    def mark_skipped(self, version: int, reason: str) -> None:
        """The step on the batch of ``version`` was skipped: the version moves, the weights do not."""
        self._skipped[reason] += self._resolve(version)

    def where(self, ordinal: int) -> str:
        """In words, for messages: in flight, buffered, in batch v, or no longer here."""
        if ordinal in self._open:
            return "buffered" if self._open[ordinal] else "in flight"
        for version, ordinals in self._batches.items():
            if ordinal in ordinals:
                return f"in batch {version}"
        return "no longer here" if ordinal < self._next_ordinal else "not admitted"

    # generators

    def join(self, name: str, version: int) -> None:
        """A generator that holds ``version`` starts to serve.

        Raises:
            StaleGeneratorError: ``version`` is older than the slowest live generator's.
            SlotsError: the name is live already, or the version does not exist yet.
        """
        if name in self._live:
            raise SlotsError(f"generator {name} is live already")
        if version > self._version:
            raise SlotsError(f"generator {name} joins with version {version}, but only {self._version} batches exist")
        if version < self._floor:
            raise StaleGeneratorError(
                f"generator {name} joins with version {version}, older than the slowest live one ({self._floor})"
            )
        self._live[name] = version
        self._raise_floor()

    def leave(self, name: str) -> None:
        """A generator died or was removed; it no longer holds slots back."""
        if self._live.pop(name, None) is None:
            raise SlotsError(f"generator {name} is not live")
        self._raise_floor()

    def committed(self, name: str, version: int) -> None:
        """A live generator now samples with ``version``."""
        held = self._live.get(name)
        if held is None:
            raise SlotsError(f"generator {name} is not live")
        if not held <= version <= self._version:
            raise SlotsError(f"generator {name} goes from version {held} to {version}; {self._version} batches exist")
        self._live[name] = version
        self._raise_floor()

    @property
    def generators(self) -> dict[str, int]:
        """Live generators and the version each holds."""
        return dict(self._live)

    @property
    def floor(self) -> int:
        """The version of the slowest live generator; frozen while none is live."""
        return self._floor

    # numbers

    @property
    def version(self) -> int:
        """Batches taken so far, which is the number of the next one."""
        return self._version

    @property
    def free(self) -> int:
        """Slots that ``admit`` can still give out; 0 also while groups wait or a resumed run holds more than N."""
        return 0 if self._waiting else max(0, self.n_slots - self._held)

    @property
    def head(self) -> int:
        """The oldest group not taken, filtered or failed; the next ordinal if there is none."""
        return next(iter(self._open), self._next_ordinal)

    def in_flight(self) -> list[int]:
        """Ordinals that are admitted and not finished."""
        return [ordinal for ordinal, finished in self._open.items() if not finished]

    @property
    def waiting(self) -> set[int]:
        """Groups in flight that must not be dispatched before ``readmit`` gives them out."""
        return set(self._waiting)

    def counters(self) -> dict[str, Any]:
        """The terms of the conservation law, and the slots."""
        return {
            "dispatched": self._next_ordinal,
            "trained": self._trained,
            "skipped": dict(self._skipped),
            "filtered": dict(self._filtered),
            "failed": dict(self._failed),
            "buffered": self._buffered,
            "in_training": sum(self._untrained.values()),
            "in_flight": len(self._open) - self._buffered,
            "slots_held": self._held,
            "slots": self.n_slots,
        }

    def check_conservation(self) -> None:
        """dispatched = trained + skipped + filtered + failed + buffered + in training + in flight.

        Slots are counted apart from states, and must agree with them too. Raises ConservationError with the numbers.
        """
        buffered = sum(self._open.values())
        in_flight = len(self._open) - buffered
        taken = sum(map(len, self._batches.values()))
        ended = self._trained + sum((self._skipped + self._filtered + self._failed).values())
        accounted = ended + buffered + in_flight + sum(self._untrained.values())
        held = len(self._open) - len(self._waiting) + taken
        if accounted != self._next_ordinal or buffered != self._buffered or held != self._held:
            raise ConservationError(f"{accounted} groups accounted for, {taken} taken slots: {self.counters()}")

    # restart

    def snapshot(self) -> SlotState:
        """Everything but the live generators, which have to join again."""
        return SlotState(
            version=self._version,
            floor=self._floor,
            next_ordinal=self._next_ordinal,
            open=dict(self._open),
            batches={version: list(ordinals) for version, ordinals in self._batches.items()},
            untrained=dict(self._untrained),
            trained=self._trained,
            skipped=dict(self._skipped),
            filtered=dict(self._filtered),
            failed=dict(self._failed),
        )

    @classmethod
    def restore(cls, groups_per_step: int, max_staleness: int, window: int, state: SlotState) -> Slots:
        """Go on from ``state``. After cuts were abandoned it may have more than N groups open; some then wait.

        The bound survives: a group still has at most the same groups before it. It does not survive a change of B, S
        or W with groups outstanding, which the caller must refuse.
        """
        slots = cls(groups_per_step, max_staleness, window)
        slots._version, slots._floor, slots._next_ordinal = state.version, state.floor, state.next_ordinal
        slots._open = dict(sorted(state.open.items()))
        slots._buffered = sum(slots._open.values())
        slots._batches = {version: list(ordinals) for version, ordinals in sorted(state.batches.items())}
        slots._untrained = dict(sorted(state.untrained.items()))
        slots._waiting = {ordinal for ordinal in slots.in_flight() if not slots._may_sample(ordinal)}
        slots._held = len(slots._open) - len(slots._waiting) + sum(map(len, slots._batches.values()))
        slots._trained = state.trained
        slots._skipped, slots._filtered = Counter(state.skipped), Counter(state.filtered)
        slots._failed = Counter(state.failed)
        slots.check_conservation()
        return slots

    def _may_sample(self, ordinal: int) -> bool:
        """Whether at most N - 1 groups can be trained before this one, apart from those the floor has seen."""
        before = sum(map(len, self._batches.values())) + sum(1 for other in self._open if other < ordinal)
        return before < self.n_slots

    def _hold(self, ordinal: int) -> None:
        if ordinal in self._waiting:
            self._waiting.remove(ordinal)
            self._held += 1

    def _remove(self, ordinal: int) -> None:
        finished = self._open.pop(ordinal, None)
        if finished is None:
            raise SlotsError(f"group {ordinal} cannot be dropped: it is {self.where(ordinal)}")
        self._hold(ordinal)
        self._buffered -= finished
        self._held -= 1

    def _resolve(self, version: int) -> int:
        if version not in self._untrained:
            raise SlotsError(f"batch {version} is not in training; {list(self._untrained)} are")
        return self._untrained.pop(version)

    def _raise_floor(self) -> None:
        if not self._live:
            return
        self._floor = min(self._live.values())
        while self._batches:
            version = next(iter(self._batches))
            if version >= self._floor:
                return
            self._held -= len(self._batches.pop(version))


def age_of_tokens(versions: Iterable[NDArray[np.int32]], version: int, max_staleness: int) -> tuple[int, float]:
    """Largest and mean age, in steps, of the tokens of one batch that trains at ``version``.

    Args:
        versions: one array (T,) a sample.

    Raises:
        StalenessError: a token is older than ``max_staleness``, or was sampled by weights that do not exist yet.
    """
    arrays = [np.asarray(array) for array in versions]
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    if tokens.size == 0:
        return 0, 0.0
    oldest, youngest = version - int(tokens.min()), version - int(tokens.max())
    if oldest > max_staleness or youngest < 0:
        raise StalenessError(
            f"batch {version} holds tokens sampled by versions {tokens.min()} to {tokens.max()}; allowed are "
            f"{version - max_staleness} to {version}"
        )
    return oldest, float(version - tokens.mean(dtype=np.float64))
