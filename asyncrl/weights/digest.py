"""A 64-bit digest of a tensor that shards can add up without a gather.

    digest(t) = sum over i of hash(i, bits(t_i), dtype)  mod 2**64

``i`` is the flat row-major index in the *whole* tensor, so that a tensor's digest is the sum of its shards' digests
whatever the sharding. ``hash`` mixes twice (multiply, xor with the upper half) and is one-to-one in the bits, so every
change of a single element shows; permutations and lost blocks go unseen with probability 2**-64.

Integer arithmetic of torch's int64 wraps, which is arithmetic mod 2**64. Works on any device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

U64 = 1 << 64
CHUNK = 1 << 18  # elements hashed at a time: its temporaries (2 MiB each) stay in a CPU's cache
CHUNK_ACCELERATOR = 1 << 24


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - U64 if value >= U64 // 2 else value


_INDEX = _signed(0x9E3779B97F4A7C15)
_BITS = _signed(0xBF58476D1CE4E5B9)
_DTYPE = _signed(0xD6E8FEB86659FD93)
_MIX = _signed(0x94D049BB133111EB)
_LOW_32 = 0xFFFFFFFF
_LOW_35 = (1 << 35) - 1

_BITS_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPE_CODE = {
    torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4, torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6, torch.int64: 7, torch.int32: 8, torch.int16: 9, torch.int8: 10, torch.uint8: 11,
}  # fmt: skip


def tensor_digest(tensor: Tensor, *, offset: int = 0, strides: Sequence[int] | None = None) -> Tensor:
    """Digest of a tensor or of one block of a larger tensor.

    ``tensor``: any shape and any memory layout; indices follow the row-major order of the whole tensor.
    ``offset``: flat index of the block's first element in the whole tensor.
    ``strides``: row-major strides of the *whole* tensor, in elements, one for each dimension of the block; None if
    the block is the whole tensor or a run of whole rows (dimension 0 sharded).

    Returns a 0-d int64 tensor on the tensor's device: its value mod 2**64 is the digest.
    Raises ``TypeError`` for a dtype that has no code.
    """
    code = _DTYPE_CODE.get(tensor.dtype)
    if code is None:
        raise TypeError(f"no digest for dtype {tensor.dtype}; known: {sorted(map(str, _DTYPE_CODE))}")
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    starts, run = _runs(tensor.shape, strides)
    bits = tensor.detach().contiguous().view(_BITS_OF_WIDTH[tensor.element_size()]).view(len(starts), run)
    chunk = CHUNK if tensor.device.type == "cpu" else CHUNK_ACCELERATOR
    width = min(chunk, run)
    height = max(1, chunk // run)
    steps = torch.arange(width, dtype=torch.int64, device=tensor.device).mul_(_INDEX)
    rows = torch.tensor(starts, dtype=torch.int64, device=tensor.device).add_(offset).mul_(_INDEX).view(-1, 1)
    for top in range(0, len(starts), height):
        for left in range(0, run, width):
            piece = bits[top : top + height, left : left + width]
            shift = rows[top : top + height] + _signed((left * _INDEX + code * _DTYPE) % U64)
            total += _hash_sum(piece, steps[: piece.shape[1]], shift)
    return total


def tensor_digests(tensors: Iterable[Tensor]) -> list[int]:
    """Digests of whole tensors as Python ints; one transfer from the device."""
    parts = [tensor_digest(t) for t in tensors]
    return [v % U64 for v in torch.stack(parts).tolist()] if parts else []


def combined(digests: Sequence[int]) -> str:
    """One digest, 16 hex digits, of a model whose tensors have these, in the manifest's order."""
    return hashlib.blake2b(np.array(digests, "<u8").tobytes(), digest_size=8).hexdigest()


def _hash_sum(bits: Tensor, steps: Tensor, shift: Tensor) -> Tensor:
    """Sum of hash over rows of elements. ``shift`` (rows, 1) + ``steps`` (columns,) is the index times _INDEX."""
    x = bits.to(torch.int64, copy=True).mul_(_BITS).add_(steps).add_(shift)
    x.bitwise_xor_((x >> 32).bitwise_and_(_LOW_32)).mul_(_MIX)
    x.bitwise_xor_((x >> 29).bitwise_and_(_LOW_35))
    return x.sum()


def _runs(shape: Sequence[int], strides: Sequence[int] | None) -> tuple[list[int], int]:
    """Cut a block into runs that are contiguous in the whole tensor: (flat start of each, their common length).

    >>> _runs((2, 3), (10, 1))  # columns 0..2 of a 10-column tensor
    ([0, 10], 3)
    """
    if strides is None:
        return [0], math.prod(shape)
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for a block of {len(shape)} dimensions")
    run, inner = 1, len(shape)
    while inner > 0 and (strides[inner - 1] == run or shape[inner - 1] == 1):
        run *= shape[inner - 1]
        inner -= 1
    starts = [0]
    for size, stride in zip(shape[:inner], strides[:inner], strict=True):
        starts = [s + k * stride for s in starts for k in range(size)]
    return starts, run
