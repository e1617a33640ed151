"""The publisher's side of the links to engines: who is here, and each engine's way through one version.

Lives on its own event loop in a thread of trainer rank 0 (``Hub``), so that heartbeats go on while the publisher's
thread gathers. An engine that fails a phase, by an error, a lost link or a missed deadline, is dropped with the reason;
the others go on. So is one that reports an error or loses a link between pushes: it could not take the next version
and would go on with the last one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from asyncrl.transport.errors import DeadlineExpired, PeerLost, TransportError
from asyncrl.transport.frames import Buffer, Message
from asyncrl.transport.links import Listener
from asyncrl.transport.waiting import Deadline
from asyncrl.weights.messages import PUBLISHER_SCHEMA
from asyncrl.weights.planes import SendingPlane

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineFailed(RuntimeError):
    """An engine reported that it cannot go on with a version."""


@dataclass
class Engine:
    """One generator's links. Complete once its frontend and all its workers are here.

    ``failed`` ends with the error that the engine reported or that cut a link, and never otherwise. ``sessions``: which
    process is behind each peer's name, so that a successor that goes by the same name is told apart.
    """

    name: str
    failed: asyncio.Future[None]
    expected: int = 0
    frontend: str = ""
    workers: dict[int, str] = field(default_factory=dict)
    version: int = -1  # committed last
    digest: str = ""  # of that version, as its workers computed it from what they loaded
    dropped: bool = False
    sessions: dict[str, int] = field(default_factory=dict)  # by peer
    phases: int = 0  # of a push, under way with it
    line: Any = None  # what the data plane keeps of this engine

    @property
    def complete(self) -> bool:
        return bool(self.frontend) and 0 < self.expected == len(self.workers)

    @property
    def peers(self) -> list[str]:
        return [*self.workers.values(), self.frontend]


@dataclass
class Timings:
    """Seconds reported by the engines for one version; the slowest counts."""

    staged_s: float = 0.0
    load_s: float = 0.0
    digest_s: float = 0.0
    pause_s: float = 0.0


class Subscribers:
    """Methods run on the hub's loop."""

    def __init__(
        self, listener: Listener, deadline_s: float, plane: SendingPlane, on_drop: Callable[[], None] = lambda: None
    ) -> None:
        """``on_drop()`` says that there is something in ``dropped``; it must return at once."""
        self._listener, self._deadline_s, self._plane, self._on_drop = listener, deadline_s, plane, on_drop
        plane.attach(listener, deadline_s)
        self._engines: dict[str, Engine] = {}
        self._engine_of: dict[str, Engine] = {}
        self._answers: dict[tuple[str, str, int], asyncio.Future[dict[str, Any]]] = {}
        self._arrivals: list[asyncio.Future[None]] = []
        self._telling: set[asyncio.Task[None]] = set()
        self.dropped: dict[str, str] = {}  # name -> reason; the publisher takes and clears them

    # -- who is here --------------------------------------------------------------------------------------------------

    async def receive(self) -> None:
        """Handle messages until cancelled."""
        while True:
            message = await self._listener.recv(deadline_s=None, waiting_for="the engines")
            self._handle(message)
            self._listener.done(message)

    def lacking(self, version: int) -> list[Engine]:
        """Complete engines that have committed another version."""
        return [e for e in self._engines.values() if e.complete and e.version != version]

    async def wait_for(self, count: int, deadline_s: float) -> None:
        """Until ``count`` engines are complete."""
        deadline = Deadline("publisher", deadline_s, lambda: f"engines here: {sorted(self._engines) or 'none'}")
        while sum(e.complete for e in self._engines.values()) < count:
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._arrivals.append(arrival)
            await deadline.wait(arrival, f"{count} engines to subscribe")

    def _handle(self, message: Message) -> None:
        kind, header, peer = message.kind, message.header, message.peer
        if kind == "subscribe":
            self._subscribe(message)
        elif kind == "$left" or kind in ("mismatch", "failed"):
            engine = self._engine_of.get(peer)
            if engine is None or engine.sessions[peer] != message.session:
                return  # dropped meanwhile; its name may be a successor's
            if kind == "$left":
                self._lost(engine, peer, header)
            else:
                self._fail(engine, EngineFailed(f"{peer}: {header['reason']}"))
        elif not kind.startswith("$"):
            self._answer(peer, kind, header)

    def _subscribe(self, message: Message) -> None:
        header, peer = message.header, message.peer
        name = header["generator"]
        engine = self._engines.get(name)
        if engine is None:
            engine = self._engines[name] = Engine(name, asyncio.get_running_loop().create_future())
        engine.version = -1  # whatever is new about it, it holds none of this publisher's versions
        if header["role"] == "frontend":
            engine.frontend = peer
        else:
            self._plane.leave(engine)
            engine.expected = header["workers"]
            engine.workers[header["rank"]] = peer
        self._engine_of[peer] = engine
        engine.sessions[peer] = message.session
        if header["role"] == "frontend" and not engine.complete:  # see ``messages``: its workers come before it
            self._drop(engine, "came without its workers: the link of one of them was lost")
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            if not arrival.done():
                arrival.set_result(None)

    def _lost(self, engine: Engine, peer: str, header: dict[str, Any]) -> None:
        """Without one of its links an engine cannot take another version."""
        # one that says goodbye ends in order, and one without its frontend is not known to the controller as ready
        ends = not engine.frontend or (peer == engine.frontend and header["goodbye"])
        self._forget(engine)
        self._fail(engine, PeerLost(f"{peer} left: {header['reason']}"), tell=not ends)

    def _fail(self, engine: Engine, error: Exception, tell: bool = True) -> None:
        """End every wait for ``engine``, which drops it; while there is none drop it here, if that is to be told."""
        if not engine.failed.done():
            engine.failed.set_exception(error)
            engine.failed.exception()  # noticed, even if no wait for it begins
        if tell and not engine.phases:
            self._drop(engine, f"failed while nothing was asked of it: {error}")

    def _forget(self, engine: Engine) -> None:
        """Take ``engine`` out of the books, but not a newer one that goes by its names."""
        self._plane.leave(engine)
        if self._engines.get(engine.name) is engine:
            del self._engines[engine.name]
        for peer in engine.peers:
            if self._engine_of.get(peer) is engine:
                del self._engine_of[peer]

    def leave_all(self) -> None:
        """Give up every engine's line of the data plane, for the end."""
        for engine in self._engines.values():
            self._plane.leave(engine)

    # -- one version --------------------------------------------------------------------------------------------------

    async def announce(self, version: int, nbytes: int, manifest: bytes, engines: list[Engine]) -> list[Engine]:
        """Tell the engines what comes; returns those that are ready for it."""

        async def one(engine: Engine) -> None:
            header = {"version": version, "bytes": nbytes, "join": await self._plane.invite(engine)}
            await asyncio.gather(
                self._ask_all(engine.peers, "announce", header, [manifest], "ready", version),
                self._plane.meet(engine),
            )

        return await self._each(engines, one, "get ready")

    async def move(self, version: int, offset: int, data: Tensor, engines: list[Engine]) -> list[Engine]:
        """Bring bytes to all workers and return, with the engines still in, when every one has staged them.

        Calls made one after the other may overlap: each hands its bytes to the plane before the next one begins.
        """

        async def one(engine: Engine) -> None:
            if engine.dropped:
                raise EngineFailed("dropped before")
            await self._plane.move(engine, version, offset, data)

        return await self._each(engines, one, "stage bytes")

    async def verify(self, version: int, digests: bytes, engines: list[Engine], into: Timings) -> list[Engine]:
        """Send the digests; returns the engines whose workers hold every byte."""

        async def one(engine: Engine) -> None:
            workers = list(engine.workers.values())
            for answer in await self._ask_all(workers, "verify", {"version": version}, [digests], "staged", version):
                into.staged_s = max(into.staged_s, answer["seconds"])

        return await self._each(engines, one, "hold all bytes")

    async def load(self, version: int, digest: str, engines: list[Engine], into: Timings) -> list[Engine]:
        """Have the engines load what is staged; returns those that serve the version now.

        ``digest`` is the trainer's, over all tensors: an engine whose worker loaded anything else is dropped.
        """

        async def one(engine: Engine) -> None:
            loaded = [self._expect(worker, "loaded", version) for worker in engine.workers.values()]
            (committed,) = await self._ask_all(
                [engine.frontend], "load", {"version": version}, [], "committed", version
            )
            into.pause_s = max(into.pause_s, committed["pause_s"])
            for answer in await asyncio.gather(*loaded):
                if answer["digest"] != digest:
                    raise EngineFailed(f"it loaded weights of digest {answer['digest']}, the trainer's is {digest}")
                into.load_s = max(into.load_s, answer["load_s"])
                into.digest_s = max(into.digest_s, answer["digest_s"])
            engine.version, engine.digest = version, digest

        return await self._each(engines, one, "load and commit")

    async def _each(self, engines: list[Engine], work: Callable[[Engine], Awaitable[None]], what: str) -> list[Engine]:
        """Run ``work`` for all engines at once, drop those for which it fails, return the others."""
        for engine in engines:
            engine.phases += 1
        results = await asyncio.gather(*(_unless_failed(engine, work) for engine in engines), return_exceptions=True)
        for engine in engines:
            engine.phases -= 1
        kept = []
        for engine, result in zip(engines, results, strict=True):
            if result is None and engine.failed.done():  # it did, and failed while others were waited for
                self._drop(engine, f"failed after it did {what}: {engine.failed.exception()}")
            elif result is None:
                kept.append(engine)
            elif isinstance(result, (TransportError, EngineFailed)):
                self._drop(engine, f"did not {what}: {result}")
            else:
                raise result
        return kept

    def _drop(self, engine: Engine, reason: str) -> None:
        """Take ``engine`` out of the books and say so: to the publisher's owner and on the links that it still has."""
        if engine.dropped:
            return
        engine.dropped = True
        self._forget(engine)
        here = {peer: self._listener.session_id(peer) for peer in engine.sessions}
        if any(session not in (None, engine.sessions[peer]) for peer, session in here.items()):
            return  # a restarted generator goes by these names already; the controller knows that the old one is gone
        self.dropped[engine.name] = reason
        self._on_drop()
        for peer, session in here.items():
            if session is not None:
                task = asyncio.create_task(self._tell_dropped(peer, reason))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    async def _tell_dropped(self, peer: str, reason: str) -> None:
        try:
            await self._listener.send(peer, "dropped", {"reason": reason}, deadline_s=self._deadline_s)
        except TransportError as error:  # a frontend that comes back is told then
            log.info("%s could not be told that it is dropped: %s", peer, error)

    async def take_dropped(self) -> dict[str, str]:
        """Engines dropped since the last call, with the reasons."""
        taken, self.dropped = self.dropped, {}
        return taken

    # -- questions and answers ----------------------------------------------------------------------------------------

    async def _ask_all(
        self, peers: list[str], kind: str, header: dict[str, Any], buffers: list[Buffer], answer: str, version: int
    ) -> list[dict[str, Any]]:
        """Send to all peers, then wait for an ``answer`` of this version from each, within one deadline."""
        futures = [self._expect(peer, answer, version) for peer in peers]
        deadline = Deadline("publisher", self._deadline_s)
        for peer in peers:
            await self._listener.send(peer, kind, header, buffers, deadline_s=self._deadline_s)
        return [
            await deadline.wait(future, f"{peer} to answer {kind} of version {version} with {answer}")
            for peer, future in zip(peers, futures, strict=True)
        ]

    def _expect(self, peer: str, kind: str, version: int) -> asyncio.Future[dict[str, Any]]:
        key = (peer, kind, version)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        future.add_done_callback(lambda f: self._answers.pop(key, None) if self._answers.get(key) is f else None)
        return future

    def _answer(self, peer: str, kind: str, header: dict[str, Any]) -> None:
        future = self._answers.get((peer, kind, header["version"]))
        if future is not None and not future.done():  # else: from an engine dropped meanwhile
            future.set_result(header)


async def _unless_failed(engine: Engine, work: Callable[[Engine], Awaitable[None]]) -> None:
    """``work(engine)``, cut short by the engine's failure."""
    task = asyncio.ensure_future(work(engine))
    await asyncio.wait({task, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await engine.failed
    await task


class Hub:
    """An event loop in a thread, with the publisher's listener on it."""

    def __init__(
        self, deadline_s: float, plane: SendingPlane, on_drop: Callable[[], None], **listener_options: Any
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="asyncrl publisher links", daemon=True)
        self._thread.start()
        self._options, self._deadline_s, self._plane, self._on_drop = listener_options, deadline_s, plane, on_drop
        self.endpoint = self.run(self._open(), 30, "the publisher to bind")

    async def _open(self) -> str:
        self._listener = Listener("publisher", PUBLISHER_SCHEMA, **self._options)
        endpoint = await self._listener.start()
        self.subscribers = Subscribers(self._listener, self._deadline_s, self._plane, self._on_drop)
        self._receiving = asyncio.create_task(self.subscribers.receive())
        self._receiving.add_done_callback(self._ended)
        return endpoint

    @staticmethod
    def _ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled():  # every later wait for an engine ends at its deadline, and this says why
            log.error("the publisher stopped listening to the engines", exc_info=task.exception())

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        """Run a coroutine; returns a concurrent future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], deadline_s: float, reason: str) -> T:
        """Run a coroutine and wait for it. Its own deadlines are the tighter ones."""
        future = self.start(work)
        try:
            return future.result(deadline_s)
        except TimeoutError as error:
            if isinstance(error, DeadlineExpired):
                raise
            future.cancel()
            raise DeadlineExpired("publisher", deadline_s, reason) from error

    def close(self) -> None:
        async def end() -> None:
            self.subscribers.leave_all()
            self._receiving.cancel()
            await self._listener.close()

        self.run(end(), 15, "the publisher's links to close")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
