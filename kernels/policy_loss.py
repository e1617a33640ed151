"""The policy-loss head: a loss of each token's own log-prob and entropy, with the gradients made in forward.

When the loss is a sum over tokens of f(log-prob, entropy, known values) - clipped surrogates with known advantages and
denominator, entropy bonuses, KL penalties against known log-probs, cross-entropy - its derivatives with respect to
log-prob and entropy are known as soon as a token's logits are. A chunk of tokens then needs its logits once: product,
softmax, f, and the products for the gradients of hidden and weight. That is three products instead of the four of
:func:`kernels.logprob.selected_logprob`, which has to compute logits again in backward. In exchange one chunk of tokens
holds the logits of the whole vocabulary (of this rank), and the gradients live from forward on.

Backends, formulas and vocabulary parallelism are those of :mod:`kernels.logprob`; a sharded vocabulary makes two
collectives a chunk of tokens, and one all-reduce of hidden's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import policy_loss_torch
from kernels.logprob import Backend, check, selected_logprob, wants_triton
from kernels.logprob_torch import Gradients, Head, Upstream
from kernels.matmul import accumulate, chunks, matmul, sum_dtype, widen
from kernels.vocab_parallel import Mesh, localise, replicated

# (logp_C, entropy_C, *extras_C) -> (loss_C, its derivative by logp_C, that by entropy_C or None if there is none)
TokenLoss = Callable[..., tuple[Tensor, Tensor, Tensor | None]]

CHUNK_BYTES = 832 * 2**20
EVEN = 256  # tokens of a chunk are a multiple of this if there are that many: tiles of the products are full
BF16_SUMS = 8  # chunks whose weight gradients may be added in bf16: that rounding grows with the root of their number


def policy_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    token_loss: TokenLoss,
    extras: Sequence[Tensor] = (),
    temperature_N: float | Tensor = 1.0,
    mesh: Mesh | None = None,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    fp32_weight_gradient: bool | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logprob_N, entropy_N): the sum of ``token_loss`` over all tokens, differentiable; the others are not.

    ``token_loss(logp_C, entropy_C, *extras_C)`` gets some of the tokens, in order, without a graph, and ``extras``,
    tensors of (N, ...), cut alike. It returns (loss_C, dloss/dlogp_C, dloss/dentropy_C or None); every factor, such as
    one over the number of tokens, is in it. :func:`by_autograd` makes one of a differentiable function.

    ``chunk_bytes`` is what the logits of one chunk of tokens take; fewer bytes, more chunks, and the weight's gradient
    is read and written once a chunk. With ``fp32_weight_gradient`` that gradient is summed over chunks in fp32 (4 more
    bytes for each of V x D), as always on a CPU; without, in the weight's own dtype. Rounding bf16 k times adds a
    relative error of 1.7e-3 sqrt((k - 1) / 2) to the 2.4e-3 of bf16 operands: None takes fp32 for more than
    ``BF16_SUMS`` chunks. Backward can be called once. Other arguments, and what :class:`ValueError` is raised for, are
    those of :func:`kernels.logprob.selected_logprob`.
    """
    hidden_ND = replicated(hidden_ND)
    weight, bias, shard = localise(weight_VD, bias_V, mesh, vocab_size)
    check(hidden_ND, weight, bias, target_N, temperature_N, softcap)
    for extra in extras:
        if len(extra) != len(hidden_ND):
            raise ValueError(f"extras must be ({len(hidden_ND)}, ...), one row a token, not {tuple(extra.shape)}")
    operands = [x for x in (hidden_ND, weight, bias) if x is not None]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        options: dict[str, Any] = {"bias_V": bias_V, "softcap": softcap, "vocab_size": vocab_size, "backend": backend}
        logp, entropy, _ = selected_logprob(hidden_ND, weight_VD, target_N, temperature_N, mesh, **options)
        return token_loss(logp, entropy, *extras)[0].sum(), logp, entropy
    size = tokens_of_chunk(len(hidden_ND), shard.widest, chunk_bytes, sum_dtype(hidden_ND).itemsize)
    head = Head(hidden_ND, weight, bias, target_N, temperature_N, softcap, shard, size, policy_loss_torch.VOCAB_CHUNK)
    if fp32_weight_gradient is None:
        fp32_weight_gradient = len(hidden_ND) > BF16_SUMS * size
    work = _Work(head, token_loss, tuple(extras), fp32_weight_gradient, policy_implementation(backend, hidden_ND))
    return _PolicyLoss.apply(hidden_ND, weight, bias, work)


def by_autograd(function: Callable[..., Tensor]) -> TokenLoss:
    """The token loss of a differentiable ``function(logp_C, entropy_C, *extras_C) -> loss_C`` that mixes no tokens.

    Token i of the result must depend on token i of the arguments only: then the gradient of its sum holds each token's
    own derivative.
    """

    def token_loss(logp: Tensor, entropy: Tensor, *extras: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        with torch.enable_grad():
            inputs = [logp.detach().requires_grad_(), entropy.detach().requires_grad_()]
            loss = function(*inputs, *extras)
            g1, g2 = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
        return loss.detach(), torch.zeros_like(logp) if g1 is None else g1, g2

    return token_loss


def tokens_of_chunk(tokens: int, vocabulary: int, chunk_bytes: int, itemsize: int = 4) -> int:
    """Tokens whose logits fit ``chunk_bytes``, at least one, spread evenly over the chunks that this takes.

    >>> tokens_of_chunk(8192, 128_256, 832 * 2**20)
    1536
    """
    most = max(1, chunk_bytes // (itemsize * max(1, vocabulary)))
    if most >= EVEN:
        most -= most % EVEN
    if tokens <= most:
        return max(1, tokens)
    even = -(-tokens // -(-tokens // most))
    return min(most, -(-even // EVEN) * EVEN) if most >= EVEN else even


def policy_implementation(backend: Backend, hidden: Tensor) -> ModuleType:
    """The module with ``row_statistics`` and ``row_gradients``; ``auto`` is Triton for 16-bit operands on any GPU."""
    if wants_triton(backend, hidden):
        from kernels import policy_loss_triton

        return policy_loss_triton
    return policy_loss_torch


@dataclass(frozen=True)
class _Work:
    """One call: ``head.token_chunk`` tokens at a time."""

    head: Head
    token_loss: TokenLoss
    extras: tuple[Tensor, ...]
    fp32_weight_gradient: bool
    backend: ModuleType

    def run(self, needs: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor, Tensor, Gradients]:
        """(loss, logp_N, entropy_N, gradients of this rank: hidden's of all ranks)."""
        head = self.head
        n, dtype = len(head.hidden_ND), sum_dtype(head.hidden_ND)
        logp, entropy = (torch.empty(n, dtype=dtype, device=head.hidden_ND.device) for _ in range(2))
        sums = self._zeros(needs)
        loss = torch.zeros((), dtype=dtype, device=head.hidden_ND.device)
        weight = widen(head.weight_VD)
        buffer = self.backend.buffer(head, min(n, head.token_chunk))
        for rows in chunks(n, head.token_chunk):
            part = head.rows(rows)
            u = matmul(widen(part.hidden_ND), weight.t(), out=buffer[: rows.stop - rows.start])
            logp_C, entropy_C, lse_C = self.backend.row_statistics(part, u).finish(part)
            each, g1, g2 = self.token_loss(logp_C, entropy_C, *(x[rows] for x in self.extras))
            loss += each.sum()
            logp[rows], entropy[rows] = logp_C, entropy_C
            du = self.backend.row_gradients(part, u, lse_C, entropy_C, Upstream(g1.to(dtype), g2))
            self._add(sums, rows, du, weight)
        if sums.hidden is not None:
            sums.hidden = head.shard.sum(sums.hidden).to(head.hidden_ND.dtype)
        if sums.weight is not None:
            sums.weight = sums.weight.to(head.weight_VD.dtype)
        return loss, logp, entropy, sums

    def _zeros(self, needs: tuple[bool, bool, bool]) -> Gradients:
        """Where sums go. The first chunk writes the weight's, so that they need no zeros unless there is no token."""
        head, out, dtype = self.head, Gradients(), sum_dtype(self.head.hidden_ND)
        if needs[0]:  # complete in one product unless ranks add their parts
            out.hidden = torch.empty_like(head.hidden_ND, dtype=dtype if head.shard.group else None)
        if needs[1]:
            make = torch.empty_like if len(head.hidden_ND) else torch.zeros_like
            own = head.weight_VD.is_cuda and not self.fp32_weight_gradient
            out.weight = make(head.weight_VD, dtype=head.weight_VD.dtype if own else dtype)
        if needs[2] and head.bias_V is not None:
            out.bias = torch.zeros_like(head.bias_V)
        return out

    def _add(self, sums: Gradients, rows: slice, du: Tensor, weight: Tensor) -> None:
        hidden = widen(self.head.hidden_ND[rows])
        if sums.hidden is not None:
            matmul(du, weight, out=sums.hidden[rows])
        if sums.weight is not None and rows.start == 0:
            matmul(du.t(), hidden, out=sums.weight)
        elif sums.weight is not None:
            accumulate(sums.weight, du.t(), hidden)
        if sums.bias is not None:
            sums.bias += du.sum(0, dtype=sum_dtype(du))


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, logp, entropy, found = work.run(ctx.needs_input_grad[:3])
        # As an attribute: saved tensors may be moved to the host, and a finished gradient is wanted at once.
        ctx.found, ctx.backend = found, work.backend
        ctx.mark_non_differentiable(logp, entropy)
        return loss, logp, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError("backward through the policy-loss head a second time: its gradients were given away")
        return *(ctx.backend.scale(x, grad) for x in (found.hidden, found.weight, found.bias)), None
