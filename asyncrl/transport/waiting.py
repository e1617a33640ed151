"""The one place where this package waits: every wait has an owner, a reason and a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asyncrl.transport.errors import DeadlineExpired

T = TypeVar("T")


class Deadline:
    """One deadline over one or more waits of the same call. ``seconds`` None waits until cancelled."""

    def __init__(self, owner: str, seconds: float | None, detail: Callable[[], str] | None = None) -> None:
        """``detail()`` is asked on expiry and ends up in the error."""
        self.owner, self.seconds, self._detail = owner, seconds, detail
        self.loop = asyncio.get_running_loop()
        self._expires = 0.0 if seconds is None else self.loop.time() + seconds

    async def wait(self, future: asyncio.Future[T], reason: str) -> T:
        """The future's result, or ``DeadlineExpired``."""
        if self.seconds is None:
            return await future
        timer = self.loop.call_at(self._expires, self._expire, future, reason)
        try:
            return await future
        finally:
            timer.cancel()

    def _expire(self, future: asyncio.Future[T], reason: str) -> None:
        if not future.done():
            detail = self._detail() if self._detail else ""
            future.set_exception(DeadlineExpired(self.owner, self.seconds or 0.0, reason, detail))
