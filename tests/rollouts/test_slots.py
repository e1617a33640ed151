"""asyncrl.rollouts.slots: the staleness bound, conservation and liveness, by hand and under random schedules."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from asyncrl.rollouts import slots as slots_module
from asyncrl.rollouts.slot_state import SlotState
from asyncrl.rollouts.slots import (
    ConservationError,
    Slots,
    SlotsError,
    StaleGeneratorError,
    StalenessError,
    age_of_tokens,
    slot_count,
)
from tests.rollouts.schedules import Schedule


def admitted(slots: Slots, count: int) -> list[int]:
    ordinals = [slots.admit() for _ in range(count)]
    assert None not in ordinals
    return [ordinal for ordinal in ordinals if ordinal is not None]


def random_schedules(seed: int, count: int, actions: int = 60, make=Slots) -> tuple[int, int]:
    """Batches trained, and in how many schedules the age S was reached."""
    random = Random(seed)
    batches = tight = 0
    for _ in range(count):
        groups, stale = random.randint(1, 4), random.randint(0, 3)
        window = random.randint(1, min(stale * groups + 1, 6))
        schedule = Schedule(make(groups, stale, window), random, random.randint(1, 3))
        schedule.run(actions)
        schedule.drain()
        batches += schedule.trained
        tight += schedule.oldest == stale
    return batches, tight


class TestByHand:
    def test_worked_example_of_the_docstring(self):
        assert slot_count(8, 1, 5) == 12
        assert slot_count(8, 1, 1) == 16
        assert slot_count(8, 0, 1) == 8

    @pytest.mark.parametrize("groups, stale, window", [(8, 0, 2), (8, 1, 10), (0, 1, 1), (1, -1, 1), (1, 1, 0)])
    def test_settings_that_cannot_work_are_refused(self, groups, stale, window):
        with pytest.raises(ValueError):
            slot_count(groups, stale, window)

    def test_the_largest_window_still_leaves_a_batch(self):
        assert slot_count(8, 2, 17) == 8

    def test_taking_frees_nothing_and_the_last_commit_frees_the_batch(self):
        slots = Slots(2, 0, 1)
        slots.join("a", 0)
        slots.join("b", 0)
        for ordinal in admitted(slots, 2):
            slots.finish(ordinal)
        assert slots.take() == [0, 1]
        assert slots.admit() is None
        slots.mark_trained(0)
        assert slots.admit() is None
        slots.committed("a", 1)
        assert slots.admit() is None
        assert slots.counters()["slots_held"] == 2
        slots.committed("b", 1)
        assert slots.free == 2
        assert slots.admit() == 2

    def test_a_commit_may_be_reported_before_the_step(self):
        slots = Slots(1, 0, 1)
        slots.join("a", 0)
        slots.finish(admitted(slots, 1)[0])
        slots.take()
        slots.committed("a", 1)
        assert slots.free == 1
        slots.mark_trained(0)
        assert slots.counters()["trained"] == 1
        slots.check_conservation()

    def test_only_the_window_may_overtake_the_head(self):
        slots = Slots(2, 2, 3)  # N = 4
        slots.join("a", 0)
        admitted(slots, 4)
        slots.finish(3)
        slots.finish(1)
        assert slots.take() is None  # 3 is behind the window [0, 2]
        slots.finish(2)
        assert slots.take() == [1, 2]  # which does not slide the window
        assert slots.head == 0
        slots.finish(0)
        assert slots.take() == [0, 3]

    def test_filtering_frees_at_once_and_slides_the_window(self):
        slots = Slots(1, 0, 1)
        slots.join("a", 0)
        admitted(slots, 1)
        slots.finish(0)
        slots.filter(0, "equal rewards")
        assert slots.admit() == 1
        slots.fail(1, "engine died 3 times")
        assert slots.head == 2
        counters = slots.counters()
        assert counters["filtered"] == {"equal rewards": 1} and counters["failed"] == {"engine died 3 times": 1}
        slots.check_conservation()

    def test_skipped_steps_count_by_reason_and_free_slots_like_others(self):
        slots = Slots(1, 0, 1)
        slots.join("a", 0)
        slots.finish(admitted(slots, 1)[0])
        slots.take()
        slots.mark_skipped(0, "gradient not finite")
        slots.committed("a", 1)
        assert slots.counters()["skipped"] == {"gradient not finite": 1}
        assert slots.free == 1

    def test_a_dead_generator_holds_nothing_back(self):
        slots = Slots(1, 0, 1)
        slots.join("a", 0)
        slots.join("slow", 0)
        slots.finish(admitted(slots, 1)[0])
        slots.take()
        slots.committed("a", 1)
        assert slots.free == 0
        slots.leave("slow")
        assert slots.free == 1

    def test_without_generators_nothing_is_freed_until_one_joins(self):
        slots = Slots(1, 0, 1)
        slots.join("a", 0)
        slots.finish(admitted(slots, 1)[0])
        slots.take()
        slots.leave("a")
        assert slots.free == 0
        slots.join("b", 1)
        assert slots.free == 1

    def test_a_generator_joins_only_with_weights_that_keep_the_bound(self):
        slots = Slots(1, 1, 1)
        slots.join("a", 0)
        with pytest.raises(SlotsError):
            slots.join("future", 1)
        slots.finish(admitted(slots, 1)[0])
        slots.take()
        slots.committed("a", 1)
        with pytest.raises(StaleGeneratorError):
            slots.join("b", 0)
        slots.leave("a")
        with pytest.raises(StaleGeneratorError):  # the last one's version still counts
            slots.join("b", 0)
        slots.join("b", 1)

    def test_contradictions_are_errors(self):
        slots = Slots(1, 1, 1)
        slots.join("a", 0)
        with pytest.raises(SlotsError):
            slots.join("a", 0)
        with pytest.raises(SlotsError):
            slots.leave("b")
        with pytest.raises(SlotsError):
            slots.committed("b", 0)
        with pytest.raises(SlotsError):
            slots.committed("a", 1)
        with pytest.raises(SlotsError, match="not admitted"):
            slots.finish(0)
        admitted(slots, 1)
        slots.finish(0)
        with pytest.raises(SlotsError, match="buffered"):
            slots.finish(0)
        slots.take()
        with pytest.raises(SlotsError, match="in batch 0"):
            slots.filter(0, "late")
        slots.mark_trained(0)
        with pytest.raises(SlotsError):
            slots.mark_skipped(0, "twice")

    def test_a_lost_group_is_noticed(self):
        slots = Slots(2, 1, 1)
        slots.join("a", 0)
        admitted(slots, 3)
        slots.check_conservation()
        slots._open.pop(1)
        with pytest.raises(ConservationError, match="'dispatched': 3"):
            slots.check_conservation()


class TestReadmission:
    """After a restart that went back to older weights more groups than slots may be open; see test_restarts."""

    def restored(self) -> Slots:
        # N = 4: 0 and 1 precede everything, 4 has 4 groups before it, 5 has 5
        state = SlotState(version=1, floor=1, next_ordinal=8, trained=2)
        state.open = {2: False, 3: True, 4: False, 5: True, 6: False, 7: False}
        slots = Slots.restore(2, 1, 1, state)
        slots.join("a", 1)
        return slots

    def test_a_group_waits_until_few_enough_are_before_it(self):
        slots = self.restored()
        assert slots.waiting == {6, 7}
        assert slots.readmit() is None and slots.admit() is None and slots.free == 0
        slots.finish(2)
        assert slots.take() == [2, 3]
        slots.mark_trained(1)
        assert slots.readmit() is None
        slots.committed("a", 2)
        assert slots.admit() is None  # the waiting come first
        assert [slots.readmit() for _ in range(3)] == [6, 7, None]
        assert slots.waiting == set()
        assert slots.admit() is None
        slots.check_conservation()

    def test_a_waiting_group_that_needs_nothing_more_may_finish_or_fail(self):
        slots = self.restored()
        slots.finish(6)
        slots.fail(7, "prompt gone")
        assert slots.waiting == set()
        slots.check_conservation()
        assert slots.counters()["slots_held"] == 5


class TestRandomSchedules:
    def test_bound_liveness_and_conservation(self):
        """slime #1800, #2278: no bound in asynchronous mode. slime #2238, NeMo #2651: groups dropped, slots leaked."""
        batches, tight = random_schedules(0, 100_000, actions=100)
        assert batches > 400_000
        assert tight > 30_000  # the bound is reached, so a looser one would be wrong

    @pytest.mark.slow
    def test_long_schedules(self):
        random_schedules(1, 20_000, actions=2_000)

    def test_restored_slots_keep_the_bound(self):
        random = Random(5)
        for _ in range(2_000):
            schedule = Schedule(Slots(2, 2, 3), random, 2)
            schedule.run(60)
            schedule.slots = Slots.restore(2, 2, 3, schedule.slots.snapshot())
            schedule.live.clear()
            schedule.holds.clear()
            schedule.rejoin()
            schedule.run(60)
            schedule.drain()

    @pytest.mark.parametrize("fault", ["one slot more", "window not paid for", "freed when taken", "any version joins"])
    def test_each_rule_is_needed(self, fault, monkeypatch):
        count = slots_module.slot_count

        class Broken(Slots):
            def take(self):
                ordinals = super().take()
                if ordinals and fault == "freed when taken":
                    self._held -= len(ordinals)
                    self._batches.pop(self._version - 1)
                return ordinals

            @property
            def floor(self):
                return 0 if fault == "any version joins" else super().floor

            def join(self, name, version):
                if fault == "any version joins":
                    self._floor = min(self._floor, version)
                super().join(name, version)

        if fault == "one slot more":
            monkeypatch.setattr(slots_module, "slot_count", lambda *args: count(*args) + 1)
        if fault == "window not paid for":
            monkeypatch.setattr(slots_module, "slot_count", lambda groups, stale, window: count(groups, stale, 1))
        with pytest.raises(StalenessError):
            random_schedules(2, 2_000, make=Broken)

    def test_one_slot_too_few_gets_stuck(self, monkeypatch):
        count = slots_module.slot_count
        monkeypatch.setattr(slots_module, "slot_count", lambda *args: count(*args) - 1)
        with pytest.raises(AssertionError, match="stuck"):
            random_schedules(3, 2_000)


class TestAge:
    def test_oldest_and_mean(self):
        assert age_of_tokens([np.array([3, 3]), np.array([4, 5])], 5, 2) == (2, 1.25)
        assert age_of_tokens([], 5, 0) == (0, 0.0)

    @pytest.mark.parametrize("version", [2, 6])
    def test_too_old_or_from_the_future(self, version):
        with pytest.raises(StalenessError):
            age_of_tokens([np.array([3, 3])], version, 2)
