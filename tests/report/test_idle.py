import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.report.idle import LATE_S, BusyMeter, idle_share

TIMES = st.integers(0, 60)
INTERVALS = st.lists(st.tuples(TIMES, TIMES).map(sorted), max_size=30)


class FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def covered(intervals, start, end) -> int:
    """Busy unit seconds, counted one by one."""
    return sum(any(a <= t < b for a, b in intervals) for t in range(start, end))


@given(INTERVALS, TIMES, TIMES)
def test_busy_time_is_the_union_of_intervals_in_any_order(intervals, origin, length):
    clock = FakeClock(origin)
    meter = BusyMeter(clock)
    meter.start()
    for start, end in intervals:
        meter.add(start, end)
    clock.now = origin + length
    meter.stop()
    clock.now += 7
    assert meter.measure() == (covered(intervals, origin, origin + length), length)


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "add", "measure"]), st.integers(0, 9)), max_size=60),
    st.integers(0, 20),
)
def test_nested_begins_late_intervals_and_repeated_reading_agree_with_counting(actions, origin):
    clock, meter, depth, since, intervals = FakeClock(0), None, 0, 0, []
    meter = BusyMeter(clock)
    meter.start(origin)
    for action, number in actions:
        clock.now += number
        if action == "begin":
            meter.begin()
            since = since if depth else clock.now
            depth += 1
        elif action == "end" and depth:
            meter.end()
            depth -= 1
            if not depth:
                intervals.append((since, clock.now))
        elif action == "add":
            intervals.append((max(0, clock.now - 2 * number), max(0, clock.now - number)))
            meter.add(*intervals[-1])
        if action == "measure" or (action, number) == actions[-1]:
            now = int(clock.now)
            want = covered([*intervals, (since, now)] if depth else intervals, origin, now)
            assert meter.measure() == (want, max(0, now - origin))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80))
def test_folding_old_intervals_changes_no_sum_and_bounds_the_memory(gaps):
    clock = FakeClock(0)
    meter = BusyMeter(clock)
    meter.start()
    busy = 0
    for gap in gaps:
        clock.now += gap
        meter.begin()
        clock.now += gap
        busy += gap
        meter.end()
        assert meter.measure()[0] == busy
    assert len(meter._starts) <= LATE_S / 2 + 1  # every gap is at least one second here


def test_an_interval_across_the_horizon_is_counted_once():
    clock = FakeClock(0)
    meter = BusyMeter(clock)
    meter.start()
    meter.add(0, 1000)
    clock.now = 1200
    assert meter.measure() == (1000, 1200)
    meter.add(900, 1100)
    assert meter.measure() == (1100, 1200)


def test_the_docstring_example():
    clock = FakeClock(0)
    meter = BusyMeter(clock)
    meter.start()
    meter.add(0, 4)
    meter.add(3, 6)
    clock.now = 10
    assert idle_share([meter]) == pytest.approx(0.4)


def test_several_actors_share_one_figure_weighted_by_their_spans():
    clock = FakeClock(0)
    early, late = BusyMeter(clock), BusyMeter(clock)
    early.start()
    early.begin()
    clock.now = 8
    late.start()
    clock.now = 10
    assert idle_share([early, late]) == pytest.approx(1 - 10 / 12)


def test_nothing_before_the_span_and_no_share_without_one():
    clock = FakeClock(5)
    meter = BusyMeter(clock)
    meter.begin()
    assert meter.measure() == (0, 0)
    assert idle_share([meter]) is None
    clock.now = 9
    meter.start()
    clock.now = 10
    assert meter.measure() == (1, 1)


def test_misuse_is_an_error():
    with pytest.raises(RuntimeError):
        BusyMeter().end()
    with pytest.raises(ValueError):
        BusyMeter().add(2, 1)
