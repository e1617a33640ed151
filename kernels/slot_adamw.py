"""Clipping and AdamW of many adapters, each by its own numbers, over flat buffers that hold them slot by slot.

For each slot, as ``torch.nn.utils.clip_grad_norm_`` and ``torch.optim.AdamW`` do for it alone (Loshchilov & Hutter,
arXiv 1711.05101, algorithm 2), with g the gradient times ``grad_scale``:

    g <- g min(1, clip / (|g| + 1e-6))        t <- t + 1
    p <- p (1 - lr wd)        m <- m + (1 - b1)(g - m)        v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

A slot that is not active is not touched. One whose norm is not finite, or that was said not to be, is skipped and
counted. No number of one slot enters another's, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class SlotBuffers:
    """Flat (P,) buffers with slot i at ``bounds[i]:bounds[i + 1]``.

    ``master``, ``exp_avg`` and ``exp_avg_sq`` are fp32 or float64, as ``grad`` is. ``weight``: what the kernels read,
    ``master`` itself or a copy in their dtype.
    """

    bounds: tuple[int, ...]
    weight: Tensor
    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True)
class SlotHyper:
    """One number a slot, all (S,): float64 but for ``step`` and ``skipped`` (int64), ``active`` and ``finite`` (bool).

    ``clip`` inf clips nothing. ``step`` counts the steps done and ``skipped`` those that were not; both are updated.
    ``finite``: what is known beforehand, of the loss say. ``grad_scale``: what gradients are multiplied by first.
    """

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    clip: Tensor
    grad_scale: Tensor
    step: Tensor
    skipped: Tensor
    active: Tensor
    finite: Tensor


@torch.no_grad()
def slot_adamw(buffers: SlotBuffers, hyper: SlotHyper) -> tuple[Tensor, Tensor]:
    """One step of every active slot, in place.

    Returns the norms (S,) of the scaled gradients before clipping, and which slots stepped (S,). Raises ``ValueError``
    for buffers whose sizes or dtypes do not fit.
    """
    _check(buffers, hyper)
    squares = torch.stack([g.square().sum(dtype=torch.float64) for g in _parts(buffers, buffers.grad)])
    norm = squares.sqrt() * hyper.grad_scale.abs()
    finite = hyper.finite & norm.isfinite()
    steps = hyper.active & finite
    hyper.step.add_(steps)
    hyper.skipped.add_(hyper.active & ~finite)
    factor = hyper.grad_scale * (hyper.clip / (norm + 1e-6)).clamp(max=1.0)
    t = hyper.step.double()
    step_size = hyper.lr / (1 - hyper.beta1**t)
    root = (1 - hyper.beta2**t).rsqrt()
    decay = 1 - hyper.lr * hyper.weight_decay
    vectors = [x.to(buffers.grad.dtype) for x in (factor, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2)]
    vectors += [x.to(buffers.grad.dtype) for x in (step_size, root, decay, hyper.eps)]
    states = (buffers.master, buffers.grad, buffers.exp_avg, buffers.exp_avg_sq)
    for slot, parts in enumerate(zip(*(_parts(buffers, x) for x in states), strict=True)):
        p, g, m, v = parts
        scale, rest1, beta2, rest2, size, rooted, keep, eps = (x[slot] for x in vectors)
        g = g * scale
        new_m = m + (g - m) * rest1
        new_v = v * beta2 + g * g * rest2
        new_p = p * keep - new_m / (new_v.sqrt() * rooted + eps) * size
        for old, new in ((p, new_p), (m, new_m), (v, new_v)):
            old.copy_(torch.where(steps[slot], new, old))
    if buffers.weight is not buffers.master:
        buffers.weight.copy_(buffers.master)
    return norm, steps


def _parts(buffers: SlotBuffers, flat: Tensor) -> Iterator[Tensor]:
    return (flat[a:b] for a, b in pairwise(buffers.bounds))


def _check(buffers: SlotBuffers, hyper: SlotHyper) -> None:
    size, slots = buffers.bounds[-1], len(buffers.bounds) - 1
    if list(buffers.bounds) != sorted(buffers.bounds) or buffers.bounds[0] != 0:
        raise ValueError(f"bounds must rise from 0, are {buffers.bounds}")
    for name in ("weight", "master", "grad", "exp_avg", "exp_avg_sq"):
        flat = getattr(buffers, name)
        if flat.shape != (size,):
            raise ValueError(f"{name} must be ({size},), is {tuple(flat.shape)}")
        if name != "weight" and flat.dtype != buffers.grad.dtype:
            raise ValueError(f"{name} is {flat.dtype} and grad {buffers.grad.dtype}")
    for name, vector in vars(hyper).items():
        if vector.shape != (slots,):
            raise ValueError(f"{name} must be ({slots},), one a slot, is {tuple(vector.shape)}")
