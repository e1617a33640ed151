"""The next batches of a stream, drawn and encoded by a thread of their own while a step is learnt.

Invariants:
- what ``take`` gives, in which order, is what the stream alone would give;
- ``position`` and ``metrics`` are those after the last batch that was taken, whatever has been read since: a run that
  is resumed there learns every batch once;
- an error of the stream or of the encoder is raised by the ``take`` that would have returned the batch, no earlier;
- the thread ends with the ``with`` block, however that is left: between two examples.

The stream, and what encodes, belong to the thread until then: fast tokenizers raise when two threads use one, so who
needs another at the same time loads it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from asyncrl.data.errors import SourceError
from asyncrl.data.example import Example
from asyncrl.data.mixture import Mixture

T = TypeVar("T")
CLOSE_S = 10.0  # for the example in hand: a user's converter may take its time


@dataclass
class _Read(Generic[T]):
    """What one draw gave, and the stream after it."""

    batch: list[T]
    position: dict[str, Any]
    metrics: dict[str, int]
    error: BaseException | None = None


class _Closed(BaseException):
    """Nobody waits for the batch that is being drawn."""


class Ahead(Generic[T]):
    """``batches`` batches of ``size`` examples of ``stream``, of which up to ``depth`` wait; a context manager."""

    def __init__(
        self,
        stream: Mixture,
        size: int,
        encode: Callable[[Example], T],
        batches: int,
        deadline_s: float,
        depth: int = 2,
    ) -> None:
        """``deadline_s``: of a wait for a batch."""
        self._stream, self._size, self._encode, self._deadline_s = stream, size, encode, deadline_s
        self._left, self._depth = batches, depth
        self._last: _Read[T] = self._state([])
        self._ready: deque[_Read[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._waited_s = 0.0  # for the last batch
        # A daemon: a converter that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._read, name="read ahead", args=(batches,), daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def take(self) -> list[T]:
        """The next batch, waited for. Raises what drawing it raised, again in every later call.

        Raises ``SourceError`` naming the record in hand if the batch does not come in time.
        """
        if not self._left or self._closed:
            raise ValueError("a batch is taken after the last one")
        began = time.perf_counter()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready, self._deadline_s):
                name, record = self._stream.at
                raise SourceError(
                    name,
                    f"a step waited {self._deadline_s:g} s for its batch; record {record}, counted from 0, is in hand",
                    "see what its converter, its scorer or its disk waits for, or raise deadline.batch_s",
                )
            found = self._ready[0]
            if found.error is not None:
                raise found.error
            self._ready.popleft()
            self._changed.notify_all()
        self._last, self._left = found, self._left - 1
        self._waited_s = time.perf_counter() - began
        return found.batch

    def position(self) -> dict[str, Any]:
        """Of the stream after the last batch that was taken, for a checkpoint."""
        return self._last.position

    def metrics(self) -> dict[str, float]:
        """Of the stream at the same place, and how long ``take`` waited for it, under declared keys."""
        return {**self._last.metrics, "time/batch_wait_s": self._waited_s}

    # ---- in the thread ------------------------------------------------------------------------------------------

    def _read(self, batches: int) -> None:
        try:
            for _ in range(batches):
                self._put(self._state(self._stream.take(self._size, self._unless_closed)))
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the ``take`` that it spoils
            self._put(_Read([], {}, {}, error))

    def _state(self, batch: list[T]) -> _Read[T]:
        return _Read(batch, self._stream.position(), self._stream.metrics())

    def _unless_closed(self, example: Example) -> T:
        if self._closed:
            raise _Closed
        return self._encode(example)

    def _put(self, read: _Read[T]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
            self._ready.append(read)
            self._changed.notify_all()
