"""The same links for threads without an event loop: a trainer's main thread, a thread inside an engine's worker.

The asyncio links of all blocking links of a process live on one daemon thread. Every call may come from any thread
(but not from that one), blocks it and has a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from asyncrl.transport.base import BaseLink, Wait
from asyncrl.transport.errors import DeadlineExpired
from asyncrl.transport.frames import Buffer, Message, Schema
from asyncrl.transport.links import Dialer, Listener

T = TypeVar("T")
L = TypeVar("L", bound=BaseLink)
GRACE_S = 10.0  # beyond a call's own deadline, before the background thread itself is suspected


class _Background:
    """The event loop of a process's blocking links."""

    _current: _Background | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> _Background:
        """This process's loop; a fork gets its own."""
        with cls._lock:
            if cls._current is None or cls._current.pid != os.getpid():
                cls._current = cls()
            return cls._current

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="asyncrl transport", daemon=True)
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T], *, owner: str, deadline_s: float | None, reason: str) -> T:
        """Run a coroutine there and wait for it. The coroutine keeps its own deadline; ours only backs it up."""
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError(f"{owner}: a blocking call from the transport's own thread would never return")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        limit = None if deadline_s is None else deadline_s + GRACE_S
        try:
            return future.result(limit)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError) as error:
            if future.done() and isinstance(error, DeadlineExpired):
                raise
            future.cancel()
            raise DeadlineExpired(
                owner, limit or 0.0, reason, "the transport's background thread did not respond"
            ) from error
        except BaseException:
            future.cancel()
            raise


class _Blocking(Generic[L]):
    """What both blocking links share."""

    def __init__(self, link: L, background: _Background) -> None:
        self._link, self._background = link, background

    @property
    def name(self) -> str:
        return self._link.name

    def _run(self, work: Coroutine[Any, Any, T], deadline_s: float | None, reason: str) -> T:
        return self._background.run(work, owner=self._link.name, deadline_s=deadline_s, reason=reason)

    def recv(self, *, deadline_s: float | None, waiting_for: str, auto_done: bool = False) -> Message:
        """As ``BaseLink.recv``."""
        work = self._link.recv(deadline_s=deadline_s, waiting_for=waiting_for, auto_done=auto_done)
        return self._run(work, deadline_s, waiting_for)

    def done(self, message: Message) -> None:
        """As ``BaseLink.done``; returns at once."""
        self._background.loop.call_soon_threadsafe(self._link.done, message)

    def flush(self, *, deadline_s: float | None = 60) -> None:
        """Wait until everything sent is acknowledged."""
        self._run(self._link.flush(deadline_s=deadline_s), deadline_s, "acknowledgements")

    def stats(self) -> dict[str, int]:
        """As ``BaseLink.stats``."""

        async def read() -> dict[str, int]:
            return self._link.stats()

        return self._run(read(), 10, "counters")

    def close(self, *, linger_s: float = 1.0) -> None:
        """As ``BaseLink.close``."""
        self._run(self._link.close(linger_s=linger_s), linger_s + 10, "the socket to close")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingListener(_Blocking[Listener]):
    """See ``links.Listener``."""

    def __init__(self, name: str, schema: Schema, **options: Any) -> None:
        super().__init__(Listener(name, schema, **options), _Background.get())

    @property
    def peers(self) -> set[str]:
        """Names of the peers that are here."""

        async def read() -> set[str]:
            return self._link.peers

        return self._run(read(), 10, "the list of peers")

    def start(self) -> str:
        """Bind; returns the endpoint."""
        return self._run(self._link.start(), 30, f"{self.name} to bind")

    def send(
        self,
        peer: str,
        kind: str,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline_s: float | None = 60,
        wait: Wait = "queued",
    ) -> None:
        """As ``Listener.send``."""
        work = self._link.send(peer, kind, header, buffers, deadline_s=deadline_s, wait=wait)
        self._run(work, deadline_s, f"{kind} to leave for {peer}")

    def __enter__(self) -> BlockingListener:
        self.endpoint = self.start()
        return self


class BlockingDialer(_Blocking[Dialer]):
    """See ``links.Dialer``."""

    def __init__(self, name: str, schema: Schema, endpoint: str, **options: Any) -> None:
        super().__init__(Dialer(name, schema, endpoint, **options), _Background.get())

    @property
    def connected(self) -> bool:
        """Whether the present connection has been welcomed by a listener."""
        return self._link.connected

    @property
    def session(self) -> int:
        """Id of this incarnation."""
        return self._link.session

    def start(self, *, wait: bool = True, deadline_s: float | None = 30) -> None:
        """As ``Dialer.start``."""
        self._run(self._link.start(wait=wait, deadline_s=deadline_s), deadline_s, "a listener")

    def send(
        self,
        kind: str,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline_s: float | None = 60,
        wait: Wait = "queued",
    ) -> None:
        """As ``Dialer.send``."""
        work = self._link.send(kind, header, buffers, deadline_s=deadline_s, wait=wait)
        self._run(work, deadline_s, f"{kind} to leave")

    def __enter__(self) -> BlockingDialer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self
