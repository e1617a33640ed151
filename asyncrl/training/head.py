"""Log-prob and entropy of selected tokens, straight from hidden states.

The logits of all tokens never exist at once: forward and backward walk over chunks of tokens x vocabulary, and
only ``hidden``, ``target``, ``lse`` and ``entropy`` are saved. Logits are accumulated in fp32 (float64 for
float64 inputs) and are not rounded to bf16 before the log-sum-exp.

With ``z = hidden @ weight.T / temperature`` and ``p = softmax(z)``:

    logp = z_y - lse            H = lse - sum_v p_v z_v
    dz_v = g1 (1[v = y] - p_v) - g2 p_v (z_v - lse + H)        then divided by the temperature

where g1 and g2 are the gradients of logp and of H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB_CHUNK = 8192


def selected_logprob_entropy(
    hidden_ME: Tensor,
    weight_VE: Tensor,
    target_M: Tensor,
    temperature: float = 1.0,
    token_chunk: int = 4096,
    vocab_chunk: int = VOCAB_CHUNK,
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``target_M`` and entropy of the whole distribution, both (M,), fp32 or float64; differentiable.

    ``token_chunk * vocab_chunk`` logits live at a time, twice in backward. A frozen ``weight_VE`` costs no dW.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    return _SelectedLogprob.apply(hidden_ME, weight_VE, target_M, temperature, token_chunk, vocab_chunk)


def _exact_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` accumulated and returned in fp32 (float64 for float64 operands)."""
    if a.dtype in (torch.float32, torch.float64) and a.dtype == b.dtype:
        return a @ b
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)  # tensor cores, no rounding of the result
    return a.float() @ b.float()


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


class _OnlineSums:
    """Running max m, s = sum e^(z-m) and q = sum e^(z-m)(z-m) over vocabulary chunks of one token chunk."""

    def __init__(self) -> None:
        self.m: Tensor | None = None
        self.s: Tensor
        self.q: Tensor

    def add(self, z: Tensor) -> None:
        """Takes one chunk of logits (m, v); destroys it."""
        top = z.amax(-1)
        m = top if self.m is None else torch.maximum(self.m, top)
        z.sub_(m[:, None])
        e = z.exp()
        s, q = e.sum(-1), e.mul_(z).sum(-1)
        if self.m is not None:
            shift = self.m - m
            scale = shift.exp()
            q = q + scale * (self.q + self.s * shift)
            s = s + scale * self.s
        self.m, self.s, self.q = m, s, q


class _SelectedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, token_chunk: int, vocab_chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _exact_dtype(hidden)
        picked, lse, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for rows in _chunks(len(hidden), token_chunk):
            h, y = hidden[rows], target[rows]
            sums, z_y = _OnlineSums(), torch.zeros(len(y), dtype=dtype, device=h.device)
            for cols in _chunks(len(weight), vocab_chunk):
                z = _matmul(h, weight[cols].t()).div_(temperature)
                inside = (y >= cols.start) & (y < cols.stop)
                local = (y - cols.start).clamp(0, cols.stop - cols.start - 1)
                z_y = torch.where(inside, z.gather(1, local[:, None])[:, 0], z_y)
                sums.add(z)
            assert sums.m is not None
            log_s = sums.s.log()
            picked[rows], lse[rows], entropy[rows] = z_y, sums.m + log_s, log_s - sums.q / sums.s
        ctx.save_for_backward(hidden, weight, target, lse, entropy)
        ctx.sizes = (temperature, token_chunk, vocab_chunk)
        ctx.set_materialize_grads(False)
        return picked - lse, entropy

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, target, lse, entropy = ctx.saved_tensors
        temperature, token_chunk, vocab_chunk = ctx.sizes
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        if g_logp is None and g_entropy is None:
            return None, None, None, None, None, None
        g1 = torch.zeros_like(lse) if g_logp is None else g_logp
        d_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if need_weight else None
        for rows in _chunks(len(hidden), token_chunk):
            h, y = hidden[rows], target[rows]
            for cols in _chunks(len(weight), vocab_chunk):
                w = weight[cols]
                log_p = _matmul(h, w.t()).div_(temperature).sub_(lse[rows, None])
                p = log_p.exp()
                if g_entropy is None:
                    dz = p.mul_(-g1[rows, None])
                else:
                    slope = log_p.add_(entropy[rows, None]).mul_(g_entropy[rows, None]).add_(g1[rows, None])
                    dz = p.mul_(slope).neg_()
                inside = (y >= cols.start) & (y < cols.stop)
                local = (y - cols.start).clamp(0, cols.stop - cols.start - 1)
                dz.scatter_add_(1, local[:, None], torch.where(inside, g1[rows], 0.0)[:, None])
                dz = dz.div_(temperature).to(w.dtype)
                if d_hidden is not None:
                    d_hidden[rows] += _matmul(dz, w)
                if d_weight is not None:
                    d_weight[cols] += _matmul(dz.t(), h)
        cast_h = None if d_hidden is None else d_hidden.to(hidden.dtype)
        cast_w = None if d_weight is None else d_weight.to(weight.dtype)
        return cast_h, cast_w, None, None, None, None
