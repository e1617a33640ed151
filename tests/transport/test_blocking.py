"""The links for threads without an event loop."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from asyncrl.transport.blocking import BlockingDialer, BlockingListener
from asyncrl.transport.frames import DeadlineExpired, Kind, PeerLost, ProtocolError, Schema, array_of
from asyncrl.transport.links import Dialer

SCHEMA = Schema({"number": Kind({"x": int}), "tensor": Kind(buffers=1)})
LONG = 60.0


def test_both_ends_from_plain_threads() -> None:
    with BlockingListener("controller", SCHEMA) as listener:

        def serve() -> None:
            with BlockingDialer("trainer/0", SCHEMA, listener.endpoint) as dialer:
                for x in range(200):
                    assert dialer.recv(deadline_s=LONG, waiting_for="x", auto_done=True).header == {"x": x}
                    dialer.send("number", {"x": -x}, deadline_s=LONG)
                message = dialer.recv(deadline_s=LONG, waiting_for="tensor")
                assert array_of(message.buffers[0], np.float32, (1 << 22,))[-1] == (1 << 22) - 1
                dialer.done(message)

        thread = threading.Thread(target=serve)
        thread.start()
        assert listener.recv(deadline_s=LONG, waiting_for="trainer/0").kind == "$joined"
        assert listener.peers == {"trainer/0"}
        for x in range(200):
            listener.send("trainer/0", "number", {"x": x}, deadline_s=LONG)
            assert listener.recv(deadline_s=LONG, waiting_for="x", auto_done=True).header == {"x": -x}
        payload = np.arange(1 << 22, dtype=np.float32)
        listener.send("trainer/0", "tensor", {}, [payload], wait="acked", deadline_s=LONG)
        assert listener.recv(deadline_s=LONG, waiting_for="goodbye").kind == "$left"
        thread.join()
        stats = listener.stats()
        assert (stats["sent"], stats["received"], stats["unacknowledged"]) == (201, 200, 0)


def test_many_threads_share_a_link() -> None:
    with BlockingListener("controller", SCHEMA) as listener, BlockingDialer("g", SCHEMA, listener.endpoint) as dialer:
        seen: list[int] = []

        def send(base: int) -> None:
            for x in range(base, base + 50):
                dialer.send("number", {"x": x}, deadline_s=LONG)

        def receive() -> None:
            for _ in range(50):
                message = listener.recv(deadline_s=LONG, waiting_for="numbers", auto_done=True)
                seen.append(message.header["x"])

        assert listener.recv(deadline_s=LONG, waiting_for="g").kind == "$joined"
        threads = [threading.Thread(target=send, args=(100 * i,)) for i in range(4)]
        threads += [threading.Thread(target=receive) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == [100 * i + x for i in range(4) for x in range(50)]
        dialer.flush(deadline_s=LONG)


def test_errors_reach_the_caller() -> None:
    with BlockingListener("controller", SCHEMA) as listener:
        with pytest.raises(DeadlineExpired, match=r"controller waited 0.01 s for a batch \(peers here: none\)"):
            listener.recv(deadline_s=0.01, waiting_for="a batch")
        with pytest.raises(PeerLost, match="nobody"):
            listener.send("nobody", "number", {"x": 1})
        with BlockingDialer("g", SCHEMA, listener.endpoint) as dialer, pytest.raises(ProtocolError):
            dialer.send("number", {"x": None})
    refused = BlockingDialer("g", SCHEMA, "tcp://127.0.0.1:9")
    with pytest.raises(DeadlineExpired, match=r"g waited 0\.05 s for a listener"):
        refused.start(deadline_s=0.05)
    refused.close()


def test_a_blocking_call_from_the_transports_own_thread_is_refused() -> None:
    with BlockingListener("controller", SCHEMA) as listener:

        async def wrong() -> None:
            listener.recv(deadline_s=1, waiting_for="itself")

        future = asyncio.run_coroutine_threadsafe(wrong(), listener._background.loop)
        with pytest.raises(RuntimeError, match="would never return"):
            future.result(LONG)


def test_a_blocking_listener_serves_asyncio_dialers() -> None:
    with BlockingListener("publisher", SCHEMA) as listener:

        async def dial() -> int:
            async with Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
                message = await dialer.recv(deadline_s=LONG, waiting_for="x", auto_done=True)
                return int(message.header["x"])

        def send() -> None:
            listener.recv(deadline_s=LONG, waiting_for="gen/0")
            listener.send("gen/0", "number", {"x": 5})

        thread = threading.Thread(target=send)
        thread.start()
        assert asyncio.run(dial()) == 5
        thread.join()
