"""AdamW on local shards, the learning-rate schedule and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import OptimConfig
from asyncrl.training.sharding import local


def learning_rate(step: int, total: int, cfg: OptimConfig) -> float:
    """Learning rate of 0-based ``step`` of ``total``: linear warm-up, then constant, linear or cosine decay.

    The first step of a warm-up of n uses lr/n, not zero; the last step reaches ``final_lr_share * lr``. It is a
    function of the step alone, so a resumed run needs no scheduler state.
    """
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    progress = min(1.0, (step - cfg.warmup_steps + 1) / max(1, total - cfg.warmup_steps))
    if cfg.schedule == "linear":
        share = 1.0 - progress
    elif cfg.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"unknown optim.schedule {cfg.schedule!r}; choose constant, linear or cosine")
    return cfg.lr * (cfg.final_lr_share + (1.0 - cfg.final_lr_share) * share)


def parameter_groups(
    parameters: Iterable[nn.Parameter], cfg: OptimConfig, spectral: Set[int] | None = None
) -> list[dict[str, Any]]:
    """Trained parameters: matrices with weight decay, vectors (norms, biases) without.

    ``spectral`` holds the ids of the matrices that muon orthogonalises; they are a group of their own.
    """
    trained = [p for p in parameters if p.requires_grad]
    shared: dict[str, Any] = {"lr": cfg.lr}
    shared |= {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.eps} if cfg.name == "adamw" else {"momentum": cfg.momentum}
    matrices = [p for p in trained if p.ndim >= 2]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in matrices if spectral is None or id(p) not in spectral],
            "weight_decay": cfg.weight_decay,
        },
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if spectral is not None:
        chosen = [p for p in matrices if id(p) in spectral]
        groups.append({"params": chosen, "weight_decay": cfg.weight_decay, "spectral": True})
    return [shared | g for g in groups if g["params"]]


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: OptimConfig) -> torch.optim.AdamW:
    """Torch's fused AdamW, which steps after the backward pass. Vectors (norms, biases) are not decayed."""
    return torch.optim.AdamW(parameter_groups(parameters, cfg), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def replicas(p: Tensor, world: int) -> int:
    """How many of ``world`` ranks hold the same shard of ``p``; a plain tensor is the same on all."""
    if not isinstance(p, DTensor):
        return world
    shards = math.prod(p.device_mesh.size(i) for i, place in enumerate(p.placements) if not place.is_replicate())
    return max(1, world // shards)


@torch.no_grad()
def local_square_norm(grads: Sequence[Tensor], copies: Sequence[int] = ()) -> Tensor:
    """Sum of squares of this rank's gradient shards, a float64 scalar on their device.

    Each is divided by its number of ``copies``, so that the sum over all ranks is the square of the global norm.
    """
    grads = [local(g) for g in grads]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    half = grads[0].dtype == torch.bfloat16  # a norm in bf16 has three digits
    norms = torch._foreach_norm(grads, 2, torch.float32 if half else None)
    held: dict[int, list[Tensor]] = {}
    for norm, count in zip(norms, copies or [1] * len(grads), strict=True):
        held.setdefault(count, []).append(norm)
    squares = [torch.stack(same).double().square().sum() / count for count, same in held.items()]
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most ``clip_norm`` (0: no clipping)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
