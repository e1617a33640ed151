"""Messages between the reward pool and its workers: JSON behind a length of 4 bytes (little-endian).

JSON rather than msgpack, because entries hold integers of any size (msgpack stops at 64 bits).

pool -> worker    {"env": {...}}                                    once, at start
                  {"split", "entries": [JSON text], "items": [[completion, index into entries]]}
worker -> pool    {"loaded": split} | {"error": text}               before the first score of a split
                  {"value": number} | {"failure": text}             one for each item, in order
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_BYTES = 2**31


def frame(message: dict[str, Any]) -> bytes:
    """The bytes of one message.

    Raises:
        ValueError: the message is larger than ``MAX_BYTES``.
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes is larger than {MAX_BYTES}")
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that ``data`` completes.

        Raises:
            ValueError: the bytes are not messages.
        """
        self._data += data
        messages, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes is announced; the stream is corrupt")
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            message = json.loads(bytes(self._data[start + _LENGTH.size : end]))
            if not isinstance(message, dict):
                raise ValueError(f"a message is {type(message).__name__}, not a dict")
            messages.append(message)
            start = end
        del self._data[:start]
        return messages
