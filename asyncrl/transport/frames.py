"""What travels: a msgpack envelope and raw buffers, as the parts of one ZeroMQ message.

    data     [VERSION, DATA, seq, kind, header, [length of each buffer], ack or nil], buffer, buffer, ...
    control  [VERSION, CONTROL, kind, header]

``ack`` is ``[floor, [seq, ...]]``: everything up to ``floor`` and the listed numbers above it are consumed. Nothing
here trusts its input: ``decode`` either returns a checked frame or raises ``ProtocolError``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
from numpy.typing import NDArray

from asyncrl.transport.errors import DeadlineExpired, PeerLost, ProtocolError, TransportError
from asyncrl.transport.schema import Kind, Schema

__all__ = [
    "Buffer", "DeadlineExpired", "Kind", "Message", "PeerLost", "ProtocolError", "Schema", "TransportError",
    "array_of",
]  # fmt: skip

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]

VERSION = 1
DATA, CONTROL = 0, 1
MAX_HEADER_BYTES = 1 << 20
MAX_ITEMS = 1 << 17  # of any list or map in a header
MAX_BUFFERS = 4096
MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class Message:
    """One received message. ``buffers`` are views of the frames as ZeroMQ received them: no copy was made.

    ``(peer, session, seq)`` names the message for ever: a consumer that stores it with the message's effect can tell a
    repeat after a restart. ``session`` belongs to one incarnation of the peer.
    """

    kind: str
    header: dict[str, Any]
    buffers: tuple[memoryview, ...]
    peer: str = ""
    session: int = 0
    seq: int = 0


class Ack(NamedTuple):
    """Everything up to ``floor`` is consumed, and so are the numbers ``above``."""

    floor: int
    above: list[int]


class DataFrame(NamedTuple):
    seq: int
    kind: str
    header: dict[str, Any]
    lengths: list[int]
    ack: Ack | None


class ControlFrame(NamedTuple):
    kind: str
    header: dict[str, Any]


NUMBERS = dict.fromkeys(("stream", "last", "reading", "received", "credit_messages", "credit_bytes"), int)
CONTROL_SCHEMA = Schema(
    {
        # both halves of a handshake have the same fields: session.Handshake
        **dict.fromkeys(("hello", "welcome"), Kind({"name": str, "kept": list[int], "held": list[int], **NUMBERS})),
        "ack": Kind({"floor": int, "above": list[int]}),
        "ping": Kind(),
        "refused": Kind({"seq": int, "reason": str}),
        "reset": Kind({"reason": str}),
        "denied": Kind({"reason": str}),
        "bye": Kind({"reason": str}),
    }
)


def pack_body(kind: str, header: dict[str, Any], lengths: list[int]) -> bytes:
    """The part of a data envelope that does not change when it is sent again."""
    try:
        body = msgpack.packb([kind, header, lengths])[1:]  # without the array's own byte: it goes into a longer array
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{kind}: the header cannot be packed: {error}") from error
    if len(body) > MAX_HEADER_BYTES - 4096:
        raise ProtocolError(f"{kind}: a header of {len(body)} bytes; put long values into buffers")
    return body


_DATA_PREFIX = bytes([0x97, VERSION, DATA])  # 0x97: array of seven
_NIL = b"\xc0"


def pack_data(seq: int, body: bytes, ack: Ack | None) -> bytes:
    """The whole data envelope."""
    return b"".join((_DATA_PREFIX, msgpack.packb(seq), body, _NIL if ack is None else msgpack.packb(ack)))


def pack_control(kind: str, **header: Any) -> bytes:
    """A control frame."""
    return msgpack.packb([VERSION, CONTROL, kind, header])


def decode(envelope: memoryview | bytes, n_buffers: int) -> DataFrame | ControlFrame:
    """Unpack and check an envelope; buffer lengths and the application's schema are checked by the caller."""
    if len(envelope) > MAX_HEADER_BYTES:
        raise ProtocolError(f"an envelope of {len(envelope)} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        fields = msgpack.unpackb(envelope, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, ext_hook=_refuse_extension)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not msgpack: {type(error).__name__} {error}"[:200]) from error
    if type(fields) is not list or len(fields) < 2:
        raise ProtocolError("an envelope that is not an array")
    if fields[0] != VERSION:
        raise ProtocolError(f"the peer speaks wire version {fields[0]!r:.40}, this is version {VERSION}")
    if fields[1] == DATA and len(fields) == 7:
        return _data_frame(fields, n_buffers)
    if fields[1] == CONTROL and len(fields) == 4:
        return _control_frame(fields, n_buffers)
    raise ProtocolError(f"unknown frame type {fields[1]!r:.40} of {len(fields)} fields")


def _data_frame(fields: list[Any], n_buffers: int) -> DataFrame:
    _, _, seq, kind, header, lengths, ack = fields
    if type(seq) is not int or not 0 < seq < MAX_NUMBER:
        raise ProtocolError(f"sequence number {seq!r:.40}")
    if type(kind) is not str or type(header) is not dict:
        raise ProtocolError("kind or header of the wrong type")
    if type(lengths) is not list or len(lengths) != n_buffers:
        raise ProtocolError(f"{kind:.40} announces other buffers than the {n_buffers} that came")
    if ack is not None:
        if type(ack) is not list or len(ack) != 2 or type(ack[1]) is not list:
            raise ProtocolError("an acknowledgement of the wrong shape")
        ack = checked_ack(*ack)
    return DataFrame(seq, kind, header, lengths, ack)


def _control_frame(fields: list[Any], n_buffers: int) -> ControlFrame:
    _, _, kind, header = fields
    if type(kind) is not str or type(header) is not dict:
        raise ProtocolError("kind or header of the wrong type")
    CONTROL_SCHEMA.check(kind, header, n_buffers)
    return ControlFrame(kind, header)


def checked_ack(floor: Any, above: list[Any]) -> Ack:
    """An acknowledgement whose numbers are numbers."""
    check_numbers((floor, *above), "ack")
    return Ack(floor, above)


def check_numbers(values: Sequence[Any], what: str) -> None:
    """Sequence numbers are integers in [0, 2**63)."""
    for value in values:
        if type(value) is not int or not 0 <= value < MAX_NUMBER:
            raise ProtocolError(f"{what}: {value!r:.40} is not a sequence number")


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def flat_view(buffer: Buffer, index: int) -> memoryview:
    """A byte view of a contiguous buffer, without a copy; ``ValueError`` says how to repair one that is not."""
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # an ndarray is a buffer
    except (TypeError, ValueError) as error:
        raise ValueError(f"buffer {index} ({type(buffer).__name__}) is no buffer: {error}; "
                         "view an array of an unusual dtype as unsigned integers") from error  # fmt: skip
    if not view.c_contiguous:
        raise ValueError(f"buffer {index} is not C-contiguous; use numpy.ascontiguousarray")
    return view.cast("B") if view.nbytes else memoryview(b"")


def array_of(buffer: memoryview | bytes, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
    """The numpy array in a received buffer, without a copy if the bytes lie aligned (large buffers always do).

    Raises ``ProtocolError`` if dtype, shape and length disagree or the dtype holds objects.
    """
    try:
        element = np.dtype(dtype)
    except TypeError as error:
        raise ProtocolError(f"unknown dtype {dtype!r:.40}") from error
    if element.hasobject or element.itemsize == 0:
        raise ProtocolError(f"dtype {element} cannot be sent as raw bytes")
    sizes = tuple(shape)
    if any(type(n) is not int or n < 0 for n in sizes):
        raise ProtocolError(f"shape {sizes!r:.100}")
    nbytes = memoryview(buffer).nbytes
    if math.prod(sizes) * element.itemsize != nbytes:
        raise ProtocolError(f"a buffer of {nbytes} bytes cannot be {element}{list(sizes)}")
    array = np.frombuffer(buffer, dtype=element).reshape(sizes)
    return array if array.flags.aligned else array.copy()
