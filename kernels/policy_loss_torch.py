"""Rows of logits over the whole vocabulary of a rank, in plain torch: the reference of the policy-loss head's kernels.

Formulas: :mod:`kernels.logprob_torch`. Products become logits in place and then their own gradients in place, so that a
chunk of tokens holds its logits once, and a slice of vocabulary beside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.logprob_torch import Head, Statistics, Upstream, add_statistics, d_logits, pick, to_logits
from kernels.matmul import chunks, sum_dtype, widen

VOCAB_CHUNK = 8192


def buffer(head: Head, rows: int) -> Tensor:
    """Room for the products of ``rows`` tokens: (rows, V) in fp32, or float64."""
    return torch.empty(rows, len(head.weight_VD), dtype=sum_dtype(head.hidden_ND), device=head.hidden_ND.device)


def row_statistics(head: Head, u: Tensor) -> Statistics:
    """Softmax statistics of all rows; leaves the products ``u`` (n, v) as they are."""
    m = torch.full((len(u),), -torch.inf, dtype=u.dtype, device=u.device)
    found = Statistics(m, *(torch.zeros_like(m) for _ in range(3)))
    for cols in chunks(u.shape[1], head.vocab_chunk):
        z, _ = to_logits(head, u[:, cols].clone(), cols)
        pick(head, z, cols, found.picked)
        add_statistics(found, slice(None), z)
    return found


def row_gradients(head: Head, u: Tensor, lse: Tensor, entropy: Tensor, upstream: Upstream) -> Tensor:
    """Gradient of the products, (n, v), as an operand of the next products; destroys ``u``."""
    for cols in chunks(u.shape[1], head.vocab_chunk):
        z, slope = to_logits(head, u[:, cols], cols, needs_slope=True)
        u[:, cols] = d_logits(head, z, slope, cols, lse, entropy, upstream)
    return u.to(widen(head.weight_VD[:0]).dtype)


def scale(x: Tensor | None, factor: Tensor) -> Tensor | None:
    """``x`` times a scalar, in place; the usual factor of one costs nothing on a CPU, where looking at it is free."""
    if x is None or (not x.is_cuda and float(factor) == 1.0):
        return x
    return x.mul_(factor)
