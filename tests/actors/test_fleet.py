"""The fleet's books: what is owed, by whom, and what returns when a generator is lost."""

from __future__ import annotations

import pytest

from asyncrl.actors.fleet import Fleet


def live_fleet(*names: str) -> Fleet:
    fleet = Fleet()
    for name in names:
        fleet.join(name)
        assert fleet.committed(name, 0)
    return fleet


def test_a_generator_is_live_only_after_its_first_commit():
    fleet = Fleet()
    fleet.join("generator/0")
    assert not fleet.live and [e.name for e in fleet.joining] == ["generator/0"]
    assert fleet.committed("generator/0", 3)
    assert not fleet.committed("generator/0", 4)
    assert [e.version for e in fleet.live] == [4] and not fleet.joining


def test_work_goes_to_the_least_loaded_and_returns_when_it_is_lost():
    fleet = live_fleet("a", "b")
    assert fleet.assign(0, {0, 1, 2}) == "a"
    assert fleet.assign(1, {0, 1}) == "b"
    assert fleet.assign(2, {0}) == "b"
    assert fleet.received("b", 1, 0)
    assert fleet.in_flight == 5
    assert fleet.lose("b") == {1: {1}, 2: {0}}
    assert fleet.in_flight == 3
    assert fleet.lose("b") == {}


def test_a_sample_that_nobody_owes_is_a_repeat():
    fleet = live_fleet("a")
    fleet.assign(7, {0})
    assert not fleet.received("b", 7, 0)
    assert not fleet.received("a", 7, 1)
    assert fleet.received("a", 7, 0)
    assert not fleet.received("a", 7, 0)


def test_nothing_is_assigned_while_none_is_live():
    fleet = Fleet()
    fleet.join("a")
    with pytest.raises(ValueError):
        fleet.assign(0, {0})


def test_what_an_engine_has_proven_ends_with_its_process():
    fleet = live_fleet("a")
    fleet.serves("a", 4, "00ff")
    assert fleet.live[0].proven == (4, "00ff")
    fleet.lose("a")
    fleet.serves("a", 5, "00fe")  # said before it was lost
    fleet.join("a")
    fleet.committed("a", 5)
    assert fleet.live[0].proven is None
