"""Attention by document over a packed row: no token attends outside its own sample.

A packed row is ``(1, T)`` tokens: first *stems*, then *branches*. A stem is a causal document. A branch is the
continuation of one stem: its tokens attend to the whole stem and causally to themselves. So samples of one prompt
can share one copy of it, and a plain document is a stem without branches. The same function serves every layer; it
is registered with transformers under ``ATTENTION`` and no (T, T) mask is ever built.

- On a GPU in half precision: flash attention with variable lengths, for rows of stems only.
- Otherwise: stems are bucketed by length into padded causal rows, branches into padded rows of queries over
  [stem | branch] keys. Stems and branches are each sorted by length, so that a bucket is a contiguous piece of the
  row and a bucket of equal lengths is a view.

Padding sits after the last token of a document, where a causal row cannot see it, and repeats that token, so that
even a NaN stays in its own document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.training.errors import ModelError

ATTENTION = "asyncrl_documents"
WASTE = 1.15  # a bucket's padded positions over its real ones, at most


@dataclass(frozen=True)
class Bucket:
    """Consecutive documents ``[first, first + rows)`` of the row, padded to ``length``.

    ``gather_N`` is the row position of every padded position and ``place_t`` the padded position of every real
    token; both None if all lengths are equal and padding is a view.
    """

    first: int
    rows: int
    length: int
    start: int  # of its tokens in the packed row
    tokens: int
    gather_N: Tensor | None
    place_t: Tensor | None

    def pad(self, x_THD: Tensor) -> Tensor:
        """(T, H, D) of the whole row -> (B, H, L, D) of this bucket."""
        piece = x_THD.narrow(0, self.start, self.tokens)
        if self.gather_N is not None:
            piece = _Pad.apply(piece, self.gather_N, self.place_t)
        return piece.unflatten(0, (self.rows, self.length)).transpose(1, 2)

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
    frame_length: int
    frame_of_B: Tensor | None
    mask_B1QK: Tensor  # additive, 0 or -inf; Q = repeats * L query rows of a key head, K = frame_length + L keys


@dataclass
class Documents:
    """Boundaries of a packed row, all sorted by length (longest first), and the buckets made from them.

    ``branch_stem[b]`` is the index of the stem that branch ``b`` continues.
    """

    stem_lengths: list[int]
    branch_lengths: list[int] = field(default_factory=list)
    branch_stem: list[int] = field(default_factory=list)
    device: str | torch.device = "cpu"
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32, for flash attention; None with branches
    _plans: dict[Any, tuple[list[Bucket], list[BranchBucket]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lengths in (self.stem_lengths, self.branch_lengths):
            if any(b > a for a, b in pairwise(lengths)):
                raise ValueError("documents must be sorted by length, longest first")
        if not self.branch_lengths:
            bounds = np.cumsum([0, *self.stem_lengths])
            self.cu_seqlens = torch.as_tensor(bounds, dtype=torch.int32, device=self.device)

    def buckets(self, window: int | None, dtype: torch.dtype, repeats: int) -> tuple[list[Bucket], list[BranchBucket]]:
        """The padded path's buckets, made once for all layers that share a sliding window.

        ``repeats``: query heads per key/value head; ``dtype`` of the additive mask.
        """
        key = (window, dtype, repeats)
        if key not in self._plans:
            starts = np.cumsum([0, *self.stem_lengths])
            branches = _buckets(self.branch_lengths, int(starts[-1]), self.device)
            self._plans[key] = (
                _buckets(self.stem_lengths, 0, self.device),
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
        position = stem_starts[distinct][:, None] + np.maximum(column, 0)
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
            frame_length=k,
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


def _buckets(lengths: list[int], offset: int, device: str | torch.device) -> list[Bucket]:
    """Cuts documents sorted by length (longest first) greedily, each bucket within ``WASTE`` of its real size."""
    out: list[Bucket] = []
    first, start, count = 0, offset, len(lengths)
    while first < count and lengths[first] > 0:
        top, tokens, end = lengths[first], 0, first
        while end < count and lengths[end] > 0:
            if top * (end + 1 - first) > WASTE * (tokens + lengths[end]) and end > first:
                break
            tokens += lengths[end]
            end += 1
        out.append(_bucket(lengths[first:end], first, start, device))
        first, start = end, start + tokens
    return out


def _bucket(lengths: list[int], first: int, start: int, device: str | torch.device) -> Bucket:
    rows, length, n = len(lengths), lengths[0], np.asarray(lengths)
    tokens = int(n.sum())
    if tokens == rows * length:
        return Bucket(first, rows, length, start, tokens, None, None)
    column = np.arange(length)[None, :]
    begin = np.cumsum(n)[:, None] - n[:, None]
    gather = begin + np.minimum(column, n[:, None] - 1)
    place = np.flatnonzero(column < n[:, None])
    return Bucket(
        first, rows, length, start, tokens, *(torch.as_tensor(a, device=device) for a in (gather.ravel(), place))
    )


class _Pad(torch.autograd.Function):
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


class _Frames(torch.autograd.Function):
    """Stems of the row (T, H, D) right-aligned in frames (n * K, H, D); positions before a stem are masked."""

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


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: (1, H, T, D), (1, Hk, T, D) twice -> (1, T, H, D) and no weights.

    Raises :class:`ModelError` for what it cannot reproduce (dropout, logit caps, sinks, a 4-D mask).
    """
    if documents is None:
        raise ModelError(f"{type(module).__name__} does not pass keyword arguments on to its attention function")
    unsupported = [k for k in ("softcap", "s_aux", "position_bias") if kwargs.get(k) is not None]
    if unsupported or dropout or attention_mask is not None:
        what = unsupported or (["dropout"] if dropout else ["attention_mask"])
        raise ModelError(f"{type(module).__name__} asks attention for {', '.join(what)}, which is not supported")
    q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and documents.cu_seqlens is not None:
        out_THD = _flash(q_THD, k_THD, v_THD, documents, scale, sliding_window)
    else:
        out_THD = _padded(q_THD, k_THD, v_THD, documents, scale, sliding_window)
    return out_THD[None], None


def _flash(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest, bounds = documents.stem_lengths[0], documents.cu_seqlens
    assert bounds is not None, "a batch with branches does not go through the flash kernel"
    left = -1 if window is None or window >= longest else window - 1
    # torch 2.11 takes fewer key than query heads as they are; later versions want to be told.
    shared: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _arguments(varlen_attn) else {}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **shared)
    assert isinstance(out, Tensor), "a tuple comes only when the log-sum-exp is asked for"
    return out


@cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _padded(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, window: int | None) -> Tensor:
    stems, branches = documents.buckets(window, q.dtype, q.shape[1] // k.shape[1])
    out = [_stem_rows(q, k, v, b, scale, window) for b in stems]
    out += [_branch_rows(q, k, v, b, scale) for b in branches]
    return out[0] if len(out) == 1 else torch.cat(out)


def _stem_rows(q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, scale: float, window: int | None) -> Tensor:
    q_BHLD, k_BHLD, v_BHLD = bucket.pad(q), _repeat(bucket.pad(k), q), _repeat(bucket.pad(v), q)
    if window is None or window >= bucket.length:
        out = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True, scale=scale)
    else:
        i = torch.arange(bucket.length, device=q.device)
        near = (i[:, None] >= i[None, :]) & (i[:, None] - i[None, :] < window)
        out = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=near, scale=scale)
    return bucket.unpad(out)


def _repeat(x_BHLD: Tensor, q_THD: Tensor) -> Tensor:
    """Key/value heads repeated for the query heads that share them."""
    repeats = q_THD.shape[1] // x_BHLD.shape[1]
    return x_BHLD if repeats == 1 else x_BHLD[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)


def _branch_rows(q: Tensor, k: Tensor, v: Tensor, bucket: BranchBucket, scale: float) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    q_BHLD = bucket.branches.pad(q)
    # Query heads that share a key head become more query rows of it: the mask is explicit, nothing is repeated.
    q_BHLD = q_BHLD.unflatten(1, (-1, repeats)).flatten(2, 3)
    k_BHKD, v_BHKD = _with_stems(k, bucket), _with_stems(v, bucket)
    out = F.scaled_dot_product_attention(q_BHLD, k_BHKD, v_BHKD, attn_mask=bucket.mask_B1QK, scale=scale)
    return bucket.branches.unpad(out.unflatten(2, (repeats, -1)).flatten(1, 2))


def _with_stems(x_THD: Tensor, bucket: BranchBucket) -> Tensor:
    """(T, Hk, D) -> (B, Hk, K, D): each branch's keys behind those of its stem."""
    own_BHLD = bucket.branches.pad(x_THD)
    if bucket.stems_NK is None:
        return own_BHLD
    frames = _Frames.apply(x_THD, bucket.stems_NK, bucket.stem_place, bucket.stem_tokens)
    stems_BHKD = frames.unflatten(0, (bucket.frames, -1)).index_select(0, bucket.frame_of_B).transpose(1, 2)
    return torch.cat([stems_BHKD, own_BHLD], dim=2)


def register() -> None:
    """Makes ``ATTENTION`` known to transformers. No mask function is registered: transformers then builds none."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, document_attention)
