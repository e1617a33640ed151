"""Listener and Dialer over real sockets, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from asyncrl.transport.frames import (
    DeadlineExpired,
    Kind,
    PeerLost,
    ProtocolError,
    Schema,
    TransportError,
    array_of,
)
from asyncrl.transport.links import Dialer, Listener
from tests.transport.talk import LONG, SCHEMA, run, take


def test_a_message_arrives_as_it_was_sent() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
            joined = await listener.recv(deadline_s=LONG, waiting_for="gen/0")
            assert (joined.kind, joined.peer, joined.session) == ("$joined", "gen/0", dialer.session)
            assert listener.peers == {"gen/0"}
            array = np.random.default_rng(0).normal(size=(2048, 1024)).astype(np.float64)  # 16 MiB
            await dialer.send("tensor", {"dtype": "<f8", "shape": list(array.shape)}, [array])
            message = await take(listener, "tensor")
            received = array_of(message.buffers[0], message.header["dtype"], message.header["shape"])
            assert np.array_equal(received, array)
            assert (message.peer, message.session, message.seq) == ("gen/0", dialer.session, 1)
            assert dialer.stats()["unacknowledged"] == 1
            listener.done(message)
            await dialer.flush(deadline_s=LONG)
            assert dialer.stats()["unacknowledged"] == 0
            await listener.send("gen/0", "bag", {}, [b"", bytearray(b"abc"), memoryview(b"de"), np.float32(1.5)])
            reply = await take(dialer, "bag", auto_done=True)
            assert [bytes(b) for b in reply.buffers] == [b"", b"abc", b"de", np.float32(1.5).tobytes()]

    run(test)


@contextlib.contextmanager
def allocating_less_than(limit: int) -> Iterator[None]:
    """Fails if Python or NumPy ever held ``limit`` bytes more inside; what libzmq holds is not counted."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < limit, f"{peak - before} bytes were allocated on the way"


@pytest.mark.parametrize("mebibytes", [16, 64])
def test_large_buffers_are_not_copied(mebibytes: int) -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("trainer/0", SCHEMA, listener.endpoint) as dialer:
            array = np.arange(mebibytes << 17, dtype=np.uint64)
            with allocating_less_than(1 << 20):
                await dialer.send("bag", {}, [array, array[: 1 << 17]])
                message = await take(listener, "bag")
            assert all(isinstance(buffer.obj, zmq.Frame) for buffer in message.buffers)
            first = array_of(message.buffers[0], np.uint64, array.shape)
            assert not first.flags.owndata and first.flags.aligned
            assert np.array_equal(first, array)
            assert np.array_equal(array_of(message.buffers[1], np.uint64, (1 << 17,)), array[: 1 << 17])

    run(test)


def test_wait_acked_returns_after_done() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
            sending = asyncio.create_task(dialer.send("number", {"x": 1}, wait="acked", deadline_s=LONG))
            message = await take(listener, "number")
            for _ in range(5):
                await asyncio.sleep(0)
            assert not sending.done()
            listener.done(message)
            listener.done(message)
            await sending

    run(test)


def test_credit_in_messages_stops_the_sender_until_the_consumer_is_done() -> None:
    async def test() -> None:
        async with (
            Listener("controller", SCHEMA, credit_messages=3) as listener,
            Dialer("gen/0", SCHEMA, listener.endpoint) as dialer,
        ):
            for x in range(3):
                await dialer.send("number", {"x": x})
            with pytest.raises(DeadlineExpired, match=r"gen/0 waited 0.05 s for credit from controller to send number"):
                await dialer.send("number", {"x": 3}, deadline_s=0.05)
            fourth = asyncio.create_task(dialer.send("number", {"x": 4}, deadline_s=LONG))
            messages = [await take(listener, "number") for _ in range(3)]
            assert not fourth.done()
            listener.done(messages[1])  # out of order is fine
            await fourth
            assert (await take(listener, "number")).header == {"x": 4}
            stats = dialer.stats()
            assert (stats["credit_stalls"], stats["sent"], stats["unacknowledged"]) == (2, 4, 3)

    run(test)


def test_credit_in_bytes_and_a_message_larger_than_all_of_it() -> None:
    async def test() -> None:
        async with (
            Listener("controller", SCHEMA, credit_bytes=1 << 20) as listener,
            Dialer("gen/0", SCHEMA, listener.endpoint) as dialer,
        ):
            big, small = bytes(3 << 20), bytes(1 << 19)
            await dialer.send("bag", {}, [big])  # larger than the credit: travels alone
            second = asyncio.create_task(dialer.send("bag", {}, [small], deadline_s=LONG))
            message = await take(listener, "bag")
            assert message.buffers[0].nbytes == 3 << 20 and not second.done()
            listener.done(message)
            await second
            assert (await take(listener, "bag")).buffers[0].nbytes == 1 << 19

    run(test)


def test_an_expired_wait_names_owner_time_reason_and_state() -> None:
    """verl #7155, #3895: waits without an end. Owner, reason and deadline are said."""

    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("trainer/0", SCHEMA, listener.endpoint):
            await take(listener, "$joined")
            with pytest.raises(DeadlineExpired) as expired:
                await listener.recv(deadline_s=0.01, waiting_for="batch report from trainer/0")
            text = "controller waited 0.01 s for batch report from trainer/0 (peers here: trainer/0)"
            assert str(expired.value) == text
            with pytest.raises(PeerLost, match="cannot send number to trainer/1: it is not here"):
                await listener.send("trainer/1", "number", {"x": 1})

    run(test)


def test_nobody_listens() -> None:
    async def test() -> None:
        dialer = Dialer("gen/0", SCHEMA, "tcp://127.0.0.1:9")
        with pytest.raises(DeadlineExpired, match=r"gen/0 waited 0.1 s for a listener at tcp://127.0.0.1:9"):
            await dialer.start(deadline_s=0.1)
        with pytest.raises(DeadlineExpired, match="credit"):
            await dialer.send("number", {"x": 1}, deadline_s=0.1)
        await dialer.close()
        with pytest.raises(TransportError, match="closed"):
            await dialer.send("number", {"x": 1}, deadline_s=0.1)

    run(test)


def test_the_schema_is_enforced_at_the_sender() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
            with pytest.raises(ProtocolError, match=r"number\.x is str 'a', not int"):
                await dialer.send("number", {"x": "a"})
            with pytest.raises(ValueError, match="ascontiguousarray"):
                await dialer.send("bag", {}, [np.zeros((4, 4)).T])
            with pytest.raises(ValueError, match="buffer 1"):
                await dialer.send("bag", {}, [b"", "text"])  # type: ignore[list-item]
            assert dialer.stats()["sent"] == 0

    run(test)


def test_a_message_of_another_schema_is_refused_and_the_sender_hears_of_it() -> None:
    async def test() -> None:
        other = Schema({"number": Kind({"x": str}), "later": Kind()})
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", other, listener.endpoint) as dialer:
            for kind, header, said in (("number", {"x": "a"}, "number.x"), ("later", {}, "unknown kind 'later'")):
                with pytest.raises(ProtocolError, match=said):
                    await dialer.send(kind, header, wait="acked", deadline_s=LONG)
            assert (listener.stats()["refused"], dialer.stats()["refused_by_peer"]) == (2, 2)
            assert "later" in listener.last_refusal

    run(test)


def test_the_listener_reports_goodbyes_and_both_directions_stay_in_order() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener:
            dialers = [Dialer(f"gen/{i}", SCHEMA, listener.endpoint) for i in range(3)]
            for dialer in dialers:
                await dialer.start()

            async def echo() -> dict[str, list[int]]:
                seen: dict[str, list[int]] = {}
                gone = 0
                while gone < 3:
                    message = await listener.recv(deadline_s=LONG, waiting_for="numbers", auto_done=True)
                    gone += message.kind == "$left"
                    if message.kind == "number":
                        seen.setdefault(message.peer, []).append(message.header["x"])
                        await listener.send(message.peer, "number", message.header)
                return seen

            async def talk(dialer: Dialer) -> None:
                for x in range(3000):
                    await dialer.send("number", {"x": x})
                    if x >= 500:
                        assert (await take(dialer, "number", auto_done=True)).header["x"] == x - 500
                for x in range(2500, 3000):
                    assert (await take(dialer, "number", auto_done=True)).header["x"] == x
                await dialer.close()

            echoing = asyncio.create_task(echo())
            await asyncio.gather(*map(talk, dialers))
            assert await echoing == {f"gen/{i}": list(range(3000)) for i in range(3)}
            assert listener.peers == set()
            assert listener.stats()["refused"] == listener.stats()["gaps"] == listener.stats()["duplicates"] == 0

    run(test)


def test_waits_at_a_dialer_end_when_the_listener_says_goodbye() -> None:
    async def test() -> None:
        listener = Listener("controller", SCHEMA)
        async with Dialer("gen/0", SCHEMA, await listener.start()) as dialer:
            await take(listener, "$joined")
            await listener.send("gen/0", "number", {"x": 7})
            acked = asyncio.create_task(dialer.send("number", {"x": 1}, wait="acked", deadline_s=LONG))
            await take(listener, "number")
            await listener.close(reason="no disk")
            with pytest.raises(PeerLost, match="gen/0 lost controller: no disk") as lost:
                await acked
            assert lost.value.reason == "no disk"
            assert (await take(dialer, "number")).header == {"x": 7}  # what arrived before is not lost
            with pytest.raises(PeerLost):
                await dialer.recv(deadline_s=LONG, waiting_for="anything")

    run(test)


def test_a_cancelled_recv_loses_no_message() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
            await take(listener, "$joined")
            waits = [asyncio.create_task(take(listener, "number")) for _ in range(3)]
            await asyncio.sleep(0)
            await dialer.send("number", {"x": 1})
            await dialer.send("number", {"x": 2})
            waits[0].cancel()
            assert {(await w).header["x"] for w in waits[1:]} == {1, 2}

    run(test)


def test_silence_is_death_and_the_same_process_may_come_back() -> None:
    """The clock is ours: the link believes that 100 s passed."""

    async def test() -> None:
        now = time.monotonic()
        clock = {"skew": 0.0}
        listener = Listener("controller", SCHEMA, heartbeat_s=0.02, dead_after_s=50, clock=lambda: now + clock["skew"])
        endpoint = await listener.start()
        dialer = Dialer("gen/0", SCHEMA, endpoint, heartbeat_s=1000, dead_after_s=5000)  # says nothing by itself
        await dialer.start()
        await dialer.send("number", {"x": 1})
        held = await take(listener, "number")
        acked = asyncio.create_task(listener.send("gen/0", "number", {"x": 0}, wait="acked", deadline_s=LONG))
        assert (await take(dialer, "number")).header == {"x": 0}
        for step in range(1, 6000):  # small steps: a jump would look like an absence of our own
            clock["skew"] = step * 0.01
            listener.tick()
            if not listener.peers:
                break
        left = await take(listener, "$left")
        assert "not heard for" in left.header["reason"] and left.header["unacknowledged"] == 1 and step > 4900
        with pytest.raises(PeerLost, match="controller lost gen/0: not heard for"):
            await acked
        await dialer.send("number", {"x": 2})  # it lives after all: asked to start over, it dials again
        assert (await take(listener, "$joined")).session == held.session
        second = await take(listener, "number")
        assert second.header == {"x": 2}  # and x=1, still held, did not come twice
        listener.done(held)
        listener.done(second)
        await dialer.flush(deadline_s=LONG)
        await dialer.close()
        await listener.close()

    run(test)


def test_own_absence_is_not_held_against_peers() -> None:
    async def test() -> None:
        clock = {"now": 0.0}
        listener = Listener("controller", SCHEMA, heartbeat_s=2, dead_after_s=15, clock=lambda: clock["now"])
        async with Dialer("gen/0", SCHEMA, await listener.start()):
            await take(listener, "$joined")
            clock["now"] = 500.0  # this process was stopped for 500 s
            listener.tick()
            assert listener.peers == {"gen/0"}
        await listener.close()

    run(test)


def test_a_newer_process_takes_the_name_and_an_older_one_does_not() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener:
            first, second = (Dialer("gen/0", SCHEMA, listener.endpoint) for _ in range(2))
            if first.session > second.session:
                first, second = second, first
            await first.start()
            await first.send("number", {"x": 1})
            await take(listener, "$joined")
            message = await take(listener, "number")
            await second.start()
            assert (await take(listener, "$left")).header["reason"] == "replaced by a newer process"
            assert (await take(listener, "$joined")).session == second.session
            listener.done(message)  # of the old incarnation: harmless
            await first.send("number", {"x": 2})
            await second.send("number", {"x": 3})
            assert (await take(listener, "number")).header == {"x": 3}
            while "newer" not in first.last_refusal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            with pytest.raises(DeadlineExpired, match="last refusal: a newer process is here as gen/0"):
                await first.flush(deadline_s=0.1)
            await first.close()
            await second.close()

    run(test)


def test_a_port_in_use_is_named_and_nothing_is_left_behind() -> None:
    """NeMo #2380, AReaL #653, SkyRL #1302, prime-rl #2310: ports picked, then taken by others. Ours bind port 0."""

    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener:
            second = Listener("second", SCHEMA, address=listener.endpoint)
            with pytest.raises(OSError, match=r"second cannot bind tcp://127\.0\.0\.1:\d+: Address"):
                await second.start()
            with pytest.raises(RuntimeError, match="started before"):
                await second.start()

    run(test)


@pytest.mark.parametrize(("with_cursor", "expected"), [(False, [1, 3, 4, 5]), (True, [3, 4, 5])])
def test_a_restarted_listener_gets_what_its_predecessor_was_not_done_with(
    with_cursor: bool, expected: list[int]
) -> None:
    async def test() -> None:
        first = Listener("controller", SCHEMA)
        endpoint = await first.start()
        async with Dialer("gen/0", SCHEMA, endpoint, events=True) as dialer:
            joined = await take(dialer, "$joined")
            for x in range(1, 5):
                await dialer.send("number", {"x": x})
            messages = [await take(first, "number") for _ in range(4)]
            first.done(messages[1])
            while dialer.stats()["unacknowledged"] > 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await first.close()  # as good as killed: nothing else was acknowledged
            cursors = {("gen/0", dialer.session): 2} if with_cursor else None
            async with Listener("controller", SCHEMA, address=endpoint, cursors=cursors) as second:
                assert (await take(dialer, "$left")).header["unacknowledged"] == 3
                rejoined = await take(dialer, "$joined")
                assert rejoined.session != joined.session
                await dialer.send("number", {"x": 5})
                for x in expected:
                    message = await take(second, "number", auto_done=True)
                    assert (message.header["x"], message.seq, message.session) == (x, x, dialer.session)
                await dialer.flush(deadline_s=LONG)
                assert dialer.stats()["resent"] == len(expected) - 1

    run(test)


def test_a_failing_owner_tells_everyone_who_waits() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener, Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
            await take(listener, "$joined")
            waiting = asyncio.create_task(take(listener, "number"))
            await asyncio.sleep(0)

            def broken(*_: Any) -> None:
                raise ZeroDivisionError("a defect")

            listener._on_data = broken  # type: ignore[method-assign]
            await dialer.send("number", {"x": 1})
            with pytest.raises(TransportError, match="controller: the socket's owner failed: ZeroDivisionError"):
                await waiting
            with pytest.raises(TransportError, match="owner failed"):
                await listener.send("gen/0", "number", {"x": 1})

    run(test)
