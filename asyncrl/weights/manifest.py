"""The order and layout in which a version's tensors travel: one byte stream, every tensor aligned.

Both ends derive offsets from the same list of (name, dtype, shape); the list itself is sent with each announcement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.transport.frames import ProtocolError

ALIGN = 16  # bytes; a view of the stream as any dtype is aligned
WIRE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor under its Hugging Face name; ``offset`` and ``nbytes`` place it in the stream."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, stream: Tensor, origin: int = 0) -> Tensor:
        """This tensor inside ``stream`` (uint8, 1-d), whose first byte is byte ``origin`` of the whole stream."""
        begin = self.offset - origin
        return stream[begin : begin + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Manifest:
    """All tensors of a version, in order."""

    specs: list[TensorSpec] = field(default_factory=list)

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Manifest:
        """Lay tensors out in the order given. Raises ``ValueError`` for a repeated name or a dtype off the list."""
        specs: list[TensorSpec] = []
        seen: set[str] = set()
        end = 0
        for name, dtype, shape in tensors:
            if name in seen:
                raise ValueError(f"two tensors are called {name}; send a tied weight once, under the engine's name")
            if dtype not in _NAMES:
                raise ValueError(f"{name}: weights travel as {', '.join(WIRE_DTYPES)}, not {dtype}")
            seen.add(name)
            spec = TensorSpec(name, dtype, tuple(shape), -(-end // ALIGN) * ALIGN)
            specs.append(spec)
            end = spec.offset + spec.nbytes
        return cls(specs)

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return self.specs[-1].offset + self.specs[-1].nbytes if self.specs else 0

    def to_bytes(self) -> bytes:
        rows = [[s.name, _NAMES[s.dtype], list(s.shape)] for s in self.specs]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Manifest:
        """Raises ``ProtocolError`` for anything that ``to_bytes`` would not write."""
        try:
            rows = json.loads(bytes(data))
            if not isinstance(rows, list):
                raise ValueError(f"{rows!r:.100}")
            return cls.of(_checked(row) for row in rows)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"not a manifest of weights: {error}") from error


@dataclass
class Staged:
    """One version's bytes as far as they have arrived; ``digests`` come last."""

    version: int
    manifest: Manifest
    stream: Tensor  # uint8, 1-d, on whatever device the data plane stages
    received: int = 0
    digests: list[int] | None = None
    began: float = 0.0

    def tensors(self) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Views of the staging buffer in the order of the manifest."""
        for spec in self.manifest.specs:
            yield spec, spec.view(self.stream)

    def place(self, offset: int, nbytes: int) -> Tensor:
        """Where the next bytes belong (uint8), which count as received. ``ProtocolError`` if others were due."""
        end = offset + nbytes
        if offset != self.received or end > self.manifest.nbytes:
            raise ProtocolError(
                f"version {self.version}: bytes {offset} to {end} came where byte {self.received} of "
                f"{self.manifest.nbytes} was due"
            )
        self.received = end
        return self.stream[offset:end]

    def write(self, offset: int, data: memoryview) -> None:
        """Append a chunk that is here, to a stream on the CPU. Raises ``ProtocolError`` if it is not the next one."""
        self.place(offset, data.nbytes).numpy()[:] = np.frombuffer(data, np.uint8)

    def complete(self, digests: list[int]) -> None:
        """Raises ``ProtocolError`` unless every byte and one digest a tensor is here."""
        if self.received != self.manifest.nbytes or len(digests) != len(self.manifest.specs):
            raise ProtocolError(
                f"version {self.version}: {self.received} of {self.manifest.nbytes} bytes and {len(digests)} of "
                f"{len(self.manifest.specs)} digests arrived"
            )
        self.digests = digests


def _checked(row: Any) -> tuple[str, torch.dtype, list[int]]:
    if not (isinstance(row, list) and len(row) == 3):
        raise ValueError(f"{row!r:.100}")
    name, dtype, shape = row
    if not (isinstance(name, str) and dtype in WIRE_DTYPES and isinstance(shape, list)):
        raise ValueError(f"{row!r:.100}")
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{name} has shape {shape!r:.100}")
    return name, WIRE_DTYPES[dtype], shape
