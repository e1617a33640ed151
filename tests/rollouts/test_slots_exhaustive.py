"""Every reachable state of small settings of asyncrl.rollouts.slots, up to a shift of ordinals and versions.

In each state every action that the rules allow is tried. Shown for each setting: the bound is never exceeded and is
reached, and from no state is the loop stuck: some action other than filtering, failing, joining or leaving is enabled
whenever a generator is live.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import pytest

from asyncrl.rollouts import slots as slots_module
from asyncrl.rollouts.slots import Slots, StalenessError


class State:
    """Slots, how many batches were trained, and the version of the oldest token that each open group can have."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.trained = 0
        self.sampled_by: dict[int, int] = {}
        self.age = 0  # of the batch that was taken last

    def copy(self) -> State:
        new = copy.copy(self)
        new.sampled_by = dict(self.sampled_by)
        new.slots = copy.copy(self.slots)
        for name, value in vars(self.slots).items():
            if isinstance(value, dict):
                setattr(new.slots, name, value.copy())
        return new

    def key(self) -> tuple:
        slots, floor = self.slots, self.slots.floor
        ordinals = [*slots._open, slots._next_ordinal]
        # a gap of W or more (left by failed groups) is as good as W: the window ends before it in any case
        gaps = tuple(min(later - earlier, slots.window) for earlier, later in pairwise(ordinals))
        return (
            gaps,
            tuple((done, self.sampled_by[ordinal] - floor) for ordinal, done in slots._open.items()),
            tuple(version - floor for version in slots._batches),
            self.trained - floor,
            slots.version - floor,
            tuple(sorted((name, version - floor) for name, version in slots.generators.items())),
        )


def successors(state: State, names: list[str]) -> Iterator[tuple[str, State]]:
    """(kind, state) for every enabled action; kinds in capitals move the loop forward."""
    slots = state.slots
    if slots.generators:
        new = state.copy()
        ordinal = new.slots.admit()
        if ordinal is not None:
            new.sampled_by[ordinal] = slots.floor
            yield "ADMIT", new
        for ordinal in slots.in_flight():
            new = state.copy()
            new.slots.finish(ordinal)
            yield "FINISH", new
    for ordinal in state.sampled_by:
        new = state.copy()
        new.slots.fail(ordinal, "any")
        del new.sampled_by[ordinal]
        yield "fail", new
    new = state.copy()
    taken = new.slots.take()
    if taken is not None:
        new.age = max(slots.version - new.sampled_by.pop(ordinal) for ordinal in taken)
        yield "TAKE", new
    if state.trained < slots.version:
        new = state.copy()
        new.slots.mark_trained(state.trained)
        new.trained += 1
        yield "TRAIN", new
    for name in names:
        held = slots.generators.get(name)
        for version in range(slots.floor if held is None else held + 1, state.trained + 1):
            new = state.copy()
            if held is None:
                new.slots.join(name, version)
                yield "join", new
            else:
                new.slots.committed(name, version)
                yield "COMMIT", new
        if held is not None:
            new = state.copy()
            new.slots.leave(name)
            yield "leave", new


def explore(groups: int, stale: int, window: int, generators: int) -> tuple[int, int]:
    """(states, largest age)."""
    names = [f"g{number}" for number in range(generators)]
    start = State(Slots(groups, stale, window))
    start.slots.join(names[0], 0)
    seen, queue, oldest = {start.key()}, deque([start]), 0
    while queue:
        state = queue.popleft()
        state.slots.check_conservation()
        moving = False
        for kind, new in successors(state, names):
            moving = moving or kind.isupper()
            if new.age > stale:
                raise StalenessError(f"age {new.age} after {kind}")
            oldest = max(oldest, new.age)
            key = new.key()
            if key not in seen:
                seen.add(key)
                queue.append(new)
        assert moving or not state.slots.generators, f"stuck: {state.slots.counters()}"
    return len(seen), oldest


@pytest.mark.parametrize(
    "groups, stale, window, generators",
    [(1, 0, 1, 2), (2, 0, 1, 2), (1, 1, 1, 2), (1, 2, 2, 2), (1, 3, 2, 2), (2, 1, 1, 2), (2, 1, 2, 3), (2, 2, 4, 1)],
)
def test_no_state_is_too_old_or_stuck(groups, stale, window, generators):
    states, oldest = explore(groups, stale, window, generators)
    assert states > 20
    assert oldest == stale


@pytest.mark.parametrize("groups, stale, generators", [(1, 1, 2), (2, 1, 2), (3, 1, 1)])
def test_the_largest_window_is_alive_but_synchronous(groups, stale, generators):
    assert explore(groups, stale, stale * groups + 1, generators)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("groups, stale, window, generators", [(2, 2, 2, 2), (3, 1, 3, 2), (2, 3, 5, 2), (1, 3, 1, 3)])
def test_larger_settings(groups, stale, window, generators):
    assert explore(groups, stale, window, generators)[1] == stale


@pytest.mark.parametrize("groups, stale, window", [(1, 1, 1), (1, 1, 2), (2, 1, 3), (2, 1, 2)])
def test_one_slot_more_breaks_the_bound(groups, stale, window, monkeypatch):
    count = slots_module.slot_count
    monkeypatch.setattr(slots_module, "slot_count", lambda *args: count(*args) + 1)
    with pytest.raises(StalenessError):
        explore(groups, stale, window, 1)
