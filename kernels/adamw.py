"""One pass of AdamW over many tensors: fp32 weights, or bf16 weights and states that are rounded stochastically.

For each element, in fp32 (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2, in the order of ``torch.optim.AdamW``):

    p <- p (1 - lr wd)        m <- m + (1 - b1)(g - m)        v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

A bf16 result x lies between two bf16 numbers; it becomes the upper one with the probability of its distance from the
lower one, so that the mean over roundings is x and an update of 1e-6 is not lost. Weights and both moments are rounded
so: with beta2 = 0.999 a second moment rounded to nearest could never shrink. The bits are a function of (seed, step,
tensor, index), see :func:`kernels.philox.rounding_bits`: a resumed run draws the same, and so do replicas of a shard.
The moments use a bijection of the weight's 16 bits, which leaves each rounding unbiased by itself.

Bytes moved an element: 28 with fp32 gradients (26 with bf16 ones), 14 in bf16.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.philox import ROUNDS, philox, rounding_bits

BLOCK = 1024
# 16 bits -> 16 bits, one to one (odd factors), for the first and the second moment.
MOMENT_BITS = ((0x9E37, 0x79B9), (0x85EB, 0xCA6B))


@dataclass(frozen=True)
class Hyper:
    """What one parameter group shares."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass
class Job:
    """One tensor: local shards of equal size and layout. ``step`` counts from 1; ``tensor`` and ``first`` key the bits.

    ``weight``, ``exp_avg`` and ``exp_avg_sq`` have one dtype, fp32 or bf16; ``grad`` may be either. ``first``, a
    multiple of eight, is the place of the shard's first element in the random bits of the whole tensor.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    hyper: Hyper
    tensor: int = 0
    first: int = 0


def constants(h: Hyper, step: int) -> tuple[float, float, float]:
    """lr / (1 - b1^t), 1 / sqrt(1 - b2^t) and 1 - lr wd, computed in double precision."""
    return h.lr / (1 - h.beta1**step), (1 - h.beta2**step) ** -0.5, 1 - h.lr * h.weight_decay


@torch.no_grad()
def adamw(jobs: Sequence[Job], factor: Tensor, seed: int | None = 0) -> None:
    """Updates the tensors of ``jobs`` in place, with their gradients multiplied by ``factor``.

    ``factor`` is one fp32 number on their device; negative or NaN: nothing changes. Nothing waits for the device.
    ``seed`` None rounds bf16 to nearest, which loses small updates: to measure what rounding costs. The
    kernel runs on GPUs, :func:`adamw_reference` elsewhere.
    """
    jobs = [job for job in jobs if job.weight.numel()]
    if not jobs:
        return
    if jobs[0].weight.is_cuda:
        adamw_triton(jobs, factor, seed)
    else:
        adamw_reference(jobs, factor, seed)


def stochastic_round(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 -> bf16 with 16 random bits an element (int32 in [0, 65535]); NaN stays NaN, infinities stay."""
    raw = (x.view(torch.int32) + bits.view_as(x)) & -65536
    return torch.where(x == x, raw.view(torch.float32), x).to(torch.bfloat16)


@torch.no_grad()
def adamw_reference(jobs: Sequence[Job], factor: Tensor, seed: int | None = 0) -> None:
    """The same in plain torch, on any device; waits for the device."""
    scale = float(factor)
    if not scale >= 0:
        return
    for job in jobs:
        h = job.hyper
        step_size, root, decay = constants(h, job.step)
        p, g, m, v = (x.float() for x in (job.weight, job.grad, job.exp_avg, job.exp_avg_sq))
        g = g * scale
        m = m + (g - m) * (1 - h.beta1)
        v = v * h.beta2 + g * g * (1 - h.beta2)
        rooted = v.double().sqrt().float()  # torch's fp32 square root on a CPU is not correctly rounded
        p = p * decay - m / (rooted * root + h.eps) * step_size
        results = [p, m, v]
        if job.weight.dtype == torch.bfloat16 and seed is not None:
            bits = rounding_bits(p.numel(), seed, job.step, job.tensor, job.first, p.device)
            images = [bits, *((bits * a + b) & 0xFFFF for a, b in MOMENT_BITS)]
            results = [stochastic_round(x, r) for x, r in zip(results, images, strict=True)]
        for old, new in zip((job.weight, job.exp_avg, job.exp_avg_sq), results, strict=True):
            old.copy_(new)


@triton.jit
def _bf16(x, bits):
    raw = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, raw.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@triton.jit
def _load_float(row, column):
    return tl.load(row + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _kernel(
    table, blocks, factor, beta2, rest1, rest2, eps,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, ROUND: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor a program. ``table`` has a row of 12 int64 for each tensor, see :func:`_row`."""
    scale = tl.load(factor)
    if scale >= 0:
        row = table + tl.load(blocks + tl.program_id(0)) * 12
        weight = tl.load(row).to(tl.pointer_type(WEIGHT))
        grad = tl.load(row + 1).to(tl.pointer_type(GRAD))
        first_moment = tl.load(row + 2).to(tl.pointer_type(WEIGHT))
        second_moment = tl.load(row + 3).to(tl.pointer_type(WEIGHT))
        count = tl.load(row + 4)
        if ALIGNED:  # every address and count: full-width accesses, masks included
            weight, grad = tl.multiple_of(weight, 16), tl.multiple_of(grad, 16)
            first_moment, second_moment = tl.multiple_of(first_moment, 16), tl.multiple_of(second_moment, 16)
            count = tl.multiple_of(count, 8)
        block = tl.program_id(0) - tl.load(row + 5)
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * scale
        p = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        m = tl.load(first_moment + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second_moment + at, mask=inside, other=0.0).to(tl.float32)
        m = m + (g - m) * rest1
        v = v * beta2 + g * g * rest2
        update = tl.div_rn(m, tl.sqrt_rn(v) * _load_float(row, 9) + eps)
        p = p * _load_float(row, 10) - update * _load_float(row, 8)
        if ROUND:
            group = tl.load(row + 7) + block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
            ids = tl.load(row + 6)
            tensor, step = ids.to(tl.uint32), (ids >> 32).to(tl.uint32)
            seed = tl.load(row + 11)
            w0, w1, w2, w3 = philox(
                group.to(tl.uint32),
                tensor,
                step,
                (group >> 32).to(tl.uint32),
                seed.to(tl.uint32),
                (seed >> 32).to(tl.uint32),
                ROUNDS,
            )
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK // 2])
            bits = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BLOCK])
            tl.store(weight + at, _bf16(p, bits), mask=inside)
            tl.store(first_moment + at, _bf16(m, (bits * 0x9E37 + 0x79B9) & 0xFFFF), mask=inside)
            tl.store(second_moment + at, _bf16(v, (bits * 0x85EB + 0xCA6B) & 0xFFFF), mask=inside)
        else:
            tl.store(weight + at, p.to(WEIGHT), mask=inside)
            tl.store(first_moment + at, m.to(WEIGHT), mask=inside)
            tl.store(second_moment + at, v.to(WEIGHT), mask=inside)


def adamw_triton(jobs: Sequence[Job], factor: Tensor, seed: int | None = 0, block: int = BLOCK) -> None:
    """One launch for all tensors with the same dtypes, betas and eps (learning rate and decay may differ).

    ``block`` elements a program, a power of two from 256 on; the results do not depend on it.
    """
    together: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        h = job.hyper
        together.setdefault((job.weight.dtype, job.grad.dtype, h.beta1, h.beta2, h.eps), []).append(job)
    for same in together.values():
        _launch(same, factor, seed, block)


def _launch(jobs: list[Job], factor: Tensor, seed: int | None, block: int) -> None:
    first, device = jobs[0], jobs[0].weight.device
    counts = [triton.cdiv(job.weight.numel(), block) for job in jobs]
    starts = [sum(counts[:i]) for i in range(len(jobs))]
    rows = [_row(job, start, seed or 0) for job, start in zip(jobs, starts, strict=True)]
    # Pinned, so that nothing waits; torch's allocator keeps the host memory until the copy has happened.
    table = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    aligned = all(row[i] % 16 == 0 for row in rows for i in range(4)) and all(row[4] % 8 == 0 for row in rows)
    h = first.hyper
    _kernel[(sum(counts),)](
        table, _block_map(tuple(counts), device), factor, h.beta2, 1 - h.beta1, 1 - h.beta2, h.eps,
        WEIGHT=_TRITON[first.weight.dtype], GRAD=_TRITON[first.grad.dtype],
        ROUND=first.weight.dtype == torch.bfloat16 and seed is not None, ROUNDS=ROUNDS, ALIGNED=aligned,
        BLOCK=block, num_warps=block // 256, enable_fp_fusion=False,  # every operation rounds, as the reference does
    )  # fmt: skip
    for job in jobs:  # autograd must notice a tensor that it saved and that has changed under it
        torch.autograd.graph.increment_version(job.weight)


def _row(job: Job, first_block: int, seed: int) -> list[int]:
    """Four addresses, count, first block, step and tensor id, first group of eight, three fp32 as
    their bits, seed."""
    tensors = (job.weight, job.grad, job.exp_avg, job.exp_avg_sq)
    for x in tensors:
        if not x.is_contiguous() or x.numel() != job.weight.numel():
            raise ValueError(f"shards must be contiguous and of one size, not {[tuple(t.shape) for t in tensors]}")
    ids = (job.step & 0x7FFFFFFF) << 32 | job.tensor
    bits = _constant_bits(job.hyper, job.step)
    return [*(x.data_ptr() for x in tensors), job.weight.numel(), first_block, ids, job.first // 8, *bits, seed]


@functools.lru_cache(maxsize=64)
def _constant_bits(hyper: Hyper, step: int) -> tuple[int, int, int]:
    return struct.unpack("<3i", struct.pack("<3f", *constants(hyper, step)))  # type: ignore[return-value]


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
_maps: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _block_map(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """The tensor that each block belongs to, int32; made once for each set of sizes."""
    key = (counts, device)
    if key not in _maps:
        index = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
        _maps[key] = index.to(device)
    return _maps[key]
