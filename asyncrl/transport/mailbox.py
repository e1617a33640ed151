"""Received messages on their way to the consumer. Bounded by the credit that was granted, not here."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from asyncrl.transport.errors import TransportError
from asyncrl.transport.frames import Message
from asyncrl.transport.waiting import Deadline


class Mailbox:
    """A queue that wakes one waiter per message at most, and none while the consumer is busy."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._error: TransportError | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Message) -> None:
        """Append and wake one waiter."""
        self._messages.append(message)
        if self._waiters:
            self._wake_one()

    def fail(self, error: TransportError | None) -> None:
        """Once the queue is empty, ``get`` raises ``error``; None ends that."""
        self._error = error
        if error is not None:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def get_nowait(self) -> Message | None:
        """The oldest message, if there is one."""
        return self._messages.popleft() if self._messages else None

    async def get(self, deadline: Deadline, reason: str) -> Message:
        """The oldest message. Cancelling the wait loses none."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            waiter = deadline.loop.create_future()
            self._waiters.append(waiter)
            try:
                await deadline.wait(waiter, reason)
            except BaseException:
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
                self._wake_one()  # a message may have been meant for this waiter
                raise
        return self._messages.popleft()

    def _wake_one(self) -> None:
        while self._messages and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
