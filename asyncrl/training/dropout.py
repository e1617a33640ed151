"""Dropout that is a function of what is dropped: the mask of a token depends on seed, step, layer, document, position.

So it is the same however documents are packed, cut into micro-batches or divided among ranks, in a recomputed forward
and after a resume; no generator has a state and no mask is kept for backward. All arithmetic is of integers: masks are
equal on every device. A document is known by its tokens, so two equal ones in one step drop alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.dropout import ODD, drop, kept, mix

if TYPE_CHECKING:
    from asyncrl.training.packing import PackedBatch


def token_keys(batch: PackedBatch, seed: int, step: int) -> Tensor:
    """(T,) int64, of each token of the packed row. Raises ``ValueError`` for documents that share a prompt."""
    documents = batch.documents
    if documents.branch_lengths:
        raise ValueError("a prompt that several samples share has one activation, which cannot be dropped for each")
    ids_T, position_T = batch.input_1T[0], batch.position_1T[0]
    lengths = torch.tensor(documents.stem_lengths, device=ids_T.device)
    document_T = torch.arange(len(lengths), device=ids_T.device).repeat_interleave(lengths, output_size=len(ids_T))
    token_T = mix(ids_T * ODD + position_T)
    sums = torch.zeros_like(lengths).index_add_(0, document_T, token_T)  # of integers: any order
    call = mix(mix(torch.tensor(seed, device=ids_T.device) + ODD) + step)
    return mix(mix(sums[document_T] + position_T * ODD) ^ call)


class DroppedLinear(torch.autograd.Function):
    """``dropout(x) @ weight.t()``: (T, K), (R, K) -> (T, R). Keeps ``x``, which others keep too, and no mask.

    ``p`` is a tensor because compiled code would otherwise be made anew for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keys_T: Tensor, salt: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, keys_T, salt, p)
        return drop(x, kept(keys_T, salt, x.shape[1], p), p) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, keys_T, salt, p = ctx.saved_tensors
        mask = kept(keys_T, salt, x.shape[1], p)
        d_x = drop(grad @ weight, mask, p) if ctx.needs_input_grad[0] else None
        d_weight = grad.t() @ drop(x, mask, p) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, None, None
