"""safetensors files written in one pass: each tensor goes to the disk and into the checksum as it is read.

``safetensors.torch.save_file`` wants all tensors in memory at once and serialises them there a second time; here one is
held at a time. The bytes are those that ``save_file`` writes for tensors of one dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20  # hashed and written while still in the processor's cache

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Spec = tuple[torch.dtype, tuple[int, ...]]


def write_tensors(
    path: Path, specs: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: dict[str, str] | None = None
) -> dict[str, Any]:
    """Writes the tensors of ``specs`` (name -> dtype and shape), which ``read`` gives one by one, and fsyncs.

    Returns size and SHA-256 of what was to be written, so that a disk that keeps something else is found out. ``read``
    may be called in any order. Raises ``OSError``; ``ValueError`` if ``read`` gives something else than announced.
    """
    order = sorted(specs, key=lambda name: (-specs[name][0].itemsize, NAMES[specs[name][0]], name))
    header = _header(order, specs, metadata)
    with path.open("wb") as file:
        seen = hashlib.sha256(header)
        file.write(header)
        size = len(header)
        for name in order:
            tensor = read(name)
            if (tensor.dtype, tuple(tensor.shape)) != specs[name]:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, announced as {specs[name]}")
            size += _write(file, seen, tensor)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": seen.hexdigest()}


def _header(order: list[str], specs: Mapping[str, Spec], metadata: dict[str, str] | None) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name in order:
        dtype, shape = specs[name]
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, seen: Any, tensor: Tensor) -> int:
    data: Any = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    for begin in range(0, len(data), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        seen.update(chunk)
        file.write(chunk)
    return len(data)
