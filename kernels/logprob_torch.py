"""The log-prob head in plain torch, in chunks of tokens x vocabulary: the reference of the Triton kernels.

With ``u = hidden @ weight.T + bias``, ``z = softcap tanh(u / softcap) / temperature`` (``z = u / temperature`` without
a soft-cap) and ``p = softmax(z)``:

    lse = log sum_v e^z_v      logp = z_y - lse      H = lse - sum_v p_v z_v
    dz_v = g1 1[v = y] - p_v (g1 - g3 + g2 (z_v - lse + H))
    du_v = dz_v (1 - tanh(u_v / softcap)^2) / temperature

where g1, g2 and g3 are the gradients of logp, H and lse. The statistics of a part of the vocabulary are its maximum
m, ``s = sum e^(z-m)`` and ``q = sum e^(z-m) (z-m)``: with z - m in q, ``H = log s - q / s`` does not cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.matmul import accumulate, chunks, matmul, sum_dtype, widen
from kernels.vocab_parallel import VocabShard


@dataclass(frozen=True)
class Head:
    """One call of the head on this rank: operands and how logits are made of them.

    ``hidden_ND`` and ``weight_VD`` of one dtype, ``target_N`` int64 ids of the whole vocabulary, ``bias_V`` or None,
    ``temperature`` a number or (N,), ``softcap`` or None.
    """

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    target_N: Tensor
    temperature: float | Tensor
    softcap: float | None
    shard: VocabShard
    token_chunk: int
    vocab_chunk: int

    def rows(self, rows: slice) -> Head:
        """The same head for some of the tokens."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[rows]
        return replace(self, hidden_ND=self.hidden_ND[rows], target_N=self.target_N[rows], temperature=temperature)

    def owned(self) -> Tensor:
        """(N,) bool: whether the target is one of this rank's vocabulary rows."""
        local = self.target_N - self.shard.start
        return (local >= 0) & (local < len(self.weight_VD))

    def per_token(self, x: Tensor) -> Tensor:
        """A gradient with respect to logits, (N,), as one with respect to the logits before the temperature."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            return x / temperature.to(x.dtype)
        return x if temperature == 1.0 else x / temperature


@dataclass
class Statistics:
    """What a part of the vocabulary knows of each token, all (N,): see the module's text; ``picked`` is z_y or 0."""

    m: Tensor
    s: Tensor
    q: Tensor
    picked: Tensor

    def finish(self, head: Head) -> tuple[Tensor, Tensor, Tensor]:
        """(logp, entropy, lse) over the whole vocabulary: two collectives if it is sharded, MAX and one packed SUM.

        A target that no rank owns has a log-prob of NaN.
        """
        m = head.shard.maximum(self.m.clone() if head.shard.group else self.m)
        shift = torch.where(self.s > 0, self.m - m, 0.0)  # a rank without vocabulary has m = -inf
        scale = shift.exp()
        found = head.owned().to(self.s.dtype)
        packed = torch.stack([scale * self.s, scale * (self.q + self.s * shift), self.picked, found])
        s, q, picked, found = head.shard.sum(packed)
        log_s = s.log()
        lse = m + log_s
        return torch.where(found > 0, picked - lse, torch.nan), log_s - q / s, lse


@dataclass(frozen=True)
class Upstream:
    """Gradients of logp, entropy and lse, each (N,) or None if that output has none."""

    logp: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None = None

    def coefficients(self, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
        """(g1, g1 - g3, g2), each divided by the temperature: the first two are zeros if not there."""
        given = next(g for g in (self.logp, self.lse, self.entropy) if g is not None)
        zeros = torch.zeros_like(given)
        g1 = zeros if self.logp is None else head.per_token(self.logp)
        factor = g1 if self.lse is None else g1 - head.per_token(self.lse)
        return g1, factor, None if self.entropy is None else head.per_token(self.entropy)

    def rows(self, rows: slice) -> Upstream:
        """The same for some of the tokens."""
        return Upstream(*(None if g is None else g[rows] for g in (self.logp, self.entropy, self.lse)))


@dataclass
class Gradients:
    """Of this rank's loss: ``hidden`` (N, D) in fp32, partial if the vocabulary is sharded; ``weight``, ``bias``."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def statistics(head: Head) -> Statistics:
    """Softmax statistics of all tokens over this rank's vocabulary; ``token_chunk * vocab_chunk`` logits at a time."""
    n, dtype = len(head.hidden_ND), sum_dtype(head.hidden_ND)
    m = torch.full((n,), -torch.inf, dtype=dtype, device=head.hidden_ND.device)
    found = Statistics(m, *(torch.zeros_like(m) for _ in range(3)))
    hidden = widen(head.hidden_ND)
    for cols in chunks(len(head.weight_VD), head.vocab_chunk):
        weight_t = widen(head.weight_VD[cols]).t()
        for rows in chunks(n, head.token_chunk):
            part = head.rows(rows)
            z, _ = to_logits(part, matmul(hidden[rows], weight_t), cols)
            pick(part, z, cols, found.picked[rows])
            add_statistics(found, rows, z)
    return found


def gradients(
    head: Head, lse: Tensor, entropy: Tensor, upstream: Upstream, needs: tuple[bool, bool, bool]
) -> Gradients:
    """Gradients of hidden, weight and bias, those that ``needs`` says, by recomputing the logits chunk by chunk."""
    dtype, out = sum_dtype(head.hidden_ND), Gradients()
    hidden, weight = head.hidden_ND, head.weight_VD
    if needs[0]:
        out.hidden = torch.zeros_like(hidden, dtype=dtype)
    if needs[1]:
        out.weight = torch.zeros_like(weight)
    if needs[2] and head.bias_V is not None:
        out.bias = torch.zeros_like(head.bias_V)
    hidden = widen(hidden)
    for cols in chunks(len(weight), head.vocab_chunk):
        w = widen(weight[cols])
        d_weight = None if out.weight is None else _sum_into(out.weight[cols], dtype)
        for rows in chunks(len(hidden), head.token_chunk):
            part = head.rows(rows)
            z, slope = to_logits(part, matmul(hidden[rows], w.t()), cols, needs_slope=True)
            du = d_logits(part, z, slope, cols, lse[rows], entropy[rows], upstream.rows(rows)).to(w.dtype)
            if out.hidden is not None:
                accumulate(out.hidden[rows], du, w)
            if d_weight is not None:
                accumulate(d_weight, du.t(), hidden[rows])
            if out.bias is not None:
                out.bias[cols] += du.sum(0, dtype=dtype)
        if out.weight is not None and d_weight is not None and d_weight.dtype != out.weight.dtype:
            out.weight[cols] = d_weight.to(out.weight.dtype)
    return out


def to_logits(head: Head, u: Tensor, cols: slice, needs_slope: bool = False) -> tuple[Tensor, Tensor | None]:
    """Products (n, v) -> logits z, in place, and with ``needs_slope`` the soft-cap's derivative (None without one)."""
    if head.bias_V is not None:
        u += head.bias_V[cols]
    slope = None
    if head.softcap is not None:
        u.div_(head.softcap).tanh_()
        slope = u.square().neg_().add_(1.0) if needs_slope else None
        u.mul_(head.softcap)
    if isinstance(head.temperature, Tensor):
        u.div_(head.temperature[:, None])
    elif head.temperature != 1.0:
        u.div_(head.temperature)
    return u, slope


def d_logits(
    head: Head, z: Tensor, slope: Tensor | None, cols: slice, lse: Tensor, entropy: Tensor, upstream: Upstream
) -> Tensor:
    """Gradient with respect to the products u of vocabulary ``cols``, (n, v); destroys ``z``."""
    g1, factor, g2 = upstream.coefficients(head)
    log_p = z.sub_(lse[:, None])
    du = log_p.exp()
    if g2 is None:
        du.mul_(factor[:, None].neg())
    else:
        du.mul_(log_p.add_(entropy[:, None]).mul_(g2[:, None]).add_(factor[:, None])).neg_()
    local, inside = _place(head, cols)
    if du.shape[1]:
        du.scatter_add_(1, local[:, None], torch.where(inside, g1, 0.0)[:, None])
    return du if slope is None else du.mul_(slope)


def _place(head: Head, cols: slice) -> tuple[Tensor, Tensor]:
    """Column of each token's target within ``cols`` (clamped) and whether it is there."""
    local = head.target_N - (head.shard.start + cols.start)
    width = cols.stop - cols.start
    return local.clamp(0, max(0, width - 1)), (local >= 0) & (local < width)


def pick(head: Head, z: Tensor, cols: slice, picked: Tensor) -> None:
    """Writes z_y of the targets in ``cols`` to ``picked``."""
    local, inside = _place(head, cols)
    torch.where(inside, z.gather(1, local[:, None])[:, 0], picked, out=picked)


def add_statistics(found: Statistics, rows: slice, z: Tensor) -> None:
    """Adds one chunk of logits (n, v) to the statistics of its tokens; destroys ``z``."""
    before = found.m[rows]
    m = torch.maximum(before, z.amax(-1))
    z.sub_(m[:, None])
    e = z.exp()
    s, q = e.sum(-1), e.mul_(z).sum(-1)
    shift = torch.where(found.s[rows] > 0, before - m, 0.0)
    scale = shift.exp()
    found.q[rows] = q + scale * (found.q[rows] + found.s[rows] * shift)
    found.s[rows] = s + scale * found.s[rows]
    found.m[rows] = m


def _sum_into(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` itself if it has ``dtype``, else a buffer of zeros in which its sum is kept."""
    return out if out.dtype == dtype else torch.zeros_like(out, dtype=dtype)
