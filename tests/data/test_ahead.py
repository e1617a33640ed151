"""Batches read ahead by a thread: the same batches, and nobody learns from outside that there is one."""

from __future__ import annotations

import signal
import threading

import pytest

from asyncrl.data.ahead import Ahead
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.mixture import Mixture
from tests.data.test_mixture import Numbers, text

WAIT_S = 30.0  # for what must happen, however slow the machine


def stream(skip=False, bad=frozenset({3}), error=DataError) -> Mixture:
    return Mixture(
        [Numbers("a", 7, bad if skip or error is SourceError else frozenset()), Numbers("b", 5)], [2, 1], 4, skip
    )


def reader() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "read ahead"]


class Counting:
    """An encoder that says how many examples it was given, and can be held up."""

    def __init__(self) -> None:
        self.seen, self.changed, self.open = 0, threading.Condition(), threading.Event()
        self.open.set()

    def __call__(self, example) -> str:
        assert self.open.wait(WAIT_S)
        with self.changed:
            self.seen += 1
            self.changed.notify_all()
        return text(example)

    def wait_for(self, seen: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.seen >= seen, WAIT_S)


def test_batches_positions_and_metrics_are_those_of_the_stream_itself():
    plain, count = stream(skip=True), Counting()
    with Ahead(stream(skip=True), 4, count, 9, WAIT_S) as batches:
        assert batches.position() == plain.position()
        for step in range(9):
            count.wait_for(4 * min(9, step + 2))  # more was read than is told
            assert batches.take() == plain.take(4, text)
            assert batches.position() == plain.position()
            told = batches.metrics()
            assert told.pop("time/batch_wait_s") >= 0 and told == plain.metrics()
    assert plain.skipped and not reader()


@pytest.mark.parametrize("taken", range(5))
def test_a_position_goes_on_with_the_batch_that_was_not_taken(taken):
    whole = [stream(skip=True)]
    steps = [whole[0].take(3, text) for _ in range(6)]
    count = Counting()
    with Ahead(stream(skip=True), 3, count, 6, WAIT_S) as batches:
        for _ in range(taken):
            batches.take()
        count.wait_for(3 * (taken + 1))
        position = batches.position()
    again = stream(skip=True)
    again.seek(position)
    assert [again.take(3, text) for _ in range(taken, 6)] == steps[taken:]


def test_so_many_are_read_ahead_and_no_more_than_there_are_steps():
    source, count = stream(), Counting()
    with Ahead(source, 4, count, 7, WAIT_S, depth=2) as batches:
        count.wait_for(12)  # two wait, the third is in hand
        for _ in range(7):
            batches.take()
            assert sum(source.given) <= 4 * 7
        with pytest.raises(ValueError, match="after the last one"):
            batches.take()
    assert sum(source.given) == 4 * 7


def test_no_more_than_depth_wait():
    source = stream()
    with Ahead(source, 4, text, 50, WAIT_S, depth=2) as batches:
        for step in range(50):
            batches.take()
            assert sum(source.given) <= 4 * (step + 1 + 3)  # two wait, one is in hand


@pytest.mark.parametrize("error", [DataError, KeyError, SystemExit])
def test_an_error_arrives_with_the_batch_that_it_spoils(error):
    plain, count = stream(), Counting()
    expected = [plain.take(3, text) for _ in range(4)]

    def encode(example):
        if count.seen == 13:  # in the fifth batch
            raise error("a", "b", "c") if error is DataError else error("it")
        return count(example)

    with Ahead(stream(), 3, encode, 9, WAIT_S, depth=8) as batches:
        count.wait_for(13)
        assert [batches.take() for _ in range(4)] == expected
        position = batches.position()
        for _ in range(2):  # whoever asks again is told again
            with pytest.raises(error):
                batches.take()
        assert batches.position() == position == plain.position()
    assert not reader()


def test_an_error_that_no_step_reaches_is_none():
    plain = stream()
    count = Counting()

    def encode(example):
        if count.seen == 7:
            raise KeyError("it")
        return count(example)

    with Ahead(stream(), 3, encode, 9, WAIT_S, depth=8) as batches:
        count.wait_for(7)
        assert [batches.take(), batches.take()] == [plain.take(3, text), plain.take(3, text)]


def test_a_source_without_one_good_record_is_told_at_its_step():
    hopeless = stream(skip=True, bad=frozenset(range(7)))
    with Ahead(hopeless, 1, text, 9, WAIT_S) as batches, pytest.raises(SourceError, match="none of its 7 records"):
        batches.take()


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("steps", [3, 50], ids=["all taken", "more would come"])
def test_the_thread_ends_with_the_block(steps, error):
    source = stream()

    def leave():
        with Ahead(source, 4, text, steps, WAIT_S, depth=2) as batches:
            for _ in range(3):
                batches.take()
            if error:
                raise error

    if error:
        with pytest.raises(error):
            leave()
    else:
        leave()
    drawn = sum(source.given)
    assert not reader() and drawn <= 4 * min(steps, 3 + 3)


def test_an_abandoned_batch_is_not_drawn_to_its_end():
    count, source = Counting(), Mixture([Numbers("a", 10**6)], [1], 0)
    with Ahead(source, 10**6, count, 1, WAIT_S):
        count.wait_for(5)
    assert not reader() and sum(source.given) < 10**6


def test_an_interrupt_while_it_waits_leaves_the_block():
    count = Counting()
    count.open.clear()

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        count.open.set()

    with Ahead(stream(), 4, count, 9, WAIT_S) as batches, pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, interrupt).start()
        batches.take()
        threading.Event().wait(WAIT_S)  # should it come later
    assert not reader()


def test_a_batch_that_does_not_come_is_an_error_that_names_its_record():
    count = Counting()
    count.open.clear()
    source = stream()
    with Ahead(source, 4, count, 9, 0.1) as batches:
        with pytest.raises(
            SourceError, match=r"a: a step waited 0\.1 s for its batch; record \d, counted from 0, is in hand"
        ):
            batches.take()
        count.open.set()
    assert not reader()
