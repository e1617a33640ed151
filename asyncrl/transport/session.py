"""One conversation between two processes, without sockets and without a clock.

A conversation is two streams, one each way. The sending half (``Outbox``) numbers messages from 1, sends no more than
the peer's credit allows and keeps each until the peer's consumer is done with it. The receiving half (``Inbox``)
takes numbers in order, drops what it has seen and remembers what its consumer still holds.

Connections come and go under a conversation. Each new one begins with a ``Handshake`` from both sides:

    sending half:    stream (its id), last (highest number given out), kept (numbers not yet acknowledged)
    receiving half:  reading (id of the peer's stream), received (highest number taken), held (numbers not yet done)

Of the numbers kept, those up to ``received`` that are not ``held`` are done; the held ones stay in flight; the rest
is sent again, in order. A number is therefore delivered once to an inbox, whatever the connections lose; and an inbox
that starts anew (a restarted process) is offered exactly what was not acknowledged to the sender.

Invariants (tests/transport/test_session.py):
    delivered numbers of a stream increase strictly; none is skipped unless it was acknowledged before;
    numbers in flight <= credit, and bytes in flight <= credit unless a single message is larger than all of it;
    everything up to ``received`` is either held or done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.transport.errors import OutOfStep, ProtocolError, TransportError
from asyncrl.transport.frames import Ack, check_numbers

MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Credit:
    """What a receiver will hold for one peer: messages and bytes that its consumer is not done with."""

    messages: int
    bytes: int

    def allows(self, messages: int, nbytes: int, size: int) -> bool:
        """Whether one more of ``size`` bytes fits. A message larger than all the credit may travel alone."""
        return messages < self.messages and (messages == 0 or nbytes + size <= self.bytes)


@dataclass(frozen=True, slots=True)
class Handshake:
    """What each side says first on a new connection."""

    name: str
    stream: int
    last: int
    kept: list[int]
    reading: int
    received: int
    held: list[int]
    credit_messages: int
    credit_bytes: int

    @classmethod
    def checked(cls, header: dict[str, Any]) -> Handshake:
        """From a header whose types are already checked; raises ``ProtocolError`` if it contradicts itself."""
        shake = cls(**header)
        numbers = (shake.stream, shake.last, shake.reading, shake.received, shake.credit_messages, shake.credit_bytes)
        check_numbers(numbers, "handshake")
        for values, limit, what in ((shake.kept, shake.last, "kept"), (shake.held, shake.received, "held")):
            check_numbers(values, what)
            if any(b <= a for a, b in zip([0, *values], [*values, limit + 1], strict=True)):
                raise ProtocolError(f"handshake: {what} does not rise from 1 to {limit}")
        if not 0 < len(shake.name) <= MAX_NAME or not shake.name.isprintable():
            raise ProtocolError(f"handshake: name {shake.name!r:.60}")
        if shake.stream == 0:
            raise ProtocolError("handshake: stream 0")
        return shake

    def header(self) -> dict[str, Any]:
        return asdict(self)


class Item:
    """A message on its way out. ``settled`` gets None once the peer is done with it, else what went wrong."""

    __slots__ = ("admitted", "body", "buffers", "flying", "sends", "seq", "settled", "size")

    def __init__(self, body: bytes, buffers: tuple[memoryview, ...]) -> None:
        self.body, self.buffers = body, buffers
        self.size = len(body) + (sum(b.nbytes for b in buffers) if buffers else 0)
        self.seq = 0
        self.flying = False  # on the present connection, or known to be held by the peer
        self.sends = 0  # on any connection so far
        self.admitted: Callable[[], None] | None = None
        self.settled: Callable[[TransportError | None], None] | None = None


class Outbox:
    """The sending half. ``offer`` a message, then transmit what ``sendable`` yields."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.credit = Credit(0, 0)  # none until the peer grants some
        self.last = 0
        self.floor = 0  # everything up to here is acknowledged
        self._kept: dict[int, Item] = {}
        self._kept_bytes = 0
        self._unsent: deque[Item] = deque()
        self._waiting: deque[Item] = deque()
        self._flying = 0
        self._flying_bytes = 0
        self._watchers: list[Callable[[TransportError | None], None]] = []

    @property
    def unacknowledged(self) -> int:
        """Messages given a number and not yet done with by the peer."""
        return len(self._kept)

    @property
    def waiting(self) -> int:
        """Messages that wait for credit."""
        return len(self._waiting)

    def offer(self, item: Item) -> bool:
        """Number the message if credit allows (True); else it waits its turn and ``item.admitted`` is called then."""
        if not self._waiting and self.credit.allows(len(self._kept), self._kept_bytes, item.size):
            self._admit(item)
            return True
        self._waiting.append(item)
        return False

    def withdraw(self, item: Item) -> None:
        """Forget a message that still waits for credit."""
        if item in self._waiting:
            self._waiting.remove(item)
            self._admit_waiting()

    def sendable(self) -> Iterator[Item]:
        """Messages to transmit now on the present connection."""
        while self._unsent:
            item = self._unsent[0]
            if item.seq in self._kept:
                if not self.credit.allows(self._flying, self._flying_bytes, item.size):
                    return
                self._fly(item)
                item.sends += 1
                self._unsent.popleft()
                yield item
            else:  # acknowledged meanwhile
                self._unsent.popleft()

    @property
    def has_sendable(self) -> bool:
        return bool(self._unsent) and self.credit.allows(self._flying, self._flying_bytes, self._unsent[0].size)

    def acknowledge(self, ack: Ack) -> None:
        """The peer is done with these numbers."""
        floor, above = ack
        highest = max(floor, *above) if above else floor
        if highest > self.last:
            raise OutOfStep(f"stream {self.stream}: number {highest} was never sent")
        for seq in range(self.floor + 1, floor + 1):
            self._settle(seq, None)
        if floor > self.floor:
            self.floor = floor
        for seq in above:
            self._settle(seq, None)
        if self._waiting:
            self._admit_waiting()

    def refuse(self, seq: int, error: ProtocolError) -> None:
        """The peer took the number and threw the message away."""
        self._settle(seq, error)
        self._admit_waiting()

    def reconnect(self, peer: Handshake) -> None:
        """A new connection: settle what the peer is done with and queue again what it has not received."""
        received, held = (peer.received, set(peer.held)) if peer.reading == self.stream else (0, set())
        if received > self.last:
            raise OutOfStep(f"stream {self.stream}: {received} received, but only {self.last} were sent")
        self.credit = Credit(peer.credit_messages, peer.credit_bytes)
        for seq in [n for n in self._kept if n <= received and n not in held]:
            self._settle(seq, None)
        self._unsent.clear()
        self._flying = self._flying_bytes = 0
        for seq, item in self._kept.items():
            item.flying = False
            if seq <= received:
                self._fly(item)
            else:
                self._unsent.append(item)
        self._admit_waiting()

    def when_empty(self, watcher: Callable[[TransportError | None], None]) -> None:
        """Call ``watcher`` once the peer is done with everything, or with the error that prevents it."""
        self._watchers.append(watcher)
        self._notify(None)

    def interrupt(self, error: TransportError) -> None:
        """Tell everyone who waits here that the peer is not there; keep what has a number, in case it comes back."""
        waiting, self._waiting = self._waiting, deque()
        for item in [*waiting, *self._kept.values()]:
            if item.settled:
                item.settled(error)
                item.settled = None
        self._notify(error)

    def abandon(self, error: TransportError) -> int:
        """The peer is gone for good: drop everything; returns how many messages were not acknowledged."""
        self.interrupt(error)
        lost = len(self._kept)
        for seq in list(self._kept):
            self._settle(seq, error)
        self._unsent.clear()
        return lost

    def kept(self) -> list[int]:
        """Numbers not acknowledged, rising."""
        return list(self._kept)

    def _admit(self, item: Item) -> None:
        self.last += 1
        item.seq = self.last
        self._kept[item.seq] = item
        self._kept_bytes += item.size
        self._unsent.append(item)

    def _admit_waiting(self) -> None:
        while self._waiting and self.credit.allows(len(self._kept), self._kept_bytes, self._waiting[0].size):
            item = self._waiting.popleft()
            self._admit(item)
            if item.admitted:
                item.admitted()

    def _notify(self, error: TransportError | None) -> None:
        if error is not None or not (self._kept or self._waiting):
            watchers, self._watchers = self._watchers, []
            for watcher in watchers:
                watcher(error)

    def _fly(self, item: Item) -> None:
        item.flying = True
        self._flying += 1
        self._flying_bytes += item.size

    def _settle(self, seq: int, error: TransportError | None) -> None:
        item = self._kept.pop(seq, None)
        if item is None:
            return
        self._kept_bytes -= item.size
        if item.flying:
            item.flying = False
            self._flying -= 1
            self._flying_bytes -= item.size
        if item.settled:
            item.settled(error)
        if self._watchers:
            self._notify(None)


class Inbox:
    """The receiving half of one stream. ``accept`` each number that arrives, ``done`` when its consumer is."""

    def __init__(self, stream: int, credit: Credit, received: int = 0) -> None:
        """``received``: the consumer's durable cursor, if it already has some of this stream from an earlier life."""
        self.stream = stream
        self.credit = credit
        self.received = received
        self._held: dict[int, int] = {}  # number -> bytes; numbers rise
        self._held_bytes = 0
        self._again: deque[int] = deque()  # numbers the peer will send again, before it goes on with _next
        self._next = received + 1
        self._fresh: list[int] = []  # done and not yet acknowledged

    def reconnect(self, peer: Handshake) -> None:
        """A new connection on which the peer sends again what is kept and was not received."""
        if peer.last < self.received:
            raise OutOfStep(f"stream {self.stream} went back from {self.received} to {peer.last}")
        self._again = deque(n for n in peer.kept if n > self.received)
        self._next = peer.last + 1
        self._fresh.clear()  # the handshake itself said what is done

    def accept(self, seq: int, nbytes: int) -> bool:
        """False for a repeat; raises ``OutOfStep`` for a gap or for more than was granted."""
        if seq <= self.received:
            return False
        expected = self._again[0] if self._again else self._next
        if seq != expected:
            raise OutOfStep(f"stream {self.stream}: number {seq} came where {expected} was due")
        if not self.credit.allows(len(self._held), self._held_bytes, nbytes):
            raise OutOfStep(f"stream {self.stream}: number {seq} exceeds the credit of {self.credit}")
        if self._again:
            self._again.popleft()
        else:
            self._next += 1
        self.received = seq
        self._held[seq] = nbytes
        self._held_bytes += nbytes
        return True

    def done(self, seq: int) -> bool:
        """The consumer is done with ``seq``; False if it was before."""
        nbytes = self._held.pop(seq, None)
        if nbytes is None:
            return False
        self._held_bytes -= nbytes
        self._fresh.append(seq)
        return True

    def take_ack(self) -> Ack | None:
        """What the peer must be told since the last call, or None."""
        if not self._fresh:
            return None
        floor = next(iter(self._held)) - 1 if self._held else self.received
        ack = Ack(floor, [n for n in self._fresh if n > floor])
        self._fresh.clear()
        return ack

    def held(self) -> list[int]:
        """Numbers received and not done, rising."""
        return list(self._held)


class Session:
    """Both halves of one conversation, and when the peer was last heard."""

    def __init__(self, name: str, outbox: Outbox, inbox: Inbox, now: float) -> None:
        self.name = name  # the peer's
        self.outbox, self.inbox = outbox, inbox
        self.route = b""
        self.established = False  # a handshake is complete on the present connection
        self.last_heard = self.last_sent = now
        self.control: deque[bytes] = deque()  # frames that go before data

    def handshake(self, own_name: str) -> Handshake:
        """Our half of the handshake, as of now."""
        out, inn = self.outbox, self.inbox
        return Handshake(
            own_name, out.stream, out.last, out.kept(), inn.stream, inn.received, inn.held(),
            inn.credit.messages, inn.credit.bytes,
        )  # fmt: skip

    def quiet_for(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return now - self.last_heard
