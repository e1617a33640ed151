"""Many adapters over a packed row in Triton; the number of kernels does not depend on the number of adapters.

forward     _shrink_kernel   parts of S = D A^T, each over a span of K; D is dropped as it is read
            _expand_kernel   y = s S B^T + bias, written once, and S in x's dtype, kept for backward
            a product        y += x W^T, by the vendor's library with beta = 1, or _product_kernel
backward    _outer_kernel    dB = s G^T S, and parts of dS = s G B, in one pass over G
            _sum_kernel      dS from its parts, if they are many
            _inner_kernel    dA = dS^T D, and dx = drop(dS A), in one pass over x
            a product        dx += G W

A program has tokens of one adapter only, and no kernel has atomics: sums over tokens and over columns are taken in a
fixed order, over spans that depend on K, N, the adapter's rank and its own tokens. So all of this is independent of the
pack; what is not is the library's product, which ``deterministic`` replaces. A slot with more tokens than a chunk has
its dA and dB in parts, which _join_kernel adds up in their order. Operands are in x's dtype, sums in fp32. Layers that
share x are further programs of _shrink_kernel, which find x in the cache; in backward each has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dropout import column_hashes, kept_tile, row_hashes
from kernels.matmul import sum_dtype

if TYPE_CHECKING:
    from kernels.multi_lora import Call


@dataclass(frozen=True)
class Sizes:
    """Columns: ``span`` of x for one part of S at least, ``step`` of a loop, ``expand`` of y and ``wide`` of a program
    of backward. ``product``: columns of y, and of x at once, of the base's product."""

    span: int
    step: int
    expand: int
    wide: int
    product: tuple[int, int]


ON_GPU = Sizes(1024, 64, 128, 128, (256, 64))
ON_CPU = Sizes(32, 16, 32, 32, (32, 16))  # the interpreter's
FEW = 4  # parts of S at most, and of dS that _inner_kernel adds up itself
OPTIONS = {"num_warps": 8, "num_stages": 3}


@triton.jit
def _piece(slot_of, first_of, start, piece, SIZE: tl.constexpr):
    """Slot, first place and number of places of a tile or chunk; slot -1 for one that is not there."""
    slot = tl.load(slot_of + piece)
    first = tl.load(first_of + piece)
    end = tl.load(start + tl.maximum(slot, 0) + 1)
    return slot, first, tl.minimum(end - first, SIZE)


@triton.jit
def _matrix(rank, starts, layer, slot, SLOTS: tl.constexpr):
    """Rank of a slot's adapter in a layer, 0 if there is none, and where its matrix begins."""
    there = (slot >= 0) & (slot < SLOTS)
    at = tl.load(starts + layer * SLOTS + slot, there, -1)
    r = tl.load(rank + slot, there & (at >= 0), 0)
    return r, tl.multiple_of(tl.maximum(at, 0), 16)


@triton.jit
def _in_class(r, R: tl.constexpr):
    return (r <= R) & ((r > R // 2) | (R == 16)) & (r > 0)


@triton.jit
def _dropout(p_of, salts, layer, slot, SLOTS: tl.constexpr, DROP: tl.constexpr, ACC: tl.constexpr):
    """Salt, threshold (see :func:`kernels.dropout.threshold`, ties to even) and 1 / (1 - p)."""
    salt = tl.full((), 0, tl.int64)
    limit = tl.full((), 0, tl.int32)
    factor = tl.full((), 1.0, ACC)
    if DROP:
        salt = tl.load(salts + layer * SLOTS + slot)
        p = tl.load(p_of + slot)
        exact = p * 4294967296.0
        near = tl.floor(exact + 0.5)
        whole = near.to(tl.int64)
        whole -= ((near - exact == 0.5) & ((whole & 1) == 1)).to(tl.int64)
        limit = tl.minimum(whole - 2147483648, 2147483647).to(tl.int32)
        factor = (1.0 / (1.0 - p)).to(ACC)
    return salt, limit, factor


@triton.jit
def _dropped(d, hashes, c, salt, limit, factor):
    return tl.where(kept_tile(hashes, column_hashes(c, salt), limit), (d * factor).to(d.dtype), 0.0)


@triton.jit
def _shrink_rows(
    x, weight, keys, order, parts, at, r, first, count, k0, salt, limit, factor, part, T, K, stride_x,
    DROP: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr,
    STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, TILE)
    in_m = m < count
    rows = tl.load(order + first + m, in_m, 0).to(tl.int64)
    j = tl.arange(0, R)
    total = tl.full((TILE, R), 0.0, ACC)
    hashes = row_hashes(tl.load(keys + rows, in_m, 0), salt) if DROP else None
    for k in range(k0, tl.minimum(k0 + SPAN, K), STEP):
        c = k + tl.arange(0, STEP)
        d = tl.load(x + rows[:, None] * stride_x + c[None, :], in_m[:, None] & (c < K)[None, :], 0.0)
        if DROP:
            d = _dropped(d, hashes, c, salt, limit, factor)
        a = tl.load(weight + at + j[:, None] * K + c[None, :], (j < r)[:, None] & (c < K)[None, :], 0.0)
        total = tl.dot(d, tl.trans(a), total, input_precision="ieee", out_dtype=ACC)
    place = (part * T + first + m).to(tl.int64)[:, None] * WIDTH + j[None, :]
    tl.store(parts + place, total, in_m[:, None])


@triton.jit
def _shrink_kernel(
    x, weight, keys, order, start, slot_of, first_of, rank, starts, salts, p_of, parts, T, K, stride_x,
    SLOTS: tl.constexpr, DROP: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, SPAN: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A part of S of a tile and a layer, which are neighbours -> ``parts`` (layers, PARTS, T, WIDTH), by place."""
    layer = tl.program_id(0)
    slot, first, count = _piece(slot_of, first_of, start, tl.program_id(1), TILE)
    r, at = _matrix(rank, starts, layer, slot, SLOTS)
    if r > 0:
        salt, limit, factor = _dropout(p_of, salts, layer, slot, SLOTS, DROP, ACC)
        part = layer * PARTS + tl.program_id(2)
        for i in tl.static_range(4):
            if CLASSES & (16 << i):  # noqa: SIM102
                if _in_class(r, 16 << i):
                    _shrink_rows(
                        x, weight, keys, order, parts, at, r, first, count, tl.program_id(2) * SPAN, salt, limit,
                        factor, part, T, K, stride_x, DROP, 16 << i, WIDTH, TILE, SPAN, STEP, ACC,
                    )  # fmt: skip


@triton.jit
def _sum_of_parts(parts, first_part, places, in_m, j, T, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """(TILE, R) in ``parts``' dtype: the parts of some places, added in their order."""
    at = places.to(tl.int64)[:, None] * WIDTH + j[None, :]
    size = tl.full((), 1, tl.int64) * T * WIDTH
    total = tl.load(parts + first_part * size + at, in_m[:, None], 0.0)
    for i in tl.static_range(1, PARTS):
        total += tl.load(parts + (first_part + i) * size + at, in_m[:, None], 0.0)
    return total


@triton.jit
def _expand_rows(
    parts, shrunk, weight, bias, out, order, at, r, first, count, scale, layer, n0, T, N, stride_out,
    HAS_BIAS: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """R is 0 for tokens without adapter."""
    m = tl.arange(0, TILE)
    in_m = m < count
    n = n0 + tl.arange(0, COLUMNS)
    in_n = n < N
    total = tl.full((TILE, COLUMNS), 0.0, ACC)
    if R > 0:
        j = tl.arange(0, R)
        s = _sum_of_parts(parts, layer * PARTS, first + m, in_m, j, T, PARTS, WIDTH).to(weight.dtype.element_ty)
        if n0 == 0:
            tl.store(shrunk + (layer * T + first + m).to(tl.int64)[:, None] * WIDTH + j[None, :], s, in_m[:, None])
        b = tl.load(weight + at + j[:, None] * N + n[None, :], (j < r)[:, None] & in_n[None, :], 0.0)
        total = tl.dot(s, b, total, input_precision="ieee", out_dtype=ACC) * scale
    if HAS_BIAS:
        total += tl.load(bias + n, in_n, 0.0).to(ACC)[None, :]
    rows = tl.load(order + first + m, in_m, 0).to(tl.int64)
    tl.store(
        out + rows[:, None] * stride_out + n[None, :], total.to(out.dtype.element_ty), in_m[:, None] & in_n[None, :]
    )


@triton.jit
def _expand_kernel(
    parts, shrunk, weight, bias, out, order, start, slot_of, first_of, rank, starts, scales, layer, T, N, stride_out,
    SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y before the base's product, and S (layers, T, WIDTH) by place; bias or zero for tokens without adapter."""
    slot, first, count = _piece(slot_of, first_of, start, tl.program_id(1), TILE)
    r, at = _matrix(rank, starts, layer, slot, SLOTS)
    n0 = tl.program_id(0) * COLUMNS
    if (slot >= 0) & (r == 0):
        _expand_rows(
            parts, shrunk, weight, bias, out, order, at, r, first, count, 0.0, layer, n0, T, N, stride_out,
            HAS_BIAS, 0, WIDTH, TILE, PARTS, COLUMNS, ACC,
        )  # fmt: skip
    if r > 0:
        scale = tl.load(scales + slot).to(ACC)
        for i in tl.static_range(4):
            if CLASSES & (16 << i):  # noqa: SIM102
                if _in_class(r, 16 << i):
                    _expand_rows(
                        parts, shrunk, weight, bias, out, order, at, r, first, count, scale, layer, n0, T, N,
                        stride_out, HAS_BIAS, 16 << i, WIDTH, TILE, PARTS, COLUMNS, ACC,
                    )  # fmt: skip


@triton.jit
def _store_gradient(
    total, gradient, spare, first_chunk, fresh, at, r, slot, chunk, n, j, N, WIDTH: tl.constexpr, MANY: tl.constexpr
):
    """``total`` (columns, R) of a chunk: into the gradient (R, N), or into ``spare`` if the slot has more chunks."""
    inside = (n < N)[:, None] & (j < r)[None, :]
    direct = inside  # masks are made of blocks: the interpreter cannot join one with a scalar condition
    if MANY:
        chunks = (j * 0 + tl.load(first_chunk + slot + 1) - tl.load(first_chunk + slot))[None, :]
        direct = inside & (chunks == 1)
        place = (chunk * WIDTH + j).to(tl.int64)[None, :] * N + n[:, None]
        tl.store(spare + place, total, inside & (chunks > 1))
    place = gradient + at + j[None, :] * N + n[:, None]
    old = tl.load(place, direct & (j * 0 + tl.load(fresh + slot) == 0)[None, :], 0.0)
    tl.store(place, old + total, direct)


@triton.jit
def _outer_rows(
    grad, weight, shrunk, order, parts, gradient, spare, first_chunk, fresh, at, r, slot, chunk, first, count, scale,
    layer, column, T, N, stride_g, R: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    MANY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = column * COLUMNS + tl.arange(0, COLUMNS)
    in_n = n < N
    j = tl.arange(0, R)
    b = tl.load(weight + at + j[:, None] * N + n[None, :], (j < r)[:, None] & in_n[None, :], 0.0)
    total = tl.full((COLUMNS, R), 0.0, ACC)
    for t in range(0, count, TILE):
        m = t + tl.arange(0, TILE)
        in_m = m < count
        rows = tl.load(order + first + m, in_m, 0).to(tl.int64)
        g = tl.load(grad + rows[:, None] * stride_g + n[None, :], in_m[:, None] & in_n[None, :], 0.0)
        s = tl.load(shrunk + (layer * T + first + m).to(tl.int64)[:, None] * WIDTH + j[None, :], in_m[:, None], 0.0)
        total = tl.dot(tl.trans(g), s, total, input_precision="ieee", out_dtype=ACC)
        d = tl.dot(g, tl.trans(b), input_precision="ieee", out_dtype=ACC) * scale
        place = (tl.full((), 1, tl.int64) * column * T + first + m)[:, None] * WIDTH + j[None, :]
        tl.store(parts + place, d, in_m[:, None])
    _store_gradient(
        total * scale, gradient, spare, first_chunk, fresh, at, r, slot, chunk, n, j, N, WIDTH, MANY
    )  # fmt: skip


@triton.jit
def _outer_kernel(
    grad, weight, shrunk, order, start, slot_of, first_of, first_chunk, rank, starts, scales, fresh, parts, gradient,
    spare, layer, T, N, stride_g, SLOTS: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dB of a chunk and some columns of y, and what these add to its dS -> ``parts`` (columns, T, WIDTH)."""
    column, chunk = tl.program_id(0), tl.program_id(1)
    slot, first, count = _piece(slot_of, first_of, start, chunk, CHUNK)
    r, at = _matrix(rank, starts, layer, slot, SLOTS)
    if r > 0:
        scale = tl.load(scales + slot).to(ACC)
        for i in tl.static_range(4):
            if CLASSES & (16 << i):  # noqa: SIM102
                if _in_class(r, 16 << i):
                    _outer_rows(
                        grad, weight, shrunk, order, parts, gradient, spare, first_chunk, fresh, at, r, slot, chunk,
                        first, count, scale, layer, column, T, N, stride_g, 16 << i, WIDTH, TILE, COLUMNS, MANY, ACC,
                    )  # fmt: skip


@triton.jit
def _sum_kernel(parts, out, size, PARTS, BLOCK: tl.constexpr):
    """``out`` (size,) from ``parts`` (PARTS, size), added in their order. Places that nobody wrote stay meaningless."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(parts + at, inside, 0.0)
    for i in range(1, PARTS):
        total += tl.load(parts + tl.full((), 1, tl.int64) * i * size + at, inside, 0.0)
    tl.store(out + at, total, inside)


@triton.jit
def _inner_rows(
    x, weight, keys, order, parts, d_x, gradient, spare, first_chunk, fresh, at, r, slot, chunk, first, count, column,
    salt, limit, factor, T, K, stride_x, NEEDS_X: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, R: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    k = column * COLUMNS + tl.arange(0, COLUMNS)
    in_k = k < K
    j = tl.arange(0, R)
    a = tl.load(weight + at + j[:, None] * K + k[None, :], (j < r)[:, None] & in_k[None, :], 0.0)
    total = tl.full((COLUMNS, R), 0.0, ACC)
    columns = column_hashes(k, salt) if DROP else None
    for t in range(0, count, TILE):
        m = t + tl.arange(0, TILE)
        in_m = m < count
        inside = in_m[:, None] & in_k[None, :]
        rows = tl.load(order + first + m, in_m, 0).to(tl.int64)
        d = tl.load(x + rows[:, None] * stride_x + k[None, :], inside, 0.0)
        ds = _sum_of_parts(parts, 0, first + m, in_m, j, T, PARTS, WIDTH).to(d.dtype)
        kept = kept_tile(row_hashes(tl.load(keys + rows, in_m, 0), salt), columns, limit) if DROP else None
        if DROP:
            d = tl.where(kept, (d * factor).to(d.dtype), 0.0)
        total = tl.dot(tl.trans(d), ds, total, input_precision="ieee", out_dtype=ACC)
        if NEEDS_X:
            e = tl.dot(ds, a, input_precision="ieee", out_dtype=ACC)
            if DROP:
                e = tl.where(kept, e * factor, 0.0)
            place = d_x + rows[:, None] * K + k[None, :]
            if ADD:
                e += tl.load(place, inside, 0.0).to(ACC)
            tl.store(place, e.to(d.dtype), inside)
    _store_gradient(total, gradient, spare, first_chunk, fresh, at, r, slot, chunk, k, j, K, WIDTH, MANY)


@triton.jit
def _inner_kernel(
    x, weight, keys, order, start, slot_of, first_of, first_chunk, rank, starts, salts, p_of, fresh, parts, d_x,
    gradient, spare, layer, T, K, stride_x, SLOTS: tl.constexpr, NEEDS_X: tl.constexpr, ADD: tl.constexpr,
    DROP: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, MANY: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dA of a chunk and some columns of x, and dx before the base's product; zero for tokens without adapter."""
    column, chunk = tl.program_id(0), tl.program_id(1)
    slot, first, count = _piece(slot_of, first_of, start, chunk, CHUNK)
    r, at = _matrix(rank, starts, layer, slot, SLOTS)
    if NEEDS_X and not ADD:  # noqa: SIM102
        if (slot >= 0) & (r == 0):
            k = column * COLUMNS + tl.arange(0, COLUMNS)
            for t in range(0, count, TILE):
                m = t + tl.arange(0, TILE)
                rows = tl.load(order + first + m, m < count, 0).to(tl.int64)
                nothing = tl.full((TILE, COLUMNS), 0.0, d_x.dtype.element_ty)
                tl.store(d_x + rows[:, None] * K + k[None, :], nothing, (m < count)[:, None] & (k < K)[None, :])
    if r > 0:
        salt, limit, factor = _dropout(p_of, salts, layer, slot, SLOTS, DROP, ACC)
        for i in tl.static_range(4):
            if CLASSES & (16 << i):  # noqa: SIM102
                if _in_class(r, 16 << i):
                    _inner_rows(
                        x, weight, keys, order, parts, d_x, gradient, spare, first_chunk, fresh, at, r, slot, chunk,
                        first, count, column, salt, limit, factor, T, K, stride_x, NEEDS_X, ADD, DROP, 16 << i, WIDTH,
                        TILE, PARTS, COLUMNS, MANY, ACC,
                    )  # fmt: skip


@triton.jit
def _join_kernel(
    spare, gradient, first_chunk, rank, starts, fresh, layer, N, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient (R, N) of a slot with several chunks from ``spare`` (chunks, WIDTH, N), added in their order."""
    slot = tl.program_id(1)
    r, at = _matrix(rank, starts, layer, slot, SLOTS)
    begin = tl.load(first_chunk + slot)
    end = tl.load(first_chunk + slot + 1)
    if end - begin > 1:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < r * N
        total = tl.load(gradient + at + i, inside & (i * 0 + tl.load(fresh + slot) == 0), 0.0)
        for chunk in range(begin, end):
            total += tl.load(spare + tl.full((), 1, tl.int64) * chunk * WIDTH * N + i, inside, 0.0)
        tl.store(gradient + at + i, total, inside)


@triton.jit
def _product_kernel(
    x, w, out, order, start, slot_of, first_of, N, K, stride_x, stride_n, stride_k,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out += x @ w, whose element (k, n) is at k stride_k + n stride_n: a tile of one adapter's tokens, K in order."""
    slot, first, count = _piece(slot_of, first_of, start, tl.program_id(1), TILE)
    if slot >= 0:
        m = tl.arange(0, TILE)
        in_m = m < count
        rows = tl.load(order + first + m, in_m, 0).to(tl.int64)
        n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.full((TILE, COLUMNS), 0.0, ACC)
        for k in range(0, K, STEP):
            c = k + tl.arange(0, STEP)
            a = tl.load(x + rows[:, None] * stride_x + c[None, :], in_m[:, None] & (c < K)[None, :], 0.0)
            at = c.to(tl.int64)[:, None] * stride_k + n.to(tl.int64)[None, :] * stride_n
            b = tl.load(w + at, (c < K)[:, None] & (n < N)[None, :], 0.0)
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        place = out + rows[:, None] * N + n[None, :]
        inside = in_m[:, None] & (n < N)[None, :]
        total += tl.load(place, inside, 0.0).to(ACC)
        tl.store(place, total.to(out.dtype.element_ty), inside)


class _Run:
    """One call's sizes and the arguments that several kernels share."""

    def __init__(self, x: Tensor, call: Call) -> None:
        self.call, self.x = call, x
        self.tokens, self.k = x.shape
        self.adapters, self.slots, self.table = call.adapters, call.adapters.slots, call.segments
        self.sizes = ON_GPU if x.is_cuda else ON_CPU
        self.width = max(self.slots.classes, default=16)
        self.parts = min(FEW, triton.cdiv(self.k, self.sizes.span))
        self.fresh = self.slots.fresh.view(torch.uint8)
        self.keys = x if call.keys_T is None else call.keys_T  # not read without dropout
        self.many = self.table.longest > self.table.chunks.size
        self.constants: dict[str, Any] = {
            "SLOTS": self.table.slots, "CLASSES": sum(self.slots.classes), "WIDTH": self.width,
            "TILE": self.table.tiles.size, "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32, **OPTIONS,
        }  # fmt: skip

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=sum_dtype(self.x), device=self.x.device)

    def product(self, out: Tensor, x: Tensor, w: Tensor) -> None:
        """out += x @ w"""
        if not self.call.deterministic:
            torch.addmm(out, x, w, out=out)
            return
        (columns, step), tiles, n = self.sizes.product, self.table.tiles, w.shape[1]
        _product_kernel[(triton.cdiv(n, columns), len(tiles.slot))](
            x, w, out, self.table.order_T, self.table.start, tiles.slot, tiles.first, n, x.shape[1], x.stride(0),
            w.stride(1), w.stride(0), TILE=tiles.size, COLUMNS=columns, STEP=step, ACC=self.constants["ACC"], **OPTIONS,
        )  # fmt: skip

    def join(self, spare: Tensor, starts: Tensor, layer: int, n: int) -> None:
        if self.many:
            block = 1024
            _join_kernel[(triton.cdiv(self.width * n, block), self.table.slots)](
                spare, self.slots.grad, self.table.first_chunk, self.slots.rank, starts, self.fresh, layer, n,
                SLOTS=self.table.slots, WIDTH=self.width, BLOCK=block,
            )  # fmt: skip


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Call
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """:func:`kernels.multi_lora_torch.forward`; S of all layers is one tensor (layers, T, largest class)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    run, layers = _Run(x, call), len(weights)
    slots, adapters, table = run.slots, run.adapters, run.table
    outputs = tuple(x.new_empty(run.tokens, len(w)) for w in weights)
    shrunk = x.new_empty(layers, run.tokens, run.width)
    if not run.tokens:
        return outputs, (shrunk,)
    parts = run.empty(layers, run.parts, run.tokens, run.width)
    span = triton.cdiv(triton.cdiv(run.k, run.parts), run.sizes.step) * run.sizes.step
    tiles, weight = table.tiles, slots.weight
    _shrink_kernel[(layers, len(tiles.slot), run.parts)](
        x, weight, run.keys, table.order_T, table.start, tiles.slot, tiles.first, slots.rank, adapters.a,
        adapters.salt, slots.dropout, parts, run.tokens, run.k, x.stride(0), DROP=call.keys_T is not None,
        PARTS=run.parts, SPAN=span, STEP=run.sizes.step, **run.constants,
    )  # fmt: skip
    for layer, (w, bias, out) in enumerate(zip(weights, biases, outputs, strict=True)):
        _expand_kernel[(triton.cdiv(len(w), run.sizes.expand), len(tiles.slot))](
            parts, shrunk, weight, weight if bias is None else bias, out, table.order_T, table.start, tiles.slot,
            tiles.first, slots.rank, adapters.b, slots.scale, layer, run.tokens, len(w), out.stride(0),
            HAS_BIAS=bias is not None, PARTS=run.parts, COLUMNS=run.sizes.expand, **run.constants,
        )  # fmt: skip
        run.product(out, x, w.t())
    return outputs, (shrunk,)


def backward(
    x: Tensor,
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    call: Call,
    needs_x: bool,
) -> Tensor | None:
    """:func:`kernels.multi_lora_torch.backward`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    run, (shrunk,) = _Run(x, call), saved
    d_x = x.new_empty(x.shape) if needs_x else None
    if not run.tokens:
        return d_x
    for layer, (w, grad) in enumerate(zip(weights, grads, strict=True)):
        grad = x.new_zeros(run.tokens, len(w)) if grad is None else grad.contiguous()
        _adapter_gradients(run, layer, grad, shrunk, d_x)
        if d_x is not None:
            run.product(d_x, grad, w)
    return d_x


def _adapter_gradients(run: _Run, layer: int, grad: Tensor, shrunk: Tensor, d_x: Tensor | None) -> None:
    """dB, dA and what the adapters add to ``d_x`` in one layer."""
    slots, adapters, table, chunks = run.slots, run.adapters, run.table, run.table.chunks
    wide, n, grad_P = run.sizes.wide, grad.shape[1], run.slots.grad
    places = (table.order_T, table.start, chunks.slot, chunks.first, table.first_chunk, slots.rank)
    more = {"CHUNK": chunks.size, "COLUMNS": wide, "MANY": run.many} | run.constants
    spare = run.empty(len(chunks.slot), run.width, max(n, run.k)) if run.many else grad_P
    columns = triton.cdiv(n, wide)
    parts = run.empty(columns, run.tokens, run.width)
    _outer_kernel[(columns, len(chunks.slot))](
        grad, slots.weight, shrunk, *places, adapters.b, slots.scale, run.fresh, parts, grad_P, spare, layer,
        run.tokens, n, grad.stride(0), **more,
    )  # fmt: skip
    run.join(spare, adapters.b, layer, n)
    if columns > FEW:
        size, whole = run.tokens * run.width, run.empty(1, run.tokens, run.width)
        _sum_kernel[(triton.cdiv(size, 512),)](parts, whole, size, columns, BLOCK=512)
        parts, columns = whole, 1
    _inner_kernel[(triton.cdiv(run.k, wide), len(chunks.slot))](
        run.x, slots.weight, run.keys, *places, adapters.a, adapters.salt, slots.dropout, run.fresh, parts,
        grad_P if d_x is None else d_x, grad_P, spare, layer, run.tokens, run.k, run.x.stride(0),
        NEEDS_X=d_x is not None, ADD=layer > 0, DROP=run.call.keys_T is not None, PARTS=columns, **more,
    )  # fmt: skip
    run.join(spare, adapters.a, layer, run.k)
