"""The state of a rank, copied to host memory: what a checkpoint is written from while training changes the original."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from asyncrl.training.blocks import block_of, replica_of
from asyncrl.training.errors import CheckpointError
from asyncrl.training.generators import get_generators
from asyncrl.training.host_memory import Copies, HostMemory
from asyncrl.training.sharding import local
from asyncrl.training.tensor_files import NAMES, Spec
from asyncrl.weights.gather import Block

if TYPE_CHECKING:
    from asyncrl.training.step import Trainer

WEIGHT = "weight"


@dataclass
class Part:
    """A tensor of the state as this rank holds it. ``key``: ``weight/NAME``, ``exp_avg/NAME``, ... by HF name."""

    key: str
    whole: Spec  # dtype and shape of the whole tensor
    block: Block
    live: Tensor  # shares the storage of the parameter or of the optimizer's state
    written_here: bool  # of the ranks that hold the same block one writes it


@dataclass
class Snapshot:
    """``copies``, ``blocks`` and ``generators`` are this rank's own, everything else is equal on all ranks."""

    version: int
    skipped: dict[str, int]
    copies: Copies
    blocks: dict[str, Block]
    generators: dict[str, Any]
    whole: dict[str, Spec]
    scalars: dict[str, dict[str, float]]  # name -> the optimizer's numbers, such as its step
    update: dict[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, Spec]:
        """HF name -> dtype and shape, in model order."""
        names = (key.partition("/") for key in self.whole)
        return {name: self.whole[f"{kind}/{name}"] for kind, _, name in names if kind == WEIGHT}


def parts(trainer: Trainer) -> Iterator[Part]:
    """Weights and optimizer state, in model order, the same keys on every rank.

    Raises :class:`CheckpointError` for state that has neither its parameter's shape nor is one number.
    """
    mesh = trainer.mesh
    for index, (name, p) in enumerate(trainer.named_parameters_hf()):
        block = block_of(name, p)
        number, count = replica_of(p, mesh.rank, mesh.world_size)
        here = bool(block.numel) and number == index % count
        live: dict[str, Tensor] = {WEIGHT: local(p.detach())}
        for kind, value in trainer.optimizer.state.get(p, {}).items():
            held = local(value) if isinstance(value, Tensor) else None
            if held is None or (held.ndim and held.shape != live[WEIGHT].shape):
                raise CheckpointError(f"optimizer state {kind!r} of {name} cannot be saved: {type(value).__name__}")
            if held.ndim or not p.ndim:
                live[kind] = held
        for kind, held in live.items():
            if kind == "step":
                continue
            if held.dtype not in NAMES:
                raise CheckpointError(f"{kind} of {name} has dtype {held.dtype}, which cannot be saved")
            yield Part(f"{kind}/{name}", (held.dtype, tuple(p.shape)), block, held, here)


def take(trainer: Trainer, memory: HostMemory) -> Snapshot:
    """Copies what this rank is to write into ``memory``; when it returns, training may change everything."""
    reshard(trainer.policy)
    found = list(parts(trainer))
    mine = [part for part in found if part.written_here]
    copies = memory.copy({part.key: part.live for part in mine})
    return Snapshot(
        version=trainer.version,
        skipped=dict(trainer.skipped),
        copies=copies,
        blocks={part.key: part.block for part in mine},
        generators=get_generators(trainer.mesh.device),
        whole={part.key: part.whole for part in found},
        scalars=_scalars(trainer),
        update=trainer.update_state(),
    )


def reshard(policy: nn.Module) -> None:
    """Has FSDP2 hold shards again: after a forward without backward the root unit stays gathered, and the parameters
    that the module then shows are not those that the optimizer knows."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _scalars(trainer: Trainer) -> dict[str, dict[str, float]]:
    """The optimizer's numbers, read from the device at once."""
    places, values = [], []
    for name, p in trainer.named_parameters_hf():
        for kind, value in trainer.optimizer.state.get(p, {}).items():
            if kind == "step" or (not value.ndim and p.ndim):
                places.append((name, kind))
                values.append(local(value).detach().to(trainer.mesh.device, torch.float64).reshape(()))
    out: dict[str, dict[str, float]] = {}
    for (name, kind), number in zip(places, torch.stack(values).tolist() if values else [], strict=True):
        out.setdefault(name, {})[kind] = number
    return out
