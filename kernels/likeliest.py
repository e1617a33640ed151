"""The likeliest next token, straight from hidden states; the vocabulary may be sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.matmul import chunks, matmul, sum_dtype
from kernels.vocab_parallel import localise, replicated

LOGITS = 1 << 26  # that exist at a time


@torch.no_grad()
def likeliest(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None, logits: int = LOGITS) -> Tensor:
    """The row of the weight with the largest ``hidden @ weight.T + bias``, of equal ones the first: (N,) int64.

    Logits are fp32 (float64 for float64), at most ``logits`` of them or those of one token at a time. A sharded weight
    is a DTensor, whose ranks all have the same tokens and get the same result by two collectives of N numbers.
    """
    hidden = replicated(hidden_ND)
    weight, bias, shard = localise(weight_VD, bias_V, None, None)
    last = len(weight_VD) - 1
    found = []
    for rows in chunks(len(hidden), max(1, logits // max(1, len(weight)))):
        found.append(_largest(hidden[rows], weight, bias, last))
    value_N, index_N = (torch.cat(part) for part in zip(*found, strict=True))
    best_N = shard.maximum(value_N.clone())
    # A rank without the largest value names the last row, which is no smaller than the right one.
    mine = torch.where(value_N == best_N, index_N + shard.start, last)
    return -shard.maximum(-mine)


def _largest(hidden: Tensor, weight: Tensor, bias: Tensor | None, last: int) -> tuple[Tensor, Tensor]:
    """(value, row) of this rank's largest logits; a rank without rows has -inf."""
    if not len(weight):
        value = hidden.new_full((len(hidden),), -torch.inf, dtype=sum_dtype(hidden))
        return value, value.new_full((len(hidden),), last, dtype=torch.int64)
    logits = matmul(hidden, weight.t())
    if bias is not None:
        logits += bias
    value, row = logits.max(-1)
    return value, row
