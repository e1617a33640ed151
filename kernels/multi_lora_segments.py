"""Which rows of a packed row of tokens belong to which adapter slot, as the kernels read it. Made once a step.

Tokens are sorted by slot, those of one slot keep their order, and those without an adapter come last, as a slot of
their own. Each slot is cut from its own first token on: into tiles, and into chunks of many tiles. So what a kernel
does for an adapter depends on that adapter's tokens alone, wherever they lie and whatever lies beside them.

Everything is computed on the tokens' device by operations that do not wait for it. Shapes depend on the numbers of
tokens and slots only: with :meth:`Segments.copy_` a captured CUDA graph is replayed for other segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """Tiles or chunks of at most ``size`` places: the slot of each (-1: there are fewer), and its first place."""

    size: int
    slot: Tensor
    first: Tensor


@dataclass(frozen=True)
class Segments:
    """Of a packed row of ``tokens`` tokens and ``slots`` adapter slots; all tensors int32.

    ``order_T``: the token at each place of the sorted row. ``start``: (slots + 2,) first place of each slot, of the
    tokens without adapter, and the end. ``first_chunk``: (slots + 2,) number of the first chunk of each.
    ``longest``: no slot has more tokens than that.
    """

    slots: int
    longest: int
    order_T: Tensor
    start: Tensor
    tiles: Pieces
    chunks: Pieces
    first_chunk: Tensor

    @property
    def tokens(self) -> int:
        return len(self.order_T)

    @cached_property
    def rows(self) -> list[Tensor]:
        """The tokens of each slot and, last, those without adapter; waits for a GPU. For the reference."""
        return [self.order_T[a:b].long() for a, b in pairwise(self.start.tolist())]

    def copy_(self, other: Segments) -> None:
        """Takes over the contents of ``other``. Raises ``ValueError`` unless both have the same sizes."""
        if self.sizes != other.sizes:
            raise ValueError(
                f"segments of other sizes: {self.sizes} and {other.sizes} (tokens, slots, longest, pieces)"
            )
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)
        self.__dict__.pop("rows", None)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens, self.slots, self.longest, self.tiles.size, self.chunks.size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        tiles, chunks = self.tiles, self.chunks
        return self.order_T, self.start, tiles.slot, tiles.first, chunks.slot, chunks.first, self.first_chunk


def segments(
    slot_T: Tensor, slots: int, longest: int | None = None, *, tile: int | None = None, chunk: int | None = None
) -> Segments:
    """Sorts the tokens by their slot, which is in [0, slots), or -1 for none: (T,) int32 or int64, of any device.

    ``longest``: more tokens than that no slot has, now and in later contents (default: T); a bound near the truth saves
    the kernels work. ``tile`` and ``chunk`` are for tests: the kernels' own sizes are the default.

    Raises ``ValueError`` for wrong shapes or dtypes and, on a CPU, for slots out of range and a ``longest`` too small;
    on a GPU values are not looked at.
    """
    if slot_T.ndim != 1 or slot_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_T must be (T,) int32 or int64, is {tuple(slot_T.shape)} {slot_T.dtype}")
    tokens = len(slot_T)
    longest = tokens if longest is None else min(longest, tokens)
    key_T = torch.where(slot_T < 0, slots, slot_T)
    sorted_T, order_T = key_T.sort(stable=True)
    bounds = torch.arange(slots + 2, device=slot_T.device, dtype=slot_T.dtype)
    start = torch.searchsorted(sorted_T, bounds, out_int32=True)
    if not slot_T.is_cuda:
        _check(slot_T, slots, start, longest)
    tiles, _ = _cut(start, tokens, tile or tile_size(slot_T.device))
    chunks, first_chunk = _cut(start, tokens, chunk or chunk_size(slot_T.device))
    return Segments(slots, longest, order_T.to(torch.int32), start, tiles, chunks, first_chunk)


def tile_size(device: torch.device) -> int:
    """Tokens of a tile: of a tensor core's instruction on a GPU; few in the interpreter, which works them off."""
    return 64 if device.type == "cuda" else 16


def chunk_size(device: torch.device) -> int:
    """Tokens over which one program sums gradients, a multiple of the tile."""
    return 1024 if device.type == "cuda" else 32


def _cut(start: Tensor, tokens: int, size: int) -> tuple[Pieces, Tensor]:
    """Pieces of all slots in their order, and the number of each slot's first piece."""
    slots = len(start) - 1
    counts = (start.diff() + (size - 1)) // size
    first_piece = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    # sum of ceil(t / size) over slots of at least one token each
    capacity = min(tokens, tokens // size + slots)
    number = torch.arange(capacity, device=start.device, dtype=torch.int32)
    owner = torch.searchsorted(first_piece, number, right=True, out_int32=True) - 1
    there = number < first_piece[-1]
    owner = owner.clamp(max=slots - 1)
    first = start[owner] + (number - first_piece[owner]) * size
    return Pieces(size, torch.where(there, owner, -1), torch.where(there, first, tokens)), first_piece


def _check(slot_T: Tensor, slots: int, start: Tensor, longest: int) -> None:
    if len(slot_T) and not -1 <= int(slot_T.min()) <= int(slot_T.max()) < slots:
        raise ValueError(f"slots of tokens are from {int(slot_T.min())} to {int(slot_T.max())}, of {slots} slots")
    if slots and int(start[:-1].diff().max()) > longest:
        raise ValueError(f"a slot has {int(start[:-1].diff().max())} tokens, longest={longest} was announced")
