"""Rows of logits over the whole vocabulary of a rank, in Triton: one program a row.

The products are the vendor library's, in fp32. The gradient is written over them in the operands' dtype, so that a
chunk of tokens takes four bytes a logit and not six.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.logprob_torch import Head, Statistics, Upstream
from kernels.logprob_triton import LOWEST, inverse_temperature, tanh

ALIGNED = 64  # elements: rows of the buffer begin where products and loads are fast, whatever the vocabulary
BLOCK, WARPS = 4096, 8
SMALL_BLOCK = 16  # the interpreter's: several blocks a row of a tiny vocabulary


@triton.jit
def _logit(product, o, there, bias, factor, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """The logit of a product in column ``o``."""
    if HAS_BIAS:
        product += tl.load(bias + o, there, 0.0).to(tl.float32)
    if HAS_CAP:
        product = cap * tanh(product / cap)
    return product * factor


@triton.jit
def _row_statistics_kernel(
    u, stride, bias, target, inverse, m_out, s_out, q_out, picked, N, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m, s, q and z of the target of one row. The sums are kept for each column of a block, relative to the maximum of
    all columns so far: it rises a few times a row, and only then are they rescaled."""
    row = tl.program_id(0).to(tl.int64)
    factor = 1.0
    if HAS_T:
        factor = tl.load(inverse + row)
    top = tl.full((), LOWEST, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    q = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, N, BLOCK):
        o = j + tl.arange(0, BLOCK)
        there = o < N
        z = tl.load(u + row * stride + o, there, 0.0)
        z = tl.where(there, _logit(z, o, there, bias, factor, cap, HAS_BIAS, HAS_CAP), LOWEST)
        highest = tl.max(z, 0)
        if highest > top:
            shift = top - highest
            scale = tl.exp(shift)
            q = scale * (q + s * shift)
            s = scale * s
            top = highest
        below = z - top
        e = tl.exp(below)
        s += e
        q += e * below
    tl.store(m_out + row, top)
    tl.store(s_out + row, tl.sum(s, 0))
    tl.store(q_out + row, tl.sum(q, 0))
    at = tl.load(target + row) - v0
    there = (at >= 0) & (at < N)
    product = tl.load(u + row * stride + at, there, 0.0)
    z_y = _logit(product, at, there, bias, factor, cap, HAS_BIAS, HAS_CAP)
    tl.store(picked + row, tl.where(there, z_y, 0.0))


@triton.jit
def _row_gradients_kernel(
    u, stride, bias, target, inverse, lse, entropy, g1, factor, g2, out, stride_out, N, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one row, over the row itself.

    ``out`` is the memory of ``u`` with elements of the same or half the size. Block j is written to the place of
    blocks up to j: the barrier makes sure that the whole program has read them. Blocks after j are not touched.
    """
    row = tl.program_id(0).to(tl.int64)
    of_temperature = 1.0
    if HAS_T:
        of_temperature = tl.load(inverse + row)
    below = tl.load(lse + row)
    height = tl.load(entropy + row)
    g_logp = tl.load(g1 + row)
    g_factor = tl.load(factor + row)
    g_entropy = 0.0
    if HAS_ENTROPY:
        g_entropy = tl.load(g2 + row)
    at = tl.load(target + row) - v0
    for j in range(0, N, BLOCK):
        o = j + tl.arange(0, BLOCK)
        there = o < N
        z = tl.load(u + row * stride + o, there, 0.0)
        tl.debug_barrier()
        slope = 1.0
        if HAS_BIAS:
            z += tl.load(bias + o, there, 0.0).to(tl.float32)
        if HAS_CAP:
            t = tanh(z / cap)
            slope = 1.0 - t * t
            z = cap * t
        log_p = z * of_temperature - below
        weight = g_factor
        if HAS_ENTROPY:
            weight = g_factor + g_entropy * (log_p + height)
        du = tl.where(o == at, g_logp, 0.0) - tl.exp(log_p) * weight
        if HAS_CAP:
            du *= slope
        tl.store(out + row * stride_out + o, du.to(out.dtype.element_ty), there)


@triton.jit
def _scale_kernel(x, factor, n, BLOCK: tl.constexpr):
    """x *= factor, unless it is one: then nothing is read."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + o, o < n, 0.0).to(tl.float32)
        tl.store(x + o, (value * by).to(x.dtype.element_ty), o < n)


def buffer(head: Head, rows: int) -> Tensor:
    """Room for the products of ``rows`` tokens: (rows, V) fp32, rows padded to a multiple of ``ALIGNED``."""
    v = len(head.weight_VD)
    return torch.empty(rows, -(-v // ALIGNED) * ALIGNED, device=head.hidden_ND.device)[:, :v]


def _common(head: Head, n: int) -> dict[str, Any]:
    inverse = inverse_temperature(head)
    on_gpu = head.hidden_ND.is_cuda
    return {
        "bias": head.bias_V, "target": head.target_N.contiguous(), "inverse": inverse, "N": n, "v0": head.shard.start,
        "cap": 1.0 if head.softcap is None else float(head.softcap), "HAS_BIAS": head.bias_V is not None,
        "HAS_CAP": head.softcap is not None, "HAS_T": inverse is not None,
        "BLOCK": BLOCK if on_gpu else SMALL_BLOCK, "num_warps": WARPS,
    }  # fmt: skip


def row_statistics(head: Head, u: Tensor) -> Statistics:
    """:func:`kernels.policy_loss_torch.row_statistics`."""
    rows, n = u.shape
    m, s, q, picked = (torch.empty(rows, device=u.device) for _ in range(4))
    if rows and n:
        _row_statistics_kernel[(rows,)](
            u, u.stride(0), m_out=m, s_out=s, q_out=q, picked=picked, **_common(head, n)
        )  # fmt: skip
        return Statistics(m, s, q, picked)
    return Statistics(m.fill_(-torch.inf), s.zero_(), q.zero_(), picked.zero_())


def row_gradients(head: Head, u: Tensor, lse: Tensor, entropy: Tensor, upstream: Upstream) -> Tensor:
    """:func:`kernels.policy_loss_torch.row_gradients`; the result lies in the memory of ``u``, in hidden's dtype."""
    (rows, n), dtype = u.shape, head.hidden_ND.dtype
    if not rows or not n:
        return u.to(dtype)
    whole = torch.as_strided(u, (rows, u.stride(0)), (u.stride(0), 1))
    out = whole.view(dtype)[:, :n]
    g1, factor, g2 = upstream.coefficients(head)
    vectors = {"lse": lse, "entropy": entropy, "g1": g1, "factor": factor, "g2": g2}
    given = {name: x if x is None else x.float().contiguous() for name, x in vectors.items()}
    _row_gradients_kernel[(rows,)](
        u, u.stride(0), out=out, stride_out=out.stride(0), HAS_ENTROPY=g2 is not None, **given, **_common(head, n)
    )  # fmt: skip
    return out


def scale(x: Tensor | None, factor: Tensor) -> Tensor | None:
    """``x`` times a scalar, in place, without looking at the factor from the host."""
    if x is not None and x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK)
    return x
