"""Update rules on local shards: what one fused step does with the gradients of one unit.

====================  ==========================================================================================
:class:`AdamWRule`    ``torch.optim.AdamW``; fp32 on a CPU by torch's own fused call, so bit for bit the same
:class:`MomentumRule` heavy ball, m <- b m + g, p <- p - lr m, with decoupled weight decay
:class:`MuonRule`     the same m; hidden matrices move by its orthogonal factor, everything else by its sign
====================  ==========================================================================================

A rule can also take gradients in portions (:meth:`Rule.fold`) and move the weights once (:meth:`Rule.move`). That is
exact for the momentum rules, whose m is linear in the gradient, and it is AdamA (arXiv 2305.19982) for AdamW, whose
second moment then adds sum_i g_i^2 where AdamW has (sum_i g_i)^2.

Every gradient is multiplied by ``factor``, one number on the device of the unit. A negative factor drops the step: a
gradient that is not finite must touch neither weights nor state. On a GPU nothing here waits for the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass
class Slot:
    """One parameter in one step: local shards, its live state and parameter group, its number among all parameters."""

    parameter: nn.Parameter
    weight: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    number: int
    step: int  # of this update, from 1


class Rule(ABC):
    moments: tuple[str, ...]
    defaults: dict[str, Any]

    def start(self, state: dict[str, Any], p: nn.Parameter) -> None:
        """The state of a parameter that has not been updated yet, in the layout of torch's optimizer."""
        state["step"] = torch.zeros((), device=p.device)
        for name in self.moments:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)

    @abstractmethod
    def apply(self, slots: Sequence[Slot], factor: Tensor) -> None:
        """One update by the whole gradient."""

    @abstractmethod
    def fold(self, slots: Sequence[Slot], factor: Tensor, first: bool) -> None:
        """Adds a portion of the gradient to the state; ``first`` of this step ages the state before."""

    @abstractmethod
    def move(self, slots: Sequence[Slot], alive: Tensor) -> None:
        """Moves the weights by the state; not if ``alive`` is 0."""


class AdamWRule(Rule):
    """``seed`` keys the rounding of bf16 weights, see :mod:`kernels.adamw`."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._first: dict[int, int] = {}  # parameter number -> place of its shard
        self.defaults = dict(torch.optim.AdamW([torch.zeros(())], fused=True).defaults)

    def apply(self, slots: Sequence[Slot], factor: Tensor) -> None:
        for (dtype, on_gpu), same in _by(slots, lambda s: (s.weight.dtype, s.weight.is_cuda)):
            ours = dtype == torch.bfloat16 or (on_gpu and dtype == torch.float32)
            (self._kernel if ours else self._torch)(same, factor)

    def _kernel(self, slots: Sequence[Slot], factor: Tensor) -> None:
        from kernels.adamw import Hyper, Job, adamw

        alive = (factor >= 0).to(slots[0].state["step"].dtype)
        torch._foreach_add_([s.state["step"] for s in slots], alive)
        jobs = []
        for s in slots:
            g = s.group
            beta1, beta2 = g["betas"]
            hyper = Hyper(float(g["lr"]), beta1, beta2, g["eps"], g["weight_decay"])
            m, v = (local_shard(s.state[name]) for name in self.moments)
            if s.number not in self._first:
                self._first[s.number] = first_element(s.parameter)
            jobs.append(Job(s.weight, s.grad.contiguous(), m, v, s.step, hyper, s.number, self._first[s.number]))
        adamw(jobs, factor.to(torch.float32), self.seed)

    def _torch(self, slots: Sequence[Slot], factor: Tensor) -> None:
        scale = float(factor)
        if not scale >= 0:
            return
        if scale != 1.0:
            torch._foreach_mul_([s.grad for s in slots], scale)
        for _, same in _by(slots, lambda s: id(s.group)):
            torch._foreach_add_([s.state["step"] for s in same], 1)
            full = [s for s in same if s.weight.numel()]
            if not full:
                continue
            group = full[0].group
            first, second = ([local_shard(s.state[name]) for s in full] for name in self.moments)
            torch._fused_adamw_(
                [s.weight for s in full],
                [s.grad for s in full],
                first,
                second,
                [],
                [s.state["step"] for s in full],
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def fold(self, slots: Sequence[Slot], factor: Tensor, first: bool) -> None:
        grads = usable(slots, factor)
        for s, grad in zip(slots, grads, strict=True):
            beta1, beta2 = s.group["betas"]
            m, v = (local_shard(s.state[name]) for name in self.moments)
            if first:
                m.mul_(beta1)
                v.mul_(beta2)
            m.add_(grad, alpha=1 - beta1)
            v.addcmul_(grad, grad, value=1 - beta2)

    def move(self, slots: Sequence[Slot], alive: Tensor) -> None:
        if not _on_gpu(slots) and not alive:
            return
        torch._foreach_add_([s.state["step"] for s in slots], alive.to(slots[0].state["step"].dtype))
        for s in slots:
            g, (beta1, beta2) = s.group, s.group["betas"]
            m, v = (local_shard(s.state[name]) for name in self.moments)
            moved = m / ((v / (1 - beta2**s.step)).sqrt_().add_(g["eps"]))
            _move(s, moved, g["lr"] / (1 - beta1**s.step), alive)


class MomentumRule(Rule):
    moments = ("momentum_buffer",)

    def __init__(self) -> None:
        self.defaults = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.0}

    def apply(self, slots: Sequence[Slot], factor: Tensor) -> None:
        alive = factor >= 0
        self._age(slots, alive)
        self._add(slots, factor)
        self.move(slots, alive)

    def fold(self, slots: Sequence[Slot], factor: Tensor, first: bool) -> None:
        if first:
            self._age(slots, torch.ones_like(factor))
        self._add(slots, factor)

    def _age(self, slots: Sequence[Slot], alive: Tensor) -> None:
        """m <- b m, unless the step is dropped."""
        for s in slots:
            m, b = local_shard(s.state["momentum_buffer"]), s.group["momentum"]
            if m.is_cuda:
                m.mul_(torch.where(alive.bool(), torch.full_like(alive, b, dtype=torch.float64), 1.0))
            elif alive:
                m.mul_(b)

    def _add(self, slots: Sequence[Slot], factor: Tensor) -> None:
        torch._foreach_add_([local_shard(s.state["momentum_buffer"]) for s in slots], usable(slots, factor))

    def move(self, slots: Sequence[Slot], alive: Tensor) -> None:
        if not _on_gpu(slots) and not alive:
            return
        torch._foreach_add_([s.state["step"] for s in slots], alive.to(slots[0].state["step"].dtype))
        for s in slots:
            _move(s, self.direction(s), s.group["lr"], alive)

    def direction(self, s: Slot) -> Tensor:
        return local_shard(s.state["momentum_buffer"])


class MuonRule(MomentumRule):
    """``spectral`` in a parameter group: its matrices move by Newton-Schulz (Jordan et al., 2024), scaled to a root
    mean square of about 0.2 as AdamW's steps have (Liu et al., arXiv 2502.16982); other groups by 0.2 sign(m).
    """

    def __init__(self) -> None:
        super().__init__()
        self.defaults = {**self.defaults, "spectral": False}

    def direction(self, s: Slot) -> Tensor:
        m = s.state["momentum_buffer"]
        if not s.group["spectral"]:
            return 0.2 * local_shard(m).sign()
        whole = m.full_tensor() if isinstance(m, DTensor) else m
        moved = orthogonal_factor(whole) * (0.2 * max(whole.shape) ** 0.5)
        if isinstance(m, DTensor):  # every rank has computed the same: each keeps its part, nothing is sent
            moved = distribute_tensor(moved, m.device_mesh, m.placements, src_data_rank=None)
        return local_shard(moved)


def orthogonal_factor(m: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of m = U S V^T: the quintic iteration of Muon, singular values end between 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.to(torch.bfloat16) if m.is_cuda else m
    x = x.T if m.shape[0] > m.shape[1] else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if m.shape[0] > m.shape[1] else x).to(m.dtype)


def usable(slots: Sequence[Slot], factor: Tensor) -> list[Tensor]:
    """Gradients times ``factor``, zeros if it is negative."""
    grads = [s.grad for s in slots]
    if _on_gpu(slots):
        return [torch.where(factor >= 0, g * factor, 0).to(g.dtype) for g in grads]
    scale = float(factor)
    if not scale >= 0:
        return [torch.zeros_like(g) for g in grads]
    return grads if scale == 1.0 else list(torch._foreach_mul(grads, scale))


def local_shard(x: Tensor) -> Tensor:
    """The part of a tensor that lives on this rank, without dispatch."""
    return x._local_tensor if isinstance(x, DTensor) else x


def first_element(p: Tensor) -> int:
    """Where the random bits of the local shard begin in those of the whole tensor, a multiple of eight."""
    if not isinstance(p, DTensor):
        return 0
    mesh, coordinate = p.device_mesh, p.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank that updates a tensor is part of its mesh"
    return first_of_shard(p.shape, p.placements, mesh.shape, coordinate)


def first_of_shard(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int], coordinate: Sequence[int]
) -> int:
    """The same for the shard at ``coordinate`` of ``mesh``: shards are numbered, and each has the room of the largest.

    So no two elements share their bits, however often and along whatever dimension the tensor is split, and replicas
    draw the same. If rows alone are split, once, in shards of one size that is a multiple of eight elements, they draw
    what the whole tensor would.
    """
    number, largest = 0, list(shape)
    for placement, parts, place in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            number = number * parts + place
            largest[placement.dim] = -(-largest[placement.dim] // parts)
    return number * (-(-math.prod(largest) // 8) * 8)


def _move(s: Slot, direction: Tensor, lr: float, alive: Tensor) -> None:
    """p <- p (1 - lr0 wd) - lr direction, lr0 the group's rate; nothing if ``alive`` is 0."""
    decay = float(s.group["lr"]) * s.group["weight_decay"]
    if s.weight.is_cuda:
        s.weight.mul_(1 - decay * alive.to(s.weight.dtype)).sub_(direction * (lr * alive))
    else:
        s.weight.mul_(1 - decay).sub_(direction, alpha=lr)


def _on_gpu(slots: Sequence[Slot]) -> bool:
    return slots[0].weight.is_cuda


def _by(slots: Iterable[Slot], key: Callable[[Slot], Any]) -> Iterable[tuple[Any, list[Slot]]]:
    """Slots with equal keys together, in the order of their first."""
    found: dict[Any, list[Slot]] = {}
    for s in slots:
        found.setdefault(key(s), []).append(s)
    return found.items()
