"""How much of the training span an actor stood idle.

``BusyMeter`` keeps the union of an actor's busy intervals: a generator is busy while it holds at least one request,
a trainer while it computes a step. Intervals may overlap, nest and arrive late, because messages report them; only
their union counts. The clock is passed in, so the same code runs on a fake one.

Example: a span that started at 0, busy in [0, 4] and [3, 6], asked at 10: 4 of 10 seconds idle, share 0.4.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable

Clock = Callable[[], float]
LATE_S = 600.0  # an interval reported later than this after its end is not counted


class BusyMeter:
    """The union of one actor's busy intervals since ``start``, in seconds of ``clock``.

    ``begin``/``end`` nest (one pair a request); ``add`` takes an interval that is over. Before ``start`` nothing is
    counted. Memory is one entry a gap of the last ``LATE_S`` seconds: older ones are folded into their sum.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._starts: list[float] = []  # disjoint and sorted, and so are the ends
        self._ends: list[float] = []
        self._depth = 0  # begun and not ended
        self._since = 0.0  # start of what is begun and not yet added
        self._folded = 0.0  # busy seconds between origin and horizon
        self._origin: float | None = None
        self._horizon = float("-inf")
        self._stopped: float | None = None

    def start(self, at: float | None = None) -> None:
        """The training span starts, or the actor joins it; what was busy before no longer counts."""
        at = self._clock() if at is None else at
        self._fold(at)
        self._folded, self._origin, self._stopped = 0.0, at, None

    def stop(self, at: float | None = None) -> None:
        """The actor left for good or the span ended; later time is neither busy nor idle."""
        self._stopped = self._clock() if at is None else at

    def begin(self) -> None:
        """One more reason to be busy."""
        if not self._depth:
            self._since = self._clock()
        self._depth += 1

    def end(self) -> None:
        """One reason less.

        Raises:
            RuntimeError: there is none.
        """
        if not self._depth:
            raise RuntimeError("BusyMeter.end without begin")
        self._flush()
        self._depth -= 1

    def add(self, start: float, end: float) -> None:
        """Add [start, end], in any order.

        Raises:
            ValueError: end before start.
        """
        if end < start:
            raise ValueError(f"busy interval ends before it starts: {start} to {end}")
        start = max(start, self._horizon)
        if end <= start:
            return
        # All stored intervals that touch [start, end] melt into one.
        low = bisect.bisect_left(self._ends, start)
        high = bisect.bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def measure(self) -> tuple[float, float]:
        """(busy seconds, span seconds) from ``start`` until now or ``stop``; (0, 0) before ``start``."""
        if self._origin is None:
            return 0.0, 0.0
        self._flush()
        now = self._clock()
        self._fold(min(now, now if self._stopped is None else self._stopped) - LATE_S)
        until = now if self._stopped is None else min(now, self._stopped)
        pairs = zip(self._starts, self._ends, strict=True)
        busy = self._folded + sum(max(0.0, min(end, until) - start) for start, end in pairs)
        return busy, max(0.0, until - self._origin)

    def _flush(self) -> None:
        if self._depth:
            now = self._clock()
            self.add(self._since, now)
            self._since = now

    def _fold(self, horizon: float) -> None:
        if horizon <= self._horizon:
            return
        self._flush()
        while self._starts and self._starts[0] < horizon:
            left, right = self._starts[0], self._ends[0]
            self._folded += min(right, horizon) - left
            if right > horizon:
                self._starts[0] = horizon
                break
            del self._starts[0], self._ends[0]
        self._horizon = horizon


def idle_share(meters: Iterable[BusyMeter]) -> float | None:
    """Idle seconds over span seconds of all ``meters`` together; None while no span has passed."""
    busy = span = 0.0
    for meter in meters:
        one_busy, one_span = meter.measure()
        busy, span = busy + one_busy, span + one_span
    return max(0.0, 1.0 - busy / span) if span > 0 else None
