"""Checking and packing an outgoing message, and the futures that follow its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.transport.errors import ProtocolError, TransportError
from asyncrl.transport.frames import MAX_BUFFERS, Buffer, flat_view, pack_body
from asyncrl.transport.schema import Schema
from asyncrl.transport.session import Item


def make_item(
    schema: Schema, kind: str, header: dict[str, Any], buffers: Sequence[Buffer], max_frame_bytes: int
) -> Item:
    """Check against the schema and the limits, and pack; buffers stay where they are."""
    if not buffers:
        schema.check(kind, header, 0)
        return Item(pack_body(kind, header, []), ())
    views = tuple(flat_view(b, i) for i, b in enumerate(buffers))
    schema.check(kind, header, len(views))
    if len(views) > MAX_BUFFERS:
        raise ProtocolError(f"{kind}: {len(views)} buffers; the limit is {MAX_BUFFERS}")
    for i, view in enumerate(views):
        if view.nbytes > max_frame_bytes:
            raise ProtocolError(f"{kind}: buffer {i} has {view.nbytes} bytes; the limit is {max_frame_bytes}")
    return Item(pack_body(kind, header, [v.nbytes for v in views]), views)


def settling() -> tuple[asyncio.Future[None], Callable[[TransportError | None], None]]:
    """A future and the callback that settles it, with None for success."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def settle(error: TransportError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return future, settle


def admission(item: Item) -> asyncio.Future[None]:
    """A future for the moment at which credit allows the message, or for the error that ends its wait."""
    future, settle = settling()
    when_settled = item.settled

    def admitted() -> None:
        item.settled = when_settled
        settle(None)

    item.admitted, item.settled = admitted, settle
    return future
