"""The documents of a packed row, and the buckets in which attention visits them.

A packed row is first *stems*, then *branches*. A stem is a causal document. A branch is the continuation of one stem:
its tokens attend to the whole stem and causally to themselves. So samples of one prompt can share one copy of it, and
a plain document is a stem without branches.

Stems and branches are each sorted by length and bucketed into padded rows, so that a bucket is a contiguous piece of
the row and a bucket of equal lengths is a view. Padding sits after the last token of a document, where a causal row
cannot see it, and repeats that token, so that even a NaN stays in its own document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

WASTE = 1.15  # a bucket's padded positions over its real ones, at most
VIEW = 256  # tokens of one length that are worth a call of their own: nothing is copied then


@dataclass(frozen=True)
class Bucket:
    """Consecutive documents ``[first, first + rows)`` of the row, padded to ``length``.

    ``gather_N`` is the token (counted in the bucket) at every padded position and ``place_t`` the padded position of
    every token; both None if all lengths are equal and padding is a view.
    """

    first: int
    rows: int
    length: int
    tokens: int
    gather_N: Tensor | None
    place_t: Tensor | None

    def pad(self, piece_THD: Tensor) -> Tensor:
        """(tokens, H, D) of this bucket -> (B, H, L, D)."""
        if self.gather_N is not None:
            piece_THD = Pad.apply(piece_THD, self.gather_N, self.place_t)
        return piece_THD.unflatten(0, (self.rows, self.length)).transpose(1, 2)

    def unpad(self, x_BHLD: Tensor) -> Tensor:
        """(B, H, L, D) -> (tokens, H, D)."""
        flat = x_BHLD.transpose(1, 2).flatten(0, 1)
        return flat if self.place_t is None else TakeRows.apply(flat, self.place_t)


@dataclass(frozen=True)
class BranchBucket:
    """Branches of similar length with the padded frame of the stems that they continue."""

    branches: Bucket
    stems_NK: Tensor | None  # row positions of the distinct stems, right-aligned (n * K,); None: all stems empty
    stem_place: Tensor | None  # places in the frame of the real tokens, and below their row positions
    stem_tokens: Tensor | None
    frames: int
    frame_of_B: Tensor | None
    mask_B1QK: (
        Tensor  # additive, 0 or -inf; Q = repeats * L query rows of a key head, K = keys of the frame and of the branch
    )


class Documents:
    """Boundaries of a packed row, all sorted by length (longest first), and the buckets made from them.

    ``branch_stem[b]`` is the index of the stem that branch ``b`` continues. No dataclass: FSDP2 copies those, with all
    that they hold, into each layer when it casts the layer's inputs, and every layer would make the buckets anew.
    """

    def __init__(
        self,
        stem_lengths: list[int],
        branch_lengths: Sequence[int] = (),
        branch_stem: Sequence[int] = (),
        device: str | torch.device = "cpu",
    ) -> None:
        """Raises ``ValueError`` for lengths in another order."""
        for lengths in (stem_lengths, branch_lengths):
            if any(b > a for a, b in pairwise(lengths)):
                raise ValueError("documents must be sorted by length, longest first")
        self.stem_lengths, self.branch_lengths, self.branch_stem = stem_lengths, list(branch_lengths), list(branch_stem)
        self.device = device
        self.cu_seqlens: Tensor | None = None  # (documents + 1,) int32, for flash attention; None with branches
        if not self.branch_lengths:
            bounds = np.cumsum([0, *stem_lengths])
            self.cu_seqlens = torch.as_tensor(bounds, dtype=torch.int32, device=device)
        self._plans: dict[Any, tuple[list[Bucket], list[BranchBucket]]] = {}

    def buckets(self, window: int | None, dtype: torch.dtype, repeats: int) -> tuple[list[Bucket], list[BranchBucket]]:
        """The padded path's buckets, made once for all layers that share a sliding window.

        ``repeats``: query heads per key/value head; ``dtype`` of the additive mask.
        """
        key = (window, dtype, repeats)
        if key not in self._plans:
            starts = np.cumsum([0, *self.stem_lengths])
            branches = _buckets(self.branch_lengths, self.device)
            self._plans[key] = (
                _buckets(self.stem_lengths, self.device, VIEW),
                [self._branch_bucket(b, starts, window, dtype, repeats) for b in branches],
            )
        return self._plans[key]

    def padding(self) -> tuple[int, int]:
        """(positions that hold no token, all positions) of the buckets' query rows; (0, 0) if none were made."""
        for stems, branches in self._plans.values():
            buckets = stems + [b.branches for b in branches]
            positions = sum(b.rows * b.length for b in buckets)
            return positions - sum(b.tokens for b in buckets), positions
        return 0, 0

    def _branch_bucket(
        self, bucket: Bucket, stem_starts: np.ndarray, window: int | None, dtype: torch.dtype, repeats: int
    ) -> BranchBucket:
        stems = np.asarray(self.branch_stem[bucket.first : bucket.first + bucket.rows])
        distinct, frame_of = np.unique(stems, return_inverse=True)
        lengths = np.asarray([self.stem_lengths[s] for s in distinct])
        k = int(lengths.max(initial=0))
        # Stems are right-aligned in their frame, so that a branch follows its stem without a gap.
        column = np.arange(k)[None, :] - (k - lengths[:, None])
        real = column >= 0
        # A place before a stem is masked; it holds the stem's first token, or any if the stem is empty.
        position = np.minimum(stem_starts[distinct][:, None] + np.maximum(column, 0), stem_starts[-1] - 1)
        mask = _branch_mask(lengths[frame_of], k, bucket.length, window)
        place = np.flatnonzero(real)

        def index(a: np.ndarray) -> Tensor | None:
            return torch.as_tensor(a, dtype=torch.int64, device=self.device) if k else None

        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~torch.from_numpy(mask), float("-inf"))
        return BranchBucket(
            branches=bucket,
            stems_NK=index(position.ravel()),
            stem_place=index(place),
            stem_tokens=index(position.ravel()[place]),
            frames=len(distinct),
            frame_of_B=index(frame_of),
            mask_B1QK=bias.repeat(1, repeats, 1)[:, None].to(self.device),
        )


def _branch_mask(stem_length_B: np.ndarray, k: int, length: int, window: int | None) -> np.ndarray:
    """(B, L, k + L) bool: query i of a branch may see its stem's tokens and keys 0..i of the branch."""
    i, j = np.arange(length), np.arange(k + length) - k  # positions counted from the branch's first token
    causal = j[None, :] <= i[:, None]
    if window is not None:
        causal &= i[:, None] - j[None, :] < window
    return causal[None] & (j[None, None, :] >= -stem_length_B[:, None, None])


def _buckets(lengths: list[int], device: str | torch.device, alone: int = 0) -> list[Bucket]:
    """Cuts documents sorted by length (longest first) into buckets, each within ``WASTE`` of its real size.

    A run of equal lengths with at least ``alone`` tokens gets a bucket of its own, where padding is a view
    (0: never). Documents of no length, at the end, are left out.
    """
    out: list[Bucket] = []
    pending: list[int] = []
    first = 0

    def close() -> None:
        nonlocal first
        if pending:
            out.append(_bucket(list(pending), first, device))
            first += len(pending)
            pending.clear()

    for length, run in groupby(n for n in lengths if n):
        count = len(list(run))
        large = 0 < alone <= length * count
        if large:
            close()
        for _ in range(count):
            if pending and pending[0] * (len(pending) + 1) > WASTE * (sum(pending) + length):
                close()
            pending.append(length)
        if large:
            close()
    close()
    return out


def _bucket(lengths: list[int], first: int, device: str | torch.device) -> Bucket:
    rows, length, n = len(lengths), lengths[0], np.asarray(lengths)
    tokens = int(n.sum())
    if tokens == rows * length:
        return Bucket(first, rows, length, tokens, None, None)
    column = np.arange(length)[None, :]
    begin = np.cumsum(n)[:, None] - n[:, None]
    gather = begin + np.minimum(column, n[:, None] - 1)
    place = np.flatnonzero(column < n[:, None])
    return Bucket(first, rows, length, tokens, *(torch.as_tensor(a, device=device) for a in (gather.ravel(), place)))


class Pad(torch.autograd.Function):
    """Rows of ``x`` at ``gather``; the gradient of a padding position is exactly zero and is not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class TakeRows(torch.autograd.Function):
    """``x`` at distinct rows ``place``; other rows get a zero gradient. Backward writes once instead of adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        out[ctx.saved_tensors[0]] = grad
        return out, None


class TakeFrames(torch.autograd.Function):
    """Stems (T, H, D) right-aligned in frames (n * K, H, D); positions before a stem are masked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, place: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(place, tokens)
        ctx.rows = len(x)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        place, tokens = ctx.saved_tensors
        out = grad.new_zeros(ctx.rows, *grad.shape[1:])
        out[tokens] = grad.index_select(0, place)
        return out, None, None, None
