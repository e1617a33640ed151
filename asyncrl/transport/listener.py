"""The end that binds: see ``links``."""

from __future__ import annotations

import socket as network
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import zmq

from asyncrl.transport.base import BaseLink, Wait, new_stream
from asyncrl.transport.errors import PeerLost, ProtocolError
from asyncrl.transport.frames import Buffer, ControlFrame, Message, Schema, pack_control
from asyncrl.transport.keys import Gate, Keys, require_safe
from asyncrl.transport.session import Handshake, Inbox, Outbox, Session


class Listener(BaseLink):
    """Binds a port; peers come and go, each under a name of its own.

    ``recv`` also reports them: kind ``"$joined"`` (header: session) and ``"$left"`` (header: session, reason, goodbye:
    whether it said so itself, unacknowledged: how many of our messages it may not have consumed), with ``Message.peer``
    set.

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

    def session_id(self, peer: str) -> int | None:
        """``Message.session`` of the process that is here as ``peer``; None if none is."""
        session = self._sessions.get(peer)
        return None if session is None else session.inbox.stream

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
        the message breaks the schema. With ``wait="acked"`` returns when the peer's consumer is done with the message;
        if the deadline expires before that, the message is on its way all the same.
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

    def _leave(self, session: Session, reason: str, goodbye: bool = False) -> None:
        self._sessions.pop(session.name, None)
        self._routes.pop(session.route, None)
        session.established = False
        lost = session.outbox.abandon(PeerLost(f"{self.name} lost {session.name}: {reason}"))
        stream = session.inbox.stream
        header = {"session": stream, "reason": reason, "goodbye": goodbye, "unacknowledged": lost}
        self._count["left"] += 1
        self._mailbox.put(Message("$left", header, (), session.name, stream))

    def _on_bye(self, session: Session, reason: str) -> None:
        self._leave(session, reason, goodbye=True)

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
