"""AdamW on local shards, the learning-rate schedule and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

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


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW. Vectors (norms, biases) are not decayed."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def local_square_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Sum of squares of this rank's gradient shards, a float64 scalar on their device."""
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([n.double() for n in torch._foreach_norm(grads)]).square().sum()


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply gradients by so that their norm is at most ``clip_norm`` (0: no clipping)."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0 else 1.0


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)
