"""The likeliest next token, or a drawn one, straight from hidden states; the vocabulary may be sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dropout import ODD, mix
from kernels.matmul import chunks, matmul
from kernels.vocab_parallel import localise, replicated

LOGITS = 1 << 26  # that exist at a time


@dataclass(frozen=True)
class Draw:
    """A draw from softmax(c(logits) / temperature), ``c(u) = softcap tanh(u / softcap)``, for each of ``keys_N``.

    Gumbel noise on the logits makes their argmax such a draw (Maddison, Tarlow and Minka 2014, section 2). The noise is
    a function of a token's int64 key and of the row of the vocabulary, so no shard and no order of work changes it.
    """

    keys_N: Tensor
    temperature: float
    softcap: float | None = None

    def disturbed(self, logits_NV: Tensor, rows: slice, start: int) -> Tensor:
        """``logits_NV`` of tokens ``rows`` and of the vocabulary from ``start`` on, with noise: float64."""
        logits = logits_NV.double()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature + gumbel(self.keys_N[rows], start, logits.shape[1])


def gumbel(keys_N: Tensor, start: int, count: int) -> Tensor:
    """(N, count) float64 of the standard Gumbel distribution, by key and by place from ``start`` on."""
    places = torch.arange(start, start + count, device=keys_N.device)
    uniform = (mix(keys_N[:, None] ^ mix(places * ODD)) >> 12 & (1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform))


@torch.no_grad()
def likeliest(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    logits: int = LOGITS,
    draw: Draw | None = None,
) -> Tensor:
    """The row of the weight with the largest ``hidden @ weight.T + bias``, of equal ones the first: (N,) int64.

    Logits are fp32 (float64 for float64), at most ``logits`` of them or those of one token at a time. A sharded weight
    is a DTensor, whose ranks all have the same tokens and get the same result by two collectives of N numbers. With
    ``draw`` the largest of the disturbed ones.
    """
    hidden = replicated(hidden_ND)
    weight, bias, shard = localise(weight_VD, bias_V, None, None)
    last = len(weight_VD) - 1
    found = []
    for rows in chunks(len(hidden), max(1, logits // max(1, len(weight)))):
        logits_NV = _logits(hidden[rows], weight, bias)
        if draw is not None:
            logits_NV = draw.disturbed(logits_NV, rows, shard.start)
        found.append(_largest(logits_NV, last))
    value_N, index_N = (torch.cat(part) for part in zip(*found, strict=True))
    best_N = shard.maximum(value_N.clone())
    # A rank without the largest value names the last row, which is no smaller than the right one.
    mine = torch.where(value_N == best_N, index_N + shard.start, last)
    return -shard.maximum(-mine)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = matmul(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


def _largest(logits: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """(value, row) of this rank's largest logits; a rank without rows has -inf."""
    if not logits.shape[1]:
        value = logits.new_full((len(logits),), -torch.inf)
        return value, value.new_full((len(logits),), last, dtype=torch.int64)
    value, row = logits.max(-1)
    return value, row
