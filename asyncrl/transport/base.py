"""What a Listener and a Dialer share: sending under credit, receiving, acknowledging, heartbeats, counters."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import zmq

from asyncrl.transport.errors import OutOfStep, ProtocolError, TransportError
from asyncrl.transport.frames import (
    Ack,
    Buffer,
    ControlFrame,
    DataFrame,
    Message,
    Schema,
    checked_ack,
    decode,
    pack_control,
    pack_data,
)
from asyncrl.transport.keys import Keys
from asyncrl.transport.mailbox import Mailbox
from asyncrl.transport.owner import SocketOwner
from asyncrl.transport.sending import admission, make_item, settling
from asyncrl.transport.session import Credit, Inbox, Session
from asyncrl.transport.waiting import Deadline

log = logging.getLogger(__name__)

Wait = Literal["queued", "acked"]
MAX_FRAME_BYTES = 4 << 30
COUNTERS = (
    "sent", "received", "bytes_sent", "bytes_received", "resent", "duplicates", "refused", "refused_by_peer", "stray",
    "gaps", "credit_stalls", "connections", "joined", "left", "acks",
)  # fmt: skip
_open_contexts: set[Any] = set()  # pyzmq would block in the garbage collector of one that was not terminated
MAX_REASON = 2000  # characters of a goodbye
REMEMBERED = 1024  # streams whose cursor is kept after their process left


def new_stream() -> int:
    """An id for the stream of a new incarnation: later processes get larger ones (clock, then 20 random bits)."""
    return time.time_ns() & ~0xFFFFF | random.SystemRandom().getrandbits(20)


class BaseLink:
    """See ``links.Listener`` and ``links.Dialer``. All methods belong to the event loop that called ``start``."""

    def __init__(
        self,
        name: str,
        schema: Schema,
        *,
        keys: Keys | None = None,
        credit_bytes: int = 256 << 20,
        credit_messages: int = 1024,
        heartbeat_s: float = 2.0,
        dead_after_s: float = 15.0,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if credit_messages < 1 or credit_bytes < 1:
            raise ValueError("a receiver must grant credit for at least one message and one byte")
        if dead_after_s < 2 * heartbeat_s:
            raise ValueError(f"dead_after_s={dead_after_s:g} leaves no room for a lost heartbeat of {heartbeat_s:g} s")
        self.name = name
        self._schema = schema
        self._keys = keys
        self._credit = Credit(credit_messages, credit_bytes)
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._max_frame_bytes = max_frame_bytes
        self._clock = clock
        self._tick_s = heartbeat_s / 2
        self._last_tick = clock()
        self._owner: SocketOwner | None = None
        self._closing: SocketOwner | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._mailbox = Mailbox()
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._dirty: dict[Session, None] = {}
        self._count: Counter[str] = Counter()
        self._failure: TransportError | None = None
        self.last_refusal = ""
        self._goodbye = ""

    # -- for consumers ------------------------------------------------------------------------------------------------

    async def recv(self, *, deadline_s: float | None, waiting_for: str, auto_done: bool = False) -> Message:
        """The next message; ``waiting_for`` completes "NAME waited 30 s for ...".

        The peer may forget the message, and has its credit back, once you call ``done`` with it; until then it would
        be sent again to a restarted process. ``auto_done`` calls ``done`` at once.
        """
        message = self._mailbox.get_nowait()
        if message is None:
            message = await self._mailbox.get(Deadline(self.name, deadline_s, self._describe), waiting_for)
        if auto_done:
            self.done(message)
        return message

    def recv_nowait(self) -> Message | None:
        """The next message if one is here: to take a batch after a ``recv``."""
        return self._mailbox.get_nowait()

    def done(self, message: Message) -> None:
        """Acknowledge: what follows from the message is as safe as it needs to be. A second call does nothing."""
        inbox = self._inboxes.get((message.peer, message.session))
        if inbox is not None and message.seq and inbox.done(message.seq):
            session = self._session_of(message.peer)
            if session is not None and session.inbox is inbox:
                self._touch(session)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is pending now.

        sent, received, bytes_sent, bytes_received: application messages and bytes of buffers, each counted once.
        resent: transmissions again. duplicates: repeats dropped. refused: frames refused here. refused_by_peer: ours
        refused there. credit_stalls: sends that had to wait. gaps: handshakes forced by a break in the numbers.
        unacknowledged, waiting, queued: messages kept for the peers, waiting for credit, waiting for our consumer.
        """
        boxes = [s.outbox for s in self._all_sessions()]
        return {
            **{n: self._count[n] for n in COUNTERS},
            "unacknowledged": sum(b.unacknowledged for b in boxes),
            "waiting": sum(b.waiting for b in boxes),
            "queued": len(self._mailbox),
        }

    async def close(self, *, linger_s: float = 1.0, reason: str = "closed") -> None:
        """Say goodbye with ``reason`` and release the socket. What is not acknowledged is not waited for: ``flush``."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._goodbye = reason[:MAX_REASON]
        self._closing = owner
        self._dirty.update(dict.fromkeys(self._all_sessions()))
        owner.stop(int(linger_s * 1000))
        gone = TransportError(f"{self.name} is closed")
        self._fail(gone)
        context = self._context
        if context is not None:
            await asyncio.to_thread(context.term)
            _open_contexts.discard(context)

    async def flush(self, *, deadline_s: float | None = 60) -> None:
        """Wait until the consumers at the other end are done with everything sent."""
        deadline = Deadline(self.name, deadline_s, self._describe)
        for session in self._all_sessions():
            future, settle = settling()
            session.outbox.when_empty(settle)
            await deadline.wait(future, f"{session.name} to acknowledge what was sent")

    # -- sending ------------------------------------------------------------------------------------------------------

    async def _submit(
        self,
        session: Session,
        kind: str,
        header: dict[str, Any] | None,
        buffers: Sequence[Buffer],
        deadline_s: float | None,
        wait: Wait,
    ) -> None:
        if self._failure is not None:
            raise self._failure
        item = make_item(self._schema, kind, header or {}, buffers, self._max_frame_bytes)
        acked = None
        if wait == "acked":
            acked, item.settled = settling()
        deadline: Deadline | None = None
        if session.outbox.offer(item):
            self._dirty[session] = None
            if self._owner is not None:
                self._owner.flush()
        else:
            self._count["credit_stalls"] += 1
            deadline = Deadline(self.name, deadline_s, self._describe)
            try:
                await deadline.wait(admission(item), f"credit from {session.name} to send {kind}")
            finally:
                session.outbox.withdraw(item)  # nothing, if it was admitted
            self._touch(session)
        self._count["sent"] += 1
        self._count["bytes_sent"] += item.size - len(item.body)
        if acked is not None:
            deadline = deadline or Deadline(self.name, deadline_s, self._describe)
            await deadline.wait(acked, f"{session.name} to acknowledge {kind}")

    # -- driven by the owner ------------------------------------------------------------------------------------------

    def on_frame(self, route: bytes, envelope: memoryview, buffers: Sequence[memoryview]) -> None:
        """Check one received message and act on it."""
        try:
            frame = decode(envelope, len(buffers))
            if isinstance(frame, DataFrame):
                self._on_data(route, frame, buffers)
            else:
                self._on_control(route, frame)
        except OutOfStep as error:
            self._count["gaps"] += 1
            self.on_bad_frame(route, error)
            self._start_over(route, str(error))
        except ProtocolError as error:
            self.on_bad_frame(route, error)

    def on_bad_frame(self, route: bytes, error: ProtocolError) -> None:
        """Count and log a refusal: the 1st, 2nd, 4th, 8th ... so that a broken peer cannot fill the disk."""
        self._count["refused"] += 1
        self.last_refusal = str(error)
        count = self._count["refused"]
        if count & (count - 1) == 0:
            log.warning("%s refused a frame (%d so far): %s", self.name, count, error)

    def _on_data(self, route: bytes, frame: DataFrame, buffers: Sequence[memoryview]) -> None:
        session = self._session_at(route)
        if session is None:
            self._count["stray"] += 1
            self._start_over(route, "data before a handshake")
            return
        session.last_heard = self._clock()
        if frame.ack is not None:
            self._acknowledge(session, frame.ack)
        size = sum(b.nbytes for b in buffers) if buffers else 0
        inbox = session.inbox
        if not inbox.accept(frame.seq, size):
            self._count["duplicates"] += 1
            return
        try:
            if buffers and [b.nbytes for b in buffers] != frame.lengths:
                raise ProtocolError(f"{frame.kind}: buffers of other lengths than announced")
            self._schema.check(frame.kind, frame.header, len(buffers))
        except ProtocolError as error:
            inbox.done(frame.seq)
            session.control.append(pack_control("refused", seq=frame.seq, reason=str(error)[:500]))
            self._dirty[session] = None
            self.on_bad_frame(route, error)
            return
        count = self._count
        count["received"] += 1
        count["bytes_received"] += size
        self._mailbox.put(Message(frame.kind, frame.header, tuple(buffers), session.name, inbox.stream, frame.seq))

    def _acknowledge(self, session: Session, ack: Ack) -> None:
        session.outbox.acknowledge(ack)
        if session.outbox.has_sendable:
            self._dirty[session] = None

    def _on_control(self, route: bytes, frame: ControlFrame) -> None:
        if frame.kind in ("hello", "welcome", "reset", "denied"):
            self._on_handshake(route, frame)
            return
        session = self._session_at(route)
        if session is None:
            self._count["stray"] += 1
            self._start_over(route, "no handshake yet")
            return
        session.last_heard = self._clock()
        if frame.kind == "ack":
            self._acknowledge(session, checked_ack(**frame.header))
        elif frame.kind == "refused":
            error = ProtocolError(f"{session.name} refused a message: {frame.header['reason']}")
            self._count["refused_by_peer"] += 1
            log.error("%s: %s", self.name, error)
            session.outbox.refuse(frame.header["seq"], error)
            self._dirty[session] = None
        elif frame.kind == "bye":
            self._on_bye(session, frame.header["reason"])

    def transmit(self) -> None:
        """Send what is due to the sessions that were touched."""
        dirty, self._dirty = self._dirty, {}
        for session in dirty:
            if session.established and not self._transmit_to(session):
                self._on_unroutable(session)

    def _transmit_to(self, session: Session) -> bool:
        owner = self._owner or self._closing
        assert owner is not None
        route, send = session.route, owner.send
        while session.control:
            if not send(route, session.control[0]):
                return False
            session.control.popleft()
            session.last_sent = self._clock()
        ack = session.inbox.take_ack()
        for item in session.outbox.sendable():
            self._count["resent"] += item.sends > 1
            if not send(route, pack_data(item.seq, item.body, ack), item.buffers):
                return False
            ack = None
            session.last_sent = self._clock()
        if ack is not None:
            self._count["acks"] += 1
            session.last_sent = self._clock()
            if not send(route, pack_control("ack", floor=ack.floor, above=ack.above)):
                return False
        return self._closing is None or send(route, pack_control("bye", reason=self._goodbye))

    def tick(self) -> None:
        """Heartbeats, and peers not heard for too long. Our own absence is not held against the peers."""
        now = self._clock()
        late = now - self._last_tick - self._tick_s
        self._last_tick = now
        for session in list(self._all_sessions()):
            if late > self._tick_s:
                session.last_heard += late
            if now - session.last_heard >= self._dead_after_s:
                self._on_silence(session, now - session.last_heard)
            elif session.established and now - session.last_sent >= self._heartbeat_s:
                session.control.append(pack_control("ping"))
                self._dirty[session] = None

    # -- what the two ends do differently -----------------------------------------------------------------------------

    def _all_sessions(self) -> Iterable[Session]:
        raise NotImplementedError

    def _session_of(self, peer: str) -> Session | None:
        raise NotImplementedError

    def _session_at(self, route: bytes) -> Session | None:
        """The conversation on this connection, once its handshake is complete."""
        raise NotImplementedError

    def _on_handshake(self, route: bytes, frame: ControlFrame) -> None:
        raise NotImplementedError

    def _on_bye(self, session: Session, reason: str) -> None:
        raise NotImplementedError

    def _on_silence(self, session: Session, seconds: float) -> None:
        raise NotImplementedError

    def _on_unroutable(self, session: Session) -> None:
        raise NotImplementedError

    def _start_over(self, route: bytes, reason: str) -> None:
        """Get a new handshake on this connection."""
        raise NotImplementedError

    def _describe(self) -> str:
        """The state of the link, for the text of an expired deadline."""
        raise NotImplementedError

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[zmq.Context[zmq.Socket[bytes]], SocketOwner]:
        if self._owner is not None or self._closing is not None:
            raise RuntimeError(f"{self.name} was started before")
        self._context = zmq.Context()
        _open_contexts.add(self._context)
        self._owner = SocketOwner(self, self._tick_s, self._crashed)
        self._last_tick = self._clock()
        return self._context, self._owner

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A new socket, in the hands of the owner."""
        assert self._owner is not None and self._context is not None
        socket = self._context.socket(kind)
        self._owner.adopt(socket)
        socket.set_hwm(0)  # credit bounds what is queued
        socket.linger = 0
        socket.maxmsgsize = self._max_frame_bytes
        socket.ipv6 = "[" in address  # with it, libzmq would try only the IPv6 address of a host name
        return socket

    def _touch(self, session: Session) -> None:
        self._dirty[session] = None
        if self._owner is not None:
            self._owner.wake()

    def _fail(self, error: TransportError) -> None:
        """Nothing works any more: tell everyone who waits and everyone who comes."""
        self._failure = error
        self._mailbox.fail(error)
        for session in self._all_sessions():
            session.outbox.interrupt(error)

    def _crashed(self, error: BaseException) -> None:
        log.critical("%s: the socket's owner failed", self.name, exc_info=error)
        failure = TransportError(f"{self.name}: the socket's owner failed: {error!r}")
        failure.__cause__ = error
        self._fail(failure)

    def _remember(self, peer: str, inbox: Inbox) -> None:
        self._inboxes[peer, inbox.stream] = inbox
        if len(self._inboxes) > REMEMBERED:
            for key, old in self._inboxes.items():
                session = self._session_of(key[0])
                if not old.held() and (session is None or session.inbox is not old):
                    del self._inboxes[key]
                    break
