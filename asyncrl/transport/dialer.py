"""The end that connects: see ``links``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.transport.base import BaseLink, Wait, new_stream
from asyncrl.transport.errors import PeerLost, ProtocolError
from asyncrl.transport.frames import Buffer, ControlFrame, Message, Schema, pack_control
from asyncrl.transport.keys import Keys, require_safe
from asyncrl.transport.session import Handshake, Inbox, Outbox, Session
from asyncrl.transport.waiting import Deadline


class Dialer(BaseLink):
    """Connects to one Listener, and again whenever the connection is lost, for as long as it is open.

    When the listener says goodbye, waits end with ``PeerLost`` until another listener answers at the endpoint. With
    ``events`` set ``recv`` reports that instead: ``"$left"`` (header: session, reason, unacknowledged), and
    ``"$joined"`` (header: session) when a listener, the first or a restarted one, takes up the conversation.
    """

    def __init__(
        self,
        name: str,
        schema: Schema,
        endpoint: str,
        *,
        keys: Keys | None = None,
        events: bool = False,
        **options: Any,
    ) -> None:
        """``options``: credit_bytes, credit_messages, heartbeat_s, dead_after_s, max_frame_bytes, clock."""
        super().__init__(name, schema, keys=keys, **options)
        require_safe(endpoint, keys)
        self._endpoint, self._events = endpoint, events
        self._session = Session(endpoint, Outbox(new_stream()), Inbox(0, self._credit), self._clock())
        self._redial_at: float | None = None
        self._hello_at: float | None = None
        self._backoff_s = 0.0
        self._welcomed: asyncio.Future[None] | None = None
        self._gone: PeerLost | None = None

    @property
    def connected(self) -> bool:
        """Whether the present connection has been welcomed by a listener."""
        return self._session.established

    @property
    def session(self) -> int:
        """Id of this incarnation, as the listener sees it in ``Message.session``."""
        return self._session.outbox.stream

    async def start(self, *, wait: bool = True, deadline_s: float | None = 30) -> None:
        """Begin to dial; with ``wait`` return once a listener has welcomed us, else raise ``DeadlineExpired``."""
        self._begin()
        self._welcomed = asyncio.get_running_loop().create_future()
        try:
            self._redial()
        except BaseException:
            await self.close()
            raise
        if wait:
            deadline = Deadline(self.name, deadline_s, self._describe)
            await deadline.wait(asyncio.shield(self._welcomed), f"a listener at {self._endpoint}")

    async def send(
        self,
        kind: str,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline_s: float | None = 60,
        wait: Wait = "queued",
    ) -> None:
        """As ``Listener.send``. While the connection is down, messages are kept up to the credit granted last."""
        if self._gone is not None:
            raise self._gone
        await self._submit(self._session, kind, header, buffers, deadline_s, wait)

    def _all_sessions(self) -> Iterable[Session]:
        return (self._session,)

    def _session_of(self, peer: str) -> Session | None:
        return self._session

    def _session_at(self, route: bytes) -> Session | None:
        return self._session if self._session.established else None

    def _on_handshake(self, route: bytes, frame: ControlFrame) -> None:
        session = self._session
        if frame.kind == "denied":
            self.last_refusal = frame.header["reason"]
            self._hello_at = self._clock() + self._heartbeat_s
            return
        if frame.kind == "reset":
            self.last_refusal = frame.header["reason"]
            if session.established:
                self._lost_connection()
            return
        if frame.kind != "welcome":
            raise ProtocolError(f"a listener sent {frame.kind}")
        welcome = Handshake.checked(frame.header)
        if welcome.reading != session.outbox.stream:
            raise ProtocolError("a welcome that was meant for another process")
        another = welcome.stream != session.inbox.stream
        inbox = Inbox(welcome.stream, self._credit) if another else session.inbox
        inbox.reconnect(welcome)
        session.outbox.reconnect(welcome)
        session.inbox, session.name, session.established = inbox, welcome.name, True
        session.last_heard = self._clock()
        self._hello_at, self._gone = None, None
        self._mailbox.fail(None)
        self._count["connections"] += 1
        self._dirty[session] = None
        if another:
            self._remember(welcome.name, inbox)
            self._count["joined"] += 1
            if self._events:
                self._mailbox.put(Message("$joined", {"session": welcome.stream}, (), welcome.name, welcome.stream))
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_result(None)

    def _on_bye(self, session: Session, reason: str) -> None:
        self._gone = PeerLost(f"{self.name} lost {session.name}: {reason}", reason)
        session.outbox.interrupt(self._gone)
        if self._events:
            stream, kept = session.inbox.stream, session.outbox.unacknowledged
            header = {"session": stream, "reason": reason, "unacknowledged": kept}
            self._mailbox.put(Message("$left", header, (), session.name, stream))
        else:
            self._mailbox.fail(self._gone)
        self._lost_connection()

    def _on_silence(self, session: Session, seconds: float) -> None:
        self._lost_connection()

    def _on_unroutable(self, session: Session) -> None:
        self._lost_connection()

    def _start_over(self, route: bytes, reason: str) -> None:
        if self._session.established:
            self._lost_connection()

    def _lost_connection(self) -> None:
        """Dial again: at once after a connection that worked, ever more slowly otherwise."""
        worked = self._session.established and self._clock() - self._dialed > 1.0
        self._session.established = False
        self._backoff_s = 0.0 if worked else min(2.0, 2 * self._backoff_s + 0.02)
        self._redial_at = self._clock() + self._backoff_s
        loop = asyncio.get_running_loop()
        loop.call_later(self._backoff_s, self._redial_if_due)

    def _redial_if_due(self) -> None:
        if self._owner is not None and self._redial_at is not None and self._clock() >= self._redial_at - 0.001:
            self._redial()

    def _redial(self) -> None:
        """A fresh socket, so that nothing of the old connection is left in a queue; its first message is our hello."""
        owner = self._owner
        assert owner is not None
        owner.release(0)
        dealer = self._socket(zmq.DEALER, self._endpoint)
        dealer.reconnect_ivl, dealer.reconnect_ivl_max = 50, 2000
        if self._keys is not None:
            self._keys.secure_dialer(dealer)
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | failed | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        monitor.linger = 0
        dealer.connect(self._endpoint)
        owner.adopt_beside(monitor, lambda: self._read_monitor(monitor))
        self._redial_at = None
        self._dialed = self._session.last_heard = self._clock()
        self._say_hello()

    def _say_hello(self) -> None:
        self._hello_at = None
        if self._owner is not None:
            self._owner.send(b"", pack_control("hello", **self._session.handshake(self.name).header()))

    def _read_monitor(self, monitor: zmq.Socket[bytes]) -> None:
        while not monitor.closed:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event != zmq.EVENT_DISCONNECTED:
                self.last_refusal = "the CURVE handshake failed: are both sides using the keys of the same run?"
            if self._redial_at is None:
                self._lost_connection()

    def tick(self) -> None:
        super().tick()
        if self._hello_at is not None and self._clock() >= self._hello_at:
            self._say_hello()

    def _describe(self) -> str:
        session = self._session
        state = "connected to" if session.established else "not connected to"
        text = f"{state} {session.name}, not heard for {session.quiet_for(self._clock()):.1f} s"
        return text + (f"; last refusal: {self.last_refusal}" if self.last_refusal else "")

    async def __aenter__(self) -> Dialer:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
