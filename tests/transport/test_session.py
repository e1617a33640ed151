"""The session state alone: a network that loses connections and processes that are killed, driven by hypothesis."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.transport.errors import OutOfStep, PeerLost, ProtocolError, TransportError
from asyncrl.transport.frames import Ack
from asyncrl.transport.session import Credit, Handshake, Inbox, Item, Outbox

CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # on a loaded machine


class Process:
    """One end: its session state, the consumer's memory and what its owner would do with frames."""

    def __init__(self, name: str, stream: int, credit: Credit) -> None:
        self.name, self.credit = name, credit
        self.outbox = Outbox(stream)
        self.inbox = Inbox(0, credit)
        self.established = False
        self.mail: list[tuple[int, int, bytes]] = []  # (stream, seq, payload) received, not yet consumed

    def handshake(self) -> Handshake:
        out, inn = self.outbox, self.inbox
        return Handshake(
            self.name, out.stream, out.last, out.kept(), inn.stream, inn.received, inn.held(), *self.grant()
        )

    def grant(self) -> tuple[int, int]:
        return self.credit.messages, self.credit.bytes

    def meet(self, peer: Handshake, cursor: int = 0) -> None:
        peer = Handshake.checked(peer.header())
        if peer.stream != self.inbox.stream:
            self.inbox = Inbox(peer.stream, self.credit, received=cursor)
        self.inbox.reconnect(peer)
        self.outbox.reconnect(peer)
        self.established = True

    def output(self) -> list[Any]:
        ack = self.inbox.take_ack()
        frames: list[Any] = [ack] if ack else []
        return frames + [(item.seq, item.body) for item in self.outbox.sendable()]

    def take(self, frame: Any) -> None:
        if isinstance(frame, Ack):
            self.outbox.acknowledge(frame)
        else:
            seq, body = frame
            before = self.inbox.received
            assert self.inbox.accept(seq, len(body)), "no connection delivers a repeat"
            assert seq > before
            self.mail.append((self.inbox.stream, seq, body))


class Conversation(RuleBasedStateMachine):
    """A dials, B listens. B's consumer is durable: what it consumed and how far, survives the death of B."""

    @initialize(messages=st.integers(1, 4), size=st.integers(1, 40), ordered=st.booleans())
    def begin(self, messages: int, size: int, ordered: bool) -> None:
        self.credit, self.ordered = Credit(messages, size), ordered
        self.streams = 1
        self.a = Process("a", 1, self.credit)
        self.b = Process("b", self.new_stream(), self.credit)
        self.to_a: deque[Any] = deque()
        self.to_b: deque[Any] = deque()
        self.offered = {"a": 0, "b": 0}  # messages of the present lives
        self.consumed: dict[str, list[bytes]] = {"a": [], "b": []}
        self.consumed_numbers: set[tuple[int, int]] = set()  # (stream, seq): the durable memory of the consumers
        self.cursor = 0
        self.b_lost: set[bytes] = set()
        self.hello()

    def new_stream(self) -> int:
        self.streams += 1
        return self.streams

    def hello(self) -> None:
        """A new connection: whatever travelled on the old one is lost."""
        self.to_a.clear()
        self.to_b.clear()
        self.a.established = self.b.established = False
        self.to_b.append(self.a.handshake())

    @rule(who=st.sampled_from("ab"), size=st.integers(1, 50))
    def send(self, who: str, size: int) -> None:
        process = self.a if who == "a" else self.b
        self.offered[who] += 1
        stream = process.outbox.stream
        item = Item(f"{stream}/{self.offered[who]}/".encode().ljust(size, b"."), ())

        def settled(error: TransportError | None) -> None:
            assert (stream, item.seq) in self.consumed_numbers, "acknowledged before it was consumed"

        item.settled = settled
        process.outbox.offer(item)

    @rule(who=st.sampled_from("ab"))
    def transmit(self, who: str) -> None:
        process, wire = (self.a, self.to_b) if who == "a" else (self.b, self.to_a)
        if process.established:
            wire.extend(process.output())

    @rule(n=st.integers(1, 5))
    def arrive_at_b(self, n: int) -> None:
        for _ in range(min(n, len(self.to_b))):
            frame = self.to_b.popleft()
            if isinstance(frame, Handshake):
                self.b.meet(frame, self.cursor)
                self.to_a.append(self.b.handshake())
            else:
                self.b.take(frame)

    @rule(n=st.integers(1, 5))
    def arrive_at_a(self, n: int) -> None:
        for _ in range(min(n, len(self.to_a))):
            frame = self.to_a.popleft()
            if isinstance(frame, Handshake):
                self.a.meet(frame)
            else:
                self.a.take(frame)

    @rule(rounds=st.integers(1, 3), n=st.integers(1, 5))
    def exchange(self, rounds: int, n: int) -> None:
        for _ in range(rounds):
            self.arrive_at_b(n)
            self.arrive_at_a(n)
            self.transmit("a")
            self.transmit("b")

    @rule(index=st.integers(0, 10))
    def consume_at_b(self, index: int) -> None:
        if self.b.mail:
            stream, seq, body = self.b.mail.pop(0 if self.ordered else index % len(self.b.mail))
            if (stream, seq) not in self.consumed_numbers:  # what (session, seq) is for; see redelivery below
                self.consumed["b"].append(body)
            self.consumed_numbers.add((stream, seq))
            if self.ordered:
                self.cursor = seq
            self.b.inbox.done(seq)

    @rule(index=st.integers(0, 10))
    def consume_at_a(self, index: int) -> None:
        if self.a.mail:
            stream, seq, body = self.a.mail.pop(index % len(self.a.mail))
            self.consumed["a"].append(body)
            self.consumed_numbers.add((stream, seq))
            if stream == self.a.inbox.stream:
                assert self.a.inbox.done(seq)
                assert not self.a.inbox.done(seq)

    @rule(meet=st.booleans())
    def lose_the_connection(self, meet: bool) -> None:
        self.hello()
        if meet:
            self.exchange(1, 1)

    @precondition(lambda self: self.b.established)
    @rule()
    def kill_b(self) -> None:
        """B's unconsumed mail dies with it, and so does what it had not yet delivered to A."""
        self.b_lost |= {i.body for i in [*self.b.outbox._kept.values(), *self.b.outbox._waiting]}
        self.b = Process("b", self.new_stream(), self.credit)
        self.offered["b"] = 0
        self.hello()

    @precondition(lambda self: self.ordered)
    @invariant()
    def an_ordered_consumer_with_a_cursor_sees_no_repeat(self) -> None:
        assert not any((stream, seq) in self.consumed_numbers for stream, seq, _ in self.b.mail)

    @precondition(lambda self: hasattr(self, "a"))
    @invariant()
    def holds(self) -> None:
        for process in (self.a, self.b):
            assert len(process.inbox.held()) <= self.credit.messages
            held = sum(process.inbox._held.values())
            assert held <= self.credit.bytes or len(process.inbox.held()) == 1
            out = process.outbox
            flying = [i for i in out._kept.values() if i.flying]
            assert (out._flying, out._flying_bytes) == (len(flying), sum(i.size for i in flying))
            assert out._kept_bytes == sum(i.size for i in out._kept.values())
            assert out._flying_bytes <= self.credit.bytes or out._flying <= 1

    def teardown(self) -> None:
        """Let it settle: everything offered is consumed once, and nobody owes anything."""
        if not hasattr(self, "a"):
            return
        self.hello()
        for _ in range(1000):
            self.exchange(1, 100)
            self.consume_at_a(0)
            self.consume_at_b(0)
            if self.a.established and not any(p.outbox.unacknowledged + p.outbox.waiting for p in (self.a, self.b)):
                break
        from_a, from_b = self.consumed["b"], self.consumed["a"]
        assert sorted(from_a) == sorted(set(from_a)) and len(from_a) == self.offered["a"]
        assert len(from_b) == len(set(from_b))
        of_present_life = [m for m in from_b if int(m.split(b"/")[0]) == self.b.outbox.stream]
        assert len(of_present_life) == self.offered["b"]
        if self.ordered:
            assert [int(m.split(b"/")[1]) for m in from_a] == list(range(1, self.offered["a"] + 1))
        for process in (self.a, self.b):
            assert process.outbox.unacknowledged == process.outbox.waiting == 0


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=200, stateful_step_count=40, **CALM)


def grant(credit: Credit, outbox: Outbox) -> Handshake:
    return Handshake("peer", 9, 0, [], outbox.stream, 0, [], credit.messages, credit.bytes)


def test_acknowledgements_out_of_order_free_what_they_name() -> None:
    outbox = Outbox(1)
    outbox.reconnect(grant(Credit(10, 1000), outbox))
    settled: list[int] = []
    for seq in range(1, 6):
        item = Item(b"x", ())
        item.settled = lambda error, seq=seq: settled.append(seq)
        assert outbox.offer(item)
    list(outbox.sendable())
    outbox.acknowledge(Ack(1, [3, 4]))
    outbox.acknowledge(Ack(1, [3]))  # again: harmless
    assert settled == [1, 3, 4] and outbox.kept() == [2, 5]
    outbox.refuse(2, ProtocolError("no"))
    assert settled == [1, 3, 4, 2]
    with pytest.raises(OutOfStep, match="number 6 was never sent"):
        outbox.acknowledge(Ack(0, [6]))
    assert outbox.abandon(PeerLost("gone")) == 1 and settled[-1] == 5


def test_a_smaller_credit_after_a_restart_holds_back_what_was_admitted_before() -> None:
    outbox = Outbox(1)
    outbox.reconnect(grant(Credit(4, 1000), outbox))
    for _ in range(4):
        outbox.offer(Item(b"x", ()))
    assert len(list(outbox.sendable())) == 4
    outbox.reconnect(grant(Credit(1, 1000), outbox))
    assert [i.seq for i in outbox.sendable()] == [1]
    outbox.acknowledge(Ack(1, []))
    assert [i.seq for i in outbox.sendable()] == [2]


def test_inbox_names_gaps_and_overdrafts() -> None:
    inbox = Inbox(7, Credit(2, 100))
    assert inbox.accept(1, 10) and not inbox.accept(1, 10)
    with pytest.raises(OutOfStep, match="number 3 came where 2 was due"):
        inbox.accept(3, 10)
    with pytest.raises(OutOfStep, match="exceeds the credit"):
        inbox.accept(2, 91)
    assert inbox.accept(2, 90)
    assert inbox.done(2) and inbox.take_ack() == Ack(0, [2])
    assert inbox.done(1) and inbox.take_ack() == Ack(2, [])
    assert inbox.take_ack() is None
    with pytest.raises(OutOfStep, match="went back"):
        inbox.reconnect(Handshake("p", 7, 1, [], 0, 0, [], 1, 1))


integers = st.integers(-1, 6)


@settings(**CALM)
@given(last=integers, kept=st.lists(integers, max_size=4), received=integers, held=st.lists(integers, max_size=4))
def test_a_handshake_that_contradicts_itself_is_refused(
    last: int, kept: list[int], received: int, held: list[int]
) -> None:
    def rises(values: list[int], limit: int) -> bool:
        return values == sorted(set(values)) and all(1 <= v <= limit for v in values)

    shake = Handshake("p", 1, last, kept, 1, received, held, 1, 1)
    good = last >= 0 and received >= 0 and rises(kept, last) and rises(held, received)
    if good:
        assert Handshake.checked(shake.header()) == shake
    else:
        with pytest.raises(ProtocolError):
            Handshake.checked(shake.header())
