"""Attention by document over a packed row: no token attends outside its own sample.

A packed row is ``(1, T)`` tokens, its documents described by :class:`~asyncrl.training.documents.Documents`. The same
function serves every layer; it is registered with transformers under ``ATTENTION`` and no (T, T) mask is ever built.

- On a GPU in half precision: flash attention with variable lengths, for rows without branches.
- Otherwise: padded causal rows for the stems, padded rows of queries over [stem | branch] keys for the branches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.training.documents import BranchBucket, Bucket, Documents, TakeFrames
from asyncrl.training.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Attends(Protocol):
    """What may stand where a packed row's documents do: it is asked instead (asyncrl/training/generation.py)."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor: ...


ATTENTION = "asyncrl_documents"
UNCOMPILED = "asyncrl_documents_uncompiled"


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    documents: Documents | Attends | None = None,
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
    if hasattr(documents, "attend"):
        out_THD = documents.attend(module, q_THD, k_THD, v_THD, scale, sliding_window)
    else:
        out_THD = attend_documents(q_THD, k_THD, v_THD, documents, scale, sliding_window)
    return out_THD[None], None


def attend_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, window: int | None) -> Tensor:
    """(T, H, D), (T, Hk, D) twice -> (T, H, D), each token seeing those of its own document up to itself."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and documents.cu_seqlens is not None:
        return _flash(q, k, v, documents, scale, window)
    return _padded(q, k, v, documents, scale, window)


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
    # One split for all buckets: its backward is one concatenation, where slices would each fill a whole row.
    sizes = [b.tokens for b in stems] + [b.branches.tokens for b in branches]
    pieces = list(zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True))
    out = [_stem_rows(*piece, b, scale, window) for piece, b in zip(pieces, stems, strict=False)]
    if branches:
        stem_tokens = sum(documents.stem_lengths)
        k_stems, v_stems = k.narrow(0, 0, stem_tokens), v.narrow(0, 0, stem_tokens)
        for piece, bucket in zip(pieces[len(stems) :], branches, strict=True):
            out.append(_branch_rows(*piece, k_stems, v_stems, bucket, scale))
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


def _branch_rows(
    q: Tensor, k: Tensor, v: Tensor, k_stems: Tensor, v_stems: Tensor, bucket: BranchBucket, scale: float
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    q_BHLD = bucket.branches.pad(q)
    # Query heads that share a key head become more query rows of it: the mask is explicit, nothing is repeated.
    q_BHLD = q_BHLD.unflatten(1, (-1, repeats)).flatten(2, 3)
    k_BHKD, v_BHKD = _with_stems(k, k_stems, bucket), _with_stems(v, v_stems, bucket)
    out = F.scaled_dot_product_attention(q_BHLD, k_BHKD, v_BHKD, attn_mask=bucket.mask_B1QK, scale=scale)
    return bucket.branches.unpad(out.unflatten(2, (repeats, -1)).flatten(1, 2))


def _with_stems(own: Tensor, stems: Tensor, bucket: BranchBucket) -> Tensor:
    """(tokens, Hk, D) of the bucket and of all stems -> (B, Hk, K, D): each branch's keys behind those of its stem."""
    own_BHLD = bucket.branches.pad(own)
    if bucket.stems_NK is None:
        return own_BHLD
    frames = TakeFrames.apply(stems, bucket.stems_NK, bucket.stem_place, bucket.stem_tokens)
    stems_BHKD = frames.unflatten(0, (bucket.frames, -1)).index_select(0, bucket.frame_of_B).transpose(1, 2)
    return torch.cat([stems_BHKD, own_BHLD], dim=2)


def register() -> None:
    """Makes ``ATTENTION`` known to transformers. No mask function is registered: transformers then builds none."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, document_attention)


def stay_uncompiled(lm: PreTrainedModel) -> None:
    """Keeps ``lm``'s attention out of compiled layers: its calls follow the documents of a batch, each a new graph."""
    from transformers import AttentionInterface

    AttentionInterface.register(UNCOMPILED, torch.compiler.disable(document_attention))
    lm.set_attn_implementation(UNCOMPILED)
