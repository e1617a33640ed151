"""Links between processes: a ``Listener`` is dialed by many ``Dialer``s.

    listener = Listener("controller", SCHEMA)
    endpoint = await listener.start()                  # tcp://127.0.0.1:PORT, the port chosen by the system
    dialer = Dialer("gen/0", SCHEMA, endpoint)
    await dialer.start()
    await dialer.send("sample", {"ordinal": 3}, [token_ids, logprobs])

    message = await listener.recv(deadline_s=30, waiting_for="a sample")
    ...                                                # make its effect durable
    listener.done(message)                             # now gen/0 may forget it

What holds, in both directions:

- a message that ``send`` accepted is delivered once and in order to the peer process, across lost connections;
- it is kept, and counts against the peer's credit, until the peer's consumer calls ``done``. If the *receiving* process
  is restarted, everything not done is delivered to its successor. ``(peer, session, seq)`` of a message stays the same,
  so that a consumer that was killed between making an effect durable and ``done`` can tell; ``cursors`` lets a
  Listener drop such repeats itself;
- if the *sending* process is restarted its successor is a new incarnation: what the receiver already has stays in its
  queue, then come ``$left`` and ``$joined``, then the successor's messages. A consumer that answers ``$joined`` with
  how far it got lets the successor continue without loss or repeat;
- **buffers are sent from where they lie**: leave one unchanged until the message is acknowledged
  (``send(..., wait="acked")`` returns then). To reuse it sooner send a copy.
"""

from __future__ import annotations

import asyncio
import socket as network
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.transport.base import BaseLink, Wait, new_stream
from asyncrl.transport.errors import PeerLost, ProtocolError
from asyncrl.transport.frames import Buffer, ControlFrame, Message, Schema, pack_control
from asyncrl.transport.keys import Gate, Keys, require_safe
from asyncrl.transport.session import Handshake, Inbox, Outbox, Session
from asyncrl.transport.waiting import Deadline


class Listener(BaseLink):
    """Binds a port; peers come and go, each under a name of its own.

    ``recv`` also reports them: kind ``"$joined"`` (header: session) and ``"$left"`` (header: session, reason,
    unacknowledged: how many of our messages it may not have consumed), with ``Message.peer`` set.

    A name belongs to the latest process that announced it. ``cursors`` maps (peer, session) to the last sequence number
    that an earlier life of this process made durable, for consumers that are done in order.
    """

    def __init__(
        self,
        name: str,
        schema: Schema,
        *,
        address: str = "tcp://127.0.0.1:0",
        keys: Keys | None = None,
        advertise: str | None = None,
        cursors: Mapping[tuple[str, int], int] | None = None,
        **options: Any,
    ) -> None:
        """``advertise``: the host that dialers should use if the address names all interfaces.

        ``options``: credit_bytes, credit_messages (per peer), heartbeat_s, dead_after_s, max_frame_bytes, clock.
        """
        super().__init__(name, schema, keys=keys, **options)
        require_safe(address, keys)
        self._address, self._advertise = address, advertise
        self._cursors = dict(cursors or {})
        self._sessions: dict[str, Session] = {}
        self._routes: dict[bytes, Session] = {}
        self._gate: Gate | None = None

    @property
    def peers(self) -> set[str]:
        """Names of the peers that are here."""
        return set(self._sessions)

    async def start(self) -> str:
        """Bind and return the endpoint with the real port; ``OSError`` if that is not possible."""
        try:
            return self._bind()
        except BaseException:
            await self.close()
            raise

    def _bind(self) -> str:
        context, owner = self._begin()
        if self._keys is not None:
            self._gate = Gate(context, self._keys)
            owner.adopt_beside(self._gate.socket, self._gate.answer)
        router = self._socket(zmq.ROUTER, self._address)
        router.router_mandatory = True
        if self._keys is not None:
            self._keys.secure_listener(router)
        try:
            router.bind(self._address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{self.name} cannot bind {self._address}: {error.strerror}") from error
        endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        for everywhere in ("//0.0.0.0:", "//[::]:"):
            endpoint = endpoint.replace(everywhere, f"//{self._advertise or network.gethostname()}:")
        return endpoint

    async def send(
        self,
        peer: str,
        kind: str,
        header: dict[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        deadline_s: float | None = 60,
        wait: Wait = "queued",
    ) -> None:
        """Send within the peer's credit, waiting for it if need be.

        Raises ``PeerLost`` if the peer is not here or leaves meanwhile, ``DeadlineExpired``, and ``ProtocolError`` if
        the message breaks the schema. With ``wait="acked"`` returns when the peer's consumer is done with the message.
        """
        session = self._sessions.get(peer)
        if session is None:
            raise PeerLost(f"{self.name} cannot send {kind} to {peer}: it is not here ({self._describe()})")
        await self._submit(session, kind, header, buffers, deadline_s, wait)

    def stats(self) -> dict[str, int]:
        """See ``BaseLink.stats``; ``denied`` counts connections with a wrong CURVE key."""
        return {**super().stats(), "peers": len(self._sessions), "denied": self._gate.refused if self._gate else 0}

    def _all_sessions(self) -> Iterable[Session]:
        return list(self._sessions.values())

    def _session_of(self, peer: str) -> Session | None:
        return self._sessions.get(peer)

    def _session_at(self, route: bytes) -> Session | None:
        return self._routes.get(route)

    def _on_handshake(self, route: bytes, frame: ControlFrame) -> None:
        if frame.kind != "hello":
            raise ProtocolError(f"a dialer sent {frame.kind}")
        hello = Handshake.checked(frame.header)
        session = self._sessions.get(hello.name)
        if session is not None and hello.stream < session.inbox.stream:
            self._reply(route, "denied", f"a newer process is here as {hello.name}")
            return
        if session is not None and hello.stream != session.inbox.stream:
            self._leave(session, "replaced by a newer process")
            session = None
        joined = session is None
        if session is None:
            session = self._new_session(hello)
        session.inbox.reconnect(hello)
        session.outbox.reconnect(hello)
        self._routes.pop(session.route, None)
        session.route, session.established = route, True
        self._routes[route] = session
        session.last_heard = self._clock()
        session.control.clear()
        session.control.append(pack_control("welcome", **session.handshake(self.name).header()))
        self._dirty[session] = None
        self._count["connections"] += 1
        if joined:
            self._sessions[hello.name] = session
            self._remember(hello.name, session.inbox)
            self._count["joined"] += 1
            self._mailbox.put(Message("$joined", {"session": hello.stream}, (), hello.name, hello.stream))

    def _new_session(self, hello: Handshake) -> Session:
        key = (hello.name, hello.stream)
        inbox = self._inboxes.get(key)  # the same process comes back after it was given up
        if inbox is None:
            inbox = Inbox(hello.stream, self._credit, received=self._cursors.get(key, 0))
        return Session(hello.name, Outbox(new_stream()), inbox, self._clock())

    def _leave(self, session: Session, reason: str) -> None:
        self._sessions.pop(session.name, None)
        self._routes.pop(session.route, None)
        session.established = False
        lost = session.outbox.abandon(PeerLost(f"{self.name} lost {session.name}: {reason}"))
        stream = session.inbox.stream
        header = {"session": stream, "reason": reason, "unacknowledged": lost}
        self._count["left"] += 1
        self._mailbox.put(Message("$left", header, (), session.name, stream))

    def _on_bye(self, session: Session, reason: str) -> None:
        self._leave(session, reason)

    def _on_silence(self, session: Session, seconds: float) -> None:
        self._leave(session, f"not heard for {seconds:.1f} s")

    def _on_unroutable(self, session: Session) -> None:
        self._routes.pop(session.route, None)
        session.established = False

    def _start_over(self, route: bytes, reason: str) -> None:
        session = self._routes.pop(route, None)
        if session is not None:
            session.established = False
        self._reply(route, "reset", reason)

    def _reply(self, route: bytes, kind: str, reason: str) -> None:
        if self._owner is not None:
            self._owner.send(route, pack_control(kind, reason=reason[:500]))

    def _describe(self) -> str:
        here = ", ".join(f"{s.name}{'' if s.established else ' (disconnected)'}" for s in self._sessions.values())
        return f"peers here: {here or 'none'}" + (f"; last refusal: {self.last_refusal}" if self.last_refusal else "")

    async def __aenter__(self) -> Listener:
        self.endpoint = await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Dialer(BaseLink):
    """Connects to one Listener, and again whenever the connection is lost, for as long as it is open.

    With ``events`` set ``recv`` reports ``"$joined"`` (header: session) when a listener process, the first or a
    restarted one, takes up the conversation. When the listener says goodbye, waits end with ``PeerLost`` until another
    listener answers at the endpoint.
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
        self._gone = PeerLost(f"{self.name} lost {session.name}: {reason}")
        session.outbox.interrupt(self._gone)
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
