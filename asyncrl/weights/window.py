"""Room for gathered bytes that are still on their way to the engines."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

from torch import Tensor

ALIGN = 256  # bytes; where a bucket begins in the memory


class Window:
    """A ring of ``nbytes``: a place is taken for one bucket after another and is free again when its transfer ended.

    ``memory`` (uint8, 1-d, ``nbytes`` long) is where buckets lie while they travel; None if every bucket has memory
    of its own and only their sum is limited. Belongs to the publisher's thread.

    >>> window = Window(1024)
    >>> window.take(300), window.take(300)  # from 0 to 300, and from 512 on
    (None, None)
    """

    def __init__(self, nbytes: int, memory: Tensor | None = None) -> None:
        self._nbytes, self._memory = _aligned(nbytes), memory
        if memory is not None and memory.numel() != self._nbytes:
            raise ValueError(f"a window of {self._nbytes} bytes in {memory.numel()} bytes of memory")
        self._next = 0
        self._taken = (0, 0)
        self._lent: deque[tuple[int, int, Future[Any]]] = deque()

    @staticmethod
    def size(wanted: int, largest: int) -> int:
        """Bytes of a window that is to hold ``wanted`` and must hold a bucket of ``largest``."""
        return _aligned(max(wanted, largest))

    def take(self, nbytes: int) -> Tensor | None:
        """Wait until the ring has room after the place taken last, and take it.

        Raises what the transfers that it waited for raise.
        """
        size = _aligned(nbytes)
        begin = self._next if self._next + size <= self._nbytes else 0
        while any(begin < e and b < begin + size for b, e, _ in self._lent):
            self._lent.popleft()[2].result()
        self._taken = (begin, begin + size)
        self._next = begin + size
        return None if self._memory is None else self._memory[begin : begin + nbytes]

    def lend(self, transfer: Future[Any]) -> None:
        """The place taken last is in use until ``transfer`` ends."""
        self._lent.append((*self._taken, transfer))

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        while self._lent:
            self._lent.popleft()[2].result()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
