"""Trainers that step in the backward pass and after it, to compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import Config
from asyncrl.training.mesh import Mesh, open_mesh
from asyncrl.training.model import Policy, layers, prepare
from asyncrl.training.step import Trainer
from tests.training.tiny import make_samples, tiny_lm, tiny_run

# A clip norm below the gradients' (about 5), so that the scale of the loss and the guard are both at work.
CLIPPED = {"clip_norm": 0.5, "clip_guard": 2.0, "weight_decay": 0.1, "warmup_steps": 3, "schedule": "cosine"}


class Lora(nn.Module):
    """A linear layer with a trained product of two small matrices beside it; B does not start at zero."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        generator = torch.Generator().manual_seed(base.in_features)
        self.a = nn.Parameter(0.1 * torch.randn(rank, base.in_features, generator=generator))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, rank, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def lora(policy: Policy) -> None:
    policy.requires_grad_(False)
    for layer in layers(policy.lm):
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)


def frozen(policy: Policy) -> None:
    """The embedding, all norms and the first layer."""
    policy.lm.get_input_embeddings().requires_grad_(False)
    layers(policy.lm)[0].requires_grad_(False)
    for name, p in policy.named_parameters():
        if "norm" in name:
            p.requires_grad_(False)


def compiled(policy: Policy, backend: str = "aot_eager") -> None:
    for layer in layers(policy.lm):
        layer.compile(backend=backend)


def trainer(
    path: str,
    dtype: str = "float32",
    tied: bool = True,
    change: Callable[[Policy], None] | None = None,
    mesh: Mesh | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
    **optim: Any,
) -> Trainer:
    """On a tiny model that ``change`` may alter before it is sharded."""
    torch.set_num_threads(1)  # as build_trainer does; two threads on two busy cores wait for each other
    defaults = {"trainer": {"steps": 9}, "report": {"noise_floor_every": 0}}
    cfg: Config = tiny_run(path, dtype, **{**defaults, **(sections or {})}, optim=CLIPPED | optim)
    master = getattr(torch, dtype)
    policy = prepare(tiny_lm(tied).to(master), master)
    if change is not None:
        change(policy)
    return Trainer(cfg, policy, mesh or open_mesh(0, 1))


def batches(step: int, rank: int = 0, world: int = 1) -> list[list[Any]]:
    """Three ragged micro-batches of this rank, one of them empty on the last rank."""
    mine = make_samples(groups=4, size=4, seed=step)[rank::world]
    return [mine[:3], [], mine[3:]] if rank == world - 1 else [mine[:2], mine[2:4], mine[4:]]


def run(t: Trainer, first: int, last: int, rank: int = 0, world: int = 1) -> list[dict[str, Any]]:
    """Steps ``first`` to ``last``; their reports without times."""
    reports = [t.step(batches(i, rank, world)) for i in range(first, last)]
    return [{k: v for k, v in vars(r).items() if not k.endswith("_s") and k != "seconds"} for r in reports]


def whole(x: Tensor) -> np.ndarray:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.detach().float().numpy().copy() if x.dtype == torch.bfloat16 else x.detach().numpy().copy()


def everything(t: Trainer) -> dict[str, np.ndarray]:
    """All weights and all optimizer state, by name."""
    found = {}
    for name, p in t.named_parameters_hf():
        found[name] = whole(p)
        for key, value in t.optimizer.state.get(p, {}).items():
            found[f"{name}/{key}"] = whole(value)
    return found


def different(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [k for k in a if not np.array_equal(a[k], b[k])]
