"""``<run>/metrics.jsonl``: one JSON object a step, only declared keys, only finite numbers.

Invariants
    - A line is in the file whole or not at all: it is one ``write`` on a descriptor opened for appending, and what
      a full disk accepted of it is cut off again. A torn last line of an earlier attempt is cut off when opening.
    - A file system that refuses a line costs that line (``lost_lines`` counts it), never the run: the ledger, not
      this file, is the record that training depends on.
    - fsync at most every ``FSYNC_EVERY_S`` and on close: a killed process loses nothing, a power cut 30 s.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.report.keys import declared

FSYNC_EVERY_S = 30.0
Value = float | int | str | None


def plain_value(key: str, value: Any) -> tuple[Value, bool]:
    """``value`` as JSON can hold it, and whether it was a non-finite number (then it is None).

    Python and numpy numbers and None (not measured) are accepted, text only where the registry says so.

    Raises:
        UndeclaredMetric: ``key`` is not in the registry.
        TypeError: a value of another type (a tensor, a list, a number where text is declared).
    """
    text = declared(key).unit == "text"
    if value is None:
        return None, False
    if isinstance(value, str) and text:
        return value, False
    if text or not isinstance(value, numbers.Real):
        wanted = "text" if text else "a number"
        raise TypeError(f"metric {key!r} must be {wanted}, not {type(value).__name__}")
    if isinstance(value, numbers.Integral):
        return int(value), False
    number = float(value)
    return (number, False) if math.isfinite(number) else (None, True)


class MetricsWriter:
    """Appends to one ``metrics.jsonl``.

    Args:
        path: the file; created if absent, continued if present.
        clock: monotonic seconds, for the fsync policy.
        on_lost: called with the reason each time a line is lost.
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.path = path
        self.nonfinite = 0
        self.lost_lines = 0
        self._clock = clock
        self._on_lost = on_lost
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = _cut_torn_tail(self._fd)
        self._synced_at = clock()

    def write(self, metrics: Mapping[str, Any]) -> dict[str, Value]:
        """Check and append one object; returns it as written (non-finite numbers are None).

        Raises:
            UndeclaredMetric, TypeError: see ``plain_value``. Nothing is written then.
        """
        record: dict[str, Value] = {}
        nonfinite = 0
        for key, value in metrics.items():
            record[key], bad = plain_value(key, value)
            nonfinite += bad
        self.nonfinite += nonfinite
        if self.nonfinite:
            record["report/nonfinite"] = self.nonfinite
        if self.lost_lines:
            record["report/lost_lines"] = self.lost_lines
        self._append((json.dumps(record, allow_nan=False) + "\n").encode())
        return record

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                os.ftruncate(self._fd, self._size)
                raise OSError(f"only {written} of {len(line)} bytes fitted")
            self._size += written
            if self._clock() - self._synced_at >= FSYNC_EVERY_S:
                self._sync()
        except OSError as error:
            self.lost_lines += 1
            self._on_lost(f"{self.path.name}: line lost: {error}")

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced_at = self._clock()

    def close(self) -> None:
        """fsync and close; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self._sync()
        except OSError as error:
            self._on_lost(f"{self.path.name}: not on disk: {error}")
        finally:
            os.close(self._fd)
            self._fd = -1


def _cut_torn_tail(fd: int) -> int:
    """Truncate an unfinished last line (a write cut short by a full disk or a power cut); returns the size."""
    size = os.fstat(fd).st_size
    end = size
    while end:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        os.ftruncate(fd, end)
    return end


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a ``metrics.jsonl`` in file order; a torn last line is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One record a step, in step order: what the surviving history looks like.

    An evaluation's line is merged into its step; of a step done again after a resume the later attempt counts.
    """
    return merge_steps(read_lines(path))


def merge_steps(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """See ``read_metrics``."""
    steps: dict[int, dict[str, Any]] = {}
    for line in lines:
        old = steps.get(line["step"], {})
        if "step_s" in line:  # the step itself; done again, it replaces all but the evaluation of the same weights
            merged = {key: value for key, value in old.items() if key.startswith("eval/")} | line
        else:
            merged = {**line, **old, **{key: value for key, value in line.items() if key.startswith("eval/")}}
        steps[line["step"]] = merged
    return [steps[step] for step in sorted(steps)]
