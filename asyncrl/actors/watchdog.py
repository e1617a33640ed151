"""Ends a process whose event loop stands still: nothing inside a loop can notice that it is held up.

A thread asks the loop for a sign of life ``LOOKS`` times in the time that it may be held. None in all that time, and
the process ends with what was waited for as its last line, after the stack of every thread, which shows who holds the
loop; whoever watches the process starts it again. Time is counted in looks, as in ``silence``: a process that was
stopped with its loop is not blamed for it. A call that keeps Python's lock holds up this thread too, and is not found.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from asyncrl.actors.silence import LOOKS, Silence


class Watchdog:
    """Context manager around work that must not hold ``loop`` for ``limit_s`` seconds.

    Around a synchronous call it limits that call. ``name`` is the process's; ``waiting_for`` says what did not come.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        limit_s: float,
        waiting_for: str,
        bite: Callable[[str], object] | None = None,
    ) -> None:
        """``bite`` is called, once, with the reason instead of ending the process."""
        self._loop, self._limit_s = loop, limit_s
        self._reason = f"{name}: waited {limit_s:g} s for {waiting_for}"
        self._bite = bite or end_process
        self._turns = 0  # only the loop changes it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.watch, args=(self._over.wait,), name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def watch(self, over: Callable[[float], bool]) -> None:
        """Look until ``over(seconds)``, which waits so long, is true or the loop has been held for too long."""
        silence = Silence()
        while not silence.look(self._turns, owing=True):
            self._loop.call_soon_threadsafe(self._turn)
            if over(self._limit_s / LOOKS):
                return
        self._bite(self._reason)

    def _turn(self) -> None:
        self._turns += 1


def end_process(reason: str) -> NoReturn:
    """End at once, and let the kernel end the children; whatever else would have to wait for the loop."""
    faulthandler.dump_traceback(sys.stderr)
    print(reason, file=sys.stderr, flush=True)
    os._exit(1)
