"""What the link tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.transport.frames import Kind, Message, Schema
from asyncrl.transport.links import Dialer, Listener

SCHEMA = Schema(
    {
        "number": Kind({"x": int}),
        "tensor": Kind({"dtype": str, "shape": list[int]}, buffers=1),
        "bag": Kind(buffers="any"),
    }
)
LONG = 60.0  # a deadline that only a hang reaches


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * LONG))


async def take(link: Listener | Dialer, kind: str, **options: Any) -> Message:
    """The next message that is not an event."""
    while True:
        message = await link.recv(deadline_s=LONG, waiting_for=kind, **options)
        if not message.kind.startswith("$") or message.kind == kind:
            assert message.kind == kind
            return message
