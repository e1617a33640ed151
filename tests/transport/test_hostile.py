"""Input from peers that are broken or hostile: refused and counted, and the owner lives on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import zmq

from asyncrl.transport.frames import pack_control
from asyncrl.transport.links import Dialer, Listener
from tests.transport.talk import SCHEMA, run, take


def hostile_messages() -> list[list[bytes]]:
    return [
        [b""],
        [b"\xc1"],
        [b"\x93\x01\x00"],
        [b"x" * (2 << 20)],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 5000],
        [msgpack.packb([2, 0, 1, "number", {"x": 1}, [], None])],
        [msgpack.packb([1, 7, "number", {"x": 1}])],
        [msgpack.packb([1, 0, 1, "number", {"x": 1}, [3], None]), b"abc", b"d"],
        [msgpack.packb([1, 0, -1, "number", {"x": 1}, [], None])],
        [msgpack.packb([1, 0, 1, "number", {"x": 1}, [], [1 << 63, []]])],
        [msgpack.packb([1, 0, 1, "number", {"x": 1}, [], None])],  # before a handshake
        [msgpack.packb([1, 1, "hello", {"name": 3}])],
        [msgpack.packb([1, 1, "ack", {"floor": 1, "above": []}])],
        [msgpack.packb([1, 1, "welcome", {}])],
        [msgpack.packb({"a": 1})],
        [msgpack.packb(msgpack.ExtType(5, b"abc"))],
        [b"\x94\x01\x01", *[b"z"] * 5000],
        [hello(kept=[3, 2])],
        [hello(name="")],
        [hello(name="a\nb")],
        [hello(stream=0)],
        [hello(held=[9])],
        [hello(stream=1 << 63)],
    ]


def hello(**changes: Any) -> bytes:
    fields = {
        "name": "mallory", "stream": 1, "last": 0, "kept": [], "reading": 0, "received": 0, "held": [],
        "credit_messages": 10, "credit_bytes": 1000,
    }  # fmt: skip
    return pack_control("hello", **{**fields, **changes})


def test_hostile_input_is_refused_and_the_owner_lives() -> None:
    async def test() -> None:
        async with Listener("controller", SCHEMA) as listener:
            context = zmq.Context()
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 1000
            stranger.connect(listener.endpoint)
            messages = hostile_messages()
            for parts in messages:
                stranger.send_multipart(parts)
            async with Dialer("gen/0", SCHEMA, listener.endpoint) as dialer:
                await dialer.send("number", {"x": 1})
                assert (await take(listener, "number")).header == {"x": 1}
                while listener.stats()["refused"] + listener.stats()["stray"] < len(messages):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert listener.peers == {"gen/0"}
            stranger.close()
            await asyncio.to_thread(context.term)

    run(test)


def test_a_peer_that_breaks_the_rules_after_its_handshake() -> None:
    """Gaps, unknown acknowledgements and more than was granted force a new handshake; repeats are dropped."""

    def data(seq: int, ack: Any = None, kind: str = "number", header: Any = None, lengths: Any = ()) -> bytes:
        return msgpack.packb([1, 0, seq, kind, {"x": seq} if header is None else header, list(lengths), ack])

    async def test() -> None:
        async with Listener("controller", SCHEMA, credit_messages=2) as listener:
            context = zmq.Context()
            peer = context.socket(zmq.DEALER)
            peer.linger = 0
            peer.connect(listener.endpoint)

            async def reply() -> str:
                while not await asyncio.to_thread(peer.poll, 10):
                    pass
                return msgpack.unpackb(peer.recv_multipart()[0])[2]

            for offence in (data(3), data(1, ack=[7, []]), data(1, ack=[0, [7]])):
                peer.send(hello())
                assert await reply() == "welcome"
                peer.send(offence)
                assert await reply() == "reset"
            assert listener.stats()["gaps"] == 3
            peer.send(hello())
            assert await reply() == "welcome"
            peer.send(data(1))
            peer.send(data(1))
            peer.send(data(2))
            peer.send(data(3))  # beyond the credit of two
            assert await reply() == "reset"
            assert listener.stats()["duplicates"] == 1
            assert [(await take(listener, "number", auto_done=True)).header["x"] for _ in range(2)] == [1, 2]
            peer.send(hello(last=2))
            assert await reply() == "welcome"
            peer.send_multipart([data(3, kind="bag", header={}, lengths=[4]), b"abc"])  # not the length announced
            assert await reply() == "refused"
            peer.send_multipart([data(4, kind="tensor", header={"dtype": "x", "shape": []})])  # a buffer too few
            assert await reply() == "ack"
            assert await reply() == "refused"
            peer.close()
            context.term()

    run(test)
