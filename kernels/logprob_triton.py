"""The log-prob head in Triton: logits live in fp32 registers, only their statistics or their gradients are stored.

One persistent kernel shape serves both directions: a product of hidden and weight tiles by TMA (plain loads where the
layout does not allow it), with the softmax in its epilogue. Forward stores (m, s, q) of each tile of vocabulary.
Backward recomputes a chunk of the vocabulary, stores its gradient in hidden's dtype, and leaves the products for
hidden's and the weight's gradient to the vendor's library. Formulas: :mod:`kernels.logprob_torch`, whose functions
these ones replace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.logprob_torch import Gradients, Head, Statistics, Upstream
from kernels.matmul import accumulate, chunks, matmul, sum_dtype

TOKENS = 8192  # of the calls for which vocab_chunk is meant: with more tokens chunks are narrower, down to ...
NARROWEST = 2048  # ... this many rows, below which hidden's fp32 gradient is read and written too often


@dataclass(frozen=True)
class Tile:
    """Rows of hidden x rows of weight x columns of both; ``group`` tiles of hidden share a tile of weight in cache."""

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 8
    stages: int = 4

    def constants(self) -> dict[str, int]:
        sizes = {"BM": self.m, "BN": self.n, "BK": self.k, "GROUP": self.group}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


TILE = Tile(128, 256, 64)  # of both directions: nothing was faster by more than the noise of one or the other
ON_CPU = Tile(16, 16, 16, group=2)  # the interpreter's: its cost is the number of tiles' elements


LOWEST = tl.constexpr(-1e30)  # of a maximum over nothing: finite, so that its distance to others times zero is zero
SHARED_BYTES = 200_000  # of shared memory that these tiles want; consumer GPUs have about half


def serves(device: torch.device) -> bool:
    """Whether the tiles above are right for a GPU: Hopper or newer, of the kind for data centres."""
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False
    number = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"] >= SHARED_BYTES


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Number of a tile -> its row and column, GROUP rows at a time."""
    width = GROUP * tiles_n
    first = (tile // width) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit
def _product(
    h, w, pm, pn, M, N, K, stride_h, stride_w, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """(BM, BN) fp32 of hidden @ weight.T; ``h`` and ``w`` are tensor descriptors with TMA, else pointers."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    if TMA:
        for k in range(0, tl.cdiv(K, BK)):
            x = h.load([pm * BM, k * BK])
            y = w.load([pn * BN, k * BK])
            total = tl.dot(x, y.T, total, input_precision="ieee")
    else:
        rm = (pm * BM + tl.arange(0, BM)).to(tl.int64)
        rn = (pn * BN + tl.arange(0, BN)).to(tl.int64)
        for k in range(0, tl.cdiv(K, BK)):
            rk = k * BK + tl.arange(0, BK)
            x = tl.load(h + rm[:, None] * stride_h + rk[None, :], (rm[:, None] < M) & (rk[None, :] < K), 0.0)
            y = tl.load(w + rn[:, None] * stride_w + rk[None, :], (rn[:, None] < N) & (rk[None, :] < K), 0.0)
            total = tl.dot(x, tl.trans(y), total, input_precision="ieee")
    return total


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of the columns of a tile. Epilogues work on parts of a tile so that they fit in registers."""
    return x.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def _part_statistics(
    z, pm, c0, bias, target, inverse, M, N, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """m, s, q and z of the target (0 if it is elsewhere) of products (BM, BN) of columns from c0 on."""
    rm = pm * BM + tl.arange(0, BM)
    rn = c0 + tl.arange(0, BN)
    in_m = rm < M
    in_n = (rn < N)[None, :]
    if HAS_BIAS:
        z += tl.load(bias + rn, rn < N, 0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        z = cap * tanh(z / cap)
    if HAS_T:
        z *= tl.load(inverse + rm, in_m, 1.0)[:, None]
    at = tl.load(target + rm, in_m, -1) - v0
    z_y = tl.sum(tl.where((rn[None, :] == at[:, None]) & in_n, z, 0.0), 1)
    m = tl.max(tl.where(in_n, z, float("-inf")), 1)
    below = tl.where(in_n, z - m[:, None], 0.0)
    e = tl.where(in_n, tl.exp(below), 0.0)
    return m, tl.sum(e, 1), tl.sum(e * below, 1), z_y


@triton.jit
def _merge(m, s, q, z_y, m2, s2, q2, z_y2):
    """Statistics of two parts, of which the second may lie beyond the vocabulary (m2 = -inf, s2 = 0)."""
    top = tl.maximum(m, m2)
    shift = m - top
    shift2 = tl.where(s2 > 0, m2 - top, 0.0)
    e = tl.exp(shift)
    e2 = tl.exp(shift2)
    return top, e * s + e2 * s2, e * (q + s * shift) + e2 * (q2 + s2 * shift2), z_y + z_y2


@triton.jit
def _statistics_kernel(
    h, w, bias, target, inverse, m_out, s_out, q_out, picked, M, N, K, stride_h, stride_w, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, TMA: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Per tile of vocabulary and token: m, s, q into (tiles, M), and z of the target into (M,)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        pm, pn = _place(tile, tiles_m, tiles_n, GROUP)
        z = _product(h, w, pm, pn, M, N, K, stride_h, stride_w, BM, BN, BK, TMA)
        c0 = pn * BN
        left, right = _halves(z, BM, BN)
        m, s, q, z_y = _part_statistics(
            left, pm, c0, bias, target, inverse, M, N, v0, cap, HAS_BIAS, HAS_CAP, HAS_T, BM, BN // 2
        )
        m2, s2, q2, z_y2 = _part_statistics(
            right, pm, c0 + BN // 2, bias, target, inverse, M, N, v0, cap, HAS_BIAS, HAS_CAP, HAS_T, BM, BN // 2
        )
        m, s, q, z_y = _merge(m, s, q, z_y, m2, s2, q2, z_y2)
        rm = pm * BM + tl.arange(0, BM)
        in_m = rm < M
        out = pn.to(tl.int64) * M + rm
        tl.store(m_out + out, m, in_m)
        tl.store(s_out + out, s, in_m)
        tl.store(q_out + out, q, in_m)
        at = tl.load(target + rm, in_m, -1) - v0
        tl.store(picked + rm, z_y, in_m & (at >= c0) & (at < tl.minimum(c0 + BN, N)))


@triton.jit
def _combine_kernel(m_in, s_in, q_in, m_out, s_out, q_out, M, TILES, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    """Statistics of all tiles (TILES, M) -> those of each token (M,), in one pass."""
    rm = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = rm < M
    m = tl.full((BLOCK_T, BLOCK_M), LOWEST, tl.float32)
    s = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    q = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for t in range(0, TILES, BLOCK_T):
        rt = t + tl.arange(0, BLOCK_T)
        there = (rt < TILES)[:, None] & in_m[None, :]
        at = rt.to(tl.int64)[:, None] * M + rm[None, :]
        m2 = tl.load(m_in + at, there, LOWEST)
        s2 = tl.load(s_in + at, there, 0.0)
        q2 = tl.load(q_in + at, there, 0.0)
        top = tl.maximum(m, m2)
        e = tl.exp(m - top)
        e2 = tl.exp(m2 - top)
        q = e * (q + s * (m - top)) + e2 * (q2 + s2 * (m2 - top))
        s = e * s + e2 * s2
        m = top
    top = tl.max(m, 0)
    shift = m - top[None, :]
    e = tl.exp(shift)
    tl.store(m_out + rm, top, in_m)
    tl.store(s_out + rm, tl.sum(e * s, 0), in_m)
    tl.store(q_out + rm, tl.sum(e * (q + s * shift), 0), in_m)


@triton.jit
def _store_gradient(
    z, pm, c0, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, stride_out, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Products (BM, BN) of columns from c0 on -> their gradients, stored."""
    rm = pm * BM + tl.arange(0, BM)
    rn = c0 + tl.arange(0, BN)
    in_m = rm < M
    in_n = rn < N
    slope = 1.0
    if HAS_BIAS:
        z += tl.load(bias + rn, in_n, 0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        t = tanh(z / cap)
        slope = 1.0 - t * t
        z = cap * t
    if HAS_T:
        z *= tl.load(inverse + rm, in_m, 1.0)[:, None]
    log_p = z - tl.load(lse + rm, in_m, 0.0)[:, None]
    weight = tl.load(factor + rm, in_m, 0.0)[:, None]
    if HAS_ENTROPY:
        weight += tl.load(g2 + rm, in_m, 0.0)[:, None] * (log_p + tl.load(entropy + rm, in_m, 0.0)[:, None])
    du = -tl.exp(log_p) * weight
    at = tl.load(target + rm, in_m, -1) - v0
    du += tl.where(rn[None, :] == at[:, None], tl.load(g1 + rm, in_m, 0.0)[:, None], 0.0)
    if HAS_CAP:
        du *= slope
    place = out + rm.to(tl.int64)[:, None] * stride_out + rn[None, :]
    tl.store(place, du.to(out.dtype.element_ty), in_m[:, None] & in_n[None, :])


@triton.jit
def _d_logits_kernel(
    h, w, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, K, stride_h, stride_w, stride_out, v0, cap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_T: tl.constexpr, HAS_ENTROPY: tl.constexpr, TMA: tl.constexpr,
    PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of the products of N vocabulary rows from v0 on, into ``out`` (M, N)."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    QUARTER: tl.constexpr = BN // 4
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        pm, pn = _place(tile, tiles_m, tiles_n, GROUP)
        z = _product(h, w, pm, pn, M, N, K, stride_h, stride_w, BM, BN, BK, TMA)
        c0 = pn * BN
        left, right = _halves(z, BM, BN)
        a, b = _halves(left, BM, BN // 2)
        c, d = _halves(right, BM, BN // 2)
        _store_gradient(
            a, pm, c0, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, stride_out, v0, cap,
            HAS_BIAS, HAS_CAP, HAS_T, HAS_ENTROPY, BM, QUARTER,
        )  # fmt: skip
        _store_gradient(
            b, pm, c0 + QUARTER, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, stride_out, v0, cap,
            HAS_BIAS, HAS_CAP, HAS_T, HAS_ENTROPY, BM, QUARTER,
        )  # fmt: skip
        _store_gradient(
            c, pm, c0 + 2 * QUARTER, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, stride_out, v0,
            cap, HAS_BIAS, HAS_CAP, HAS_T, HAS_ENTROPY, BM, QUARTER,
        )  # fmt: skip
        _store_gradient(
            d, pm, c0 + 3 * QUARTER, bias, target, inverse, lse, entropy, g1, factor, g2, out, M, N, stride_out, v0,
            cap, HAS_BIAS, HAS_CAP, HAS_T, HAS_ENTROPY, BM, QUARTER,
        )  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    """Arguments that both kernels take of a head and a slice of its vocabulary."""

    head: Head
    cols: slice
    tile: Tile

    def operands(self) -> tuple[Any, Any, bool]:
        """Hidden and weight as the kernel takes them, and whether those are TMA descriptors."""
        h, w, tile = self.head.hidden_ND, self.head.weight_VD[self.cols], self.tile
        tma = all(_suits_tma(x) for x in (h, w))
        if not tma:
            return h, w, False
        describe = [(h, [tile.m, tile.k]), (w, [tile.n, tile.k])]
        a, b = (TensorDescriptor(x, list(x.shape), list(x.stride()), block) for x, block in describe)
        return a, b, True

    def run(self, kernel: Any, outputs: tuple[Tensor, ...], rows: tuple[Tensor, ...], more: dict[str, Any]) -> None:
        """One launch: as many programs as the device runs at once, each walking over tiles."""
        head, (m, k), n = self.head, self.head.hidden_ND.shape, self.cols.stop - self.cols.start
        h, w, tma = self.operands()
        tiles = triton.cdiv(m, self.tile.m) * triton.cdiv(n, self.tile.n)
        programs = min(tiles, _processors(head.hidden_ND.device))
        bias = None if head.bias_V is None else head.bias_V[self.cols]
        inverse = inverse_temperature(head)
        kernel[(programs,)](
            h, w, bias, head.target_N, inverse, *rows, *outputs, m, n, k,
            head.hidden_ND.stride(0), head.weight_VD.stride(0), **more, v0=head.shard.start + self.cols.start,
            cap=1.0 if head.softcap is None else float(head.softcap), HAS_BIAS=bias is not None,
            HAS_CAP=head.softcap is not None, HAS_T=inverse is not None, TMA=tma, PROGRAMS=programs,
            **self.tile.constants(),
        )  # fmt: skip


def statistics(head: Head) -> Statistics:
    """:func:`kernels.logprob_torch.statistics`; 12 bytes for each token and tile of vocabulary while it runs."""
    head = _rowwise(head)
    (n, _), v = head.hidden_ND.shape, len(head.weight_VD)
    device = head.hidden_ND.device
    picked = torch.zeros(n, device=device)
    if n == 0 or v == 0:
        return Statistics(torch.full_like(picked, -torch.inf), picked.clone(), picked.clone(), picked)
    tile = TILE if device.type == "cuda" else ON_CPU
    m, s, q = (torch.empty(triton.cdiv(v, tile.n), n, device=device) for _ in range(3))
    _Launch(head, slice(0, v), tile).run(_statistics_kernel, (m, s, q, picked), (), {})
    top, sums, products = (torch.empty(n, device=device) for _ in range(3))
    blocks = {"BLOCK_M": 32, "BLOCK_T": 32 if device.type == "cuda" else 2}
    _combine_kernel[(triton.cdiv(n, 32),)](m, s, q, top, sums, products, n, len(m), **blocks)
    return Statistics(top, sums, products, picked)


def gradients(
    head: Head, lse: Tensor, entropy: Tensor, upstream: Upstream, needs: tuple[bool, bool, bool]
) -> Gradients:
    """:func:`kernels.logprob_torch.gradients`; holds hidden's in fp32 and one chunk's logits' in hidden's dtype."""
    head = _rowwise(head)
    hidden, weight, out = head.hidden_ND, head.weight_VD, Gradients()
    n, dtype = len(hidden), sum_dtype(hidden)
    if needs[0]:
        out.hidden = torch.zeros_like(hidden, dtype=dtype)
    if needs[1]:
        out.weight = torch.empty_like(weight) if n else torch.zeros_like(weight)
    if needs[2] and head.bias_V is not None:
        out.bias = torch.zeros_like(head.bias_V)
    if n == 0 or len(weight) == 0:
        return out
    g1, factor, g2 = upstream.coefficients(head)
    tile = TILE if hidden.is_cuda else ON_CPU
    width = min(len(weight), vocab_width(n, head.vocab_chunk))
    buffer = torch.empty(n * _padded(width), dtype=hidden.dtype, device=hidden.device)
    rows = tuple(x if x is None else x.contiguous() for x in (lse, entropy, g1, factor, g2))
    for cols in chunks(len(weight), width):
        columns = cols.stop - cols.start
        du = buffer[: n * _padded(columns)].view(n, -1)[:, :columns]
        more = {"stride_out": du.stride(0), "HAS_ENTROPY": g2 is not None}
        _Launch(head, cols, tile).run(_d_logits_kernel, (du,), rows, more)  # type: ignore[arg-type]
        if out.weight is not None:
            matmul(du.t(), hidden, out=out.weight[cols])
        if out.hidden is not None:
            accumulate(out.hidden, du, weight[cols])
        if out.bias is not None:
            out.bias[cols] = du.sum(0, dtype=dtype)
    return out


def _padded(columns: int) -> int:
    """Elements of a row whose neighbours begin at 16 bytes: an odd vocabulary must not slow the products."""
    return -(-columns // 8) * 8


def vocab_width(tokens: int, vocab_chunk: int) -> int:
    """Vocabulary rows of one chunk of backward: ``vocab_chunk`` for 8192 tokens or fewer, then fewer to a limit."""
    if tokens <= TOKENS:
        return vocab_chunk
    return min(vocab_chunk, max(NARROWEST, vocab_chunk * TOKENS // tokens // 256 * 256))


def _rowwise(head: Head) -> Head:
    """The head with rows of hidden and weight that lie without gaps between their elements."""
    h, w = (x if x.stride(-1) == 1 else x.contiguous() for x in (head.hidden_ND, head.weight_VD))
    return replace(head, hidden_ND=h, weight_VD=w, target_N=head.target_N.contiguous())


def inverse_temperature(head: Head) -> Tensor | None:
    """1 / temperature of each token in fp32; None if it is one."""
    if isinstance(head.temperature, Tensor):
        return head.temperature.float().reciprocal().contiguous()
    if head.temperature == 1.0:
        return None
    return torch.full((len(head.hidden_ND),), 1.0 / head.temperature, device=head.hidden_ND.device)


def _suits_tma(x: Tensor) -> bool:
    """Hopper or newer, a 16-byte aligned start and rows of a multiple of 16 bytes; the interpreter is not picky."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return x.data_ptr() % 16 == 0 and (x.stride(0) * x.element_size()) % 16 == 0


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
