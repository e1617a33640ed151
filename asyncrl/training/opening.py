"""From a configuration to the trainer of one rank, at its last checkpoint when the run is resumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.lora import held_dtype
from asyncrl.config.schema import Config
from asyncrl.training.errors import CheckpointError
from asyncrl.training.loading import empty_policy
from asyncrl.training.mesh import needed_backend, open_mesh
from asyncrl.training.model import DTYPES, load_policy
from asyncrl.training.sharding import shards
from asyncrl.training.step import Trainer

T = TypeVar("T", bound=Trainer)


def build_trainer(
    cfg: Config,
    rank: int,
    world_size: int,
    device: torch.device | None = None,
    kind: type[T] = Trainer,  # type: ignore[assignment]
) -> T:
    """Loads ``cfg.model.path`` and builds this rank's trainer.

    With more than one rank, or weights that are not computed with in their own dtype, ``torch.distributed`` must be
    initialised before.
    """
    if cfg.model.compute_dtype not in DTYPES or cfg.trainer.master_dtype not in DTYPES:
        raise ValueError(f"model.compute_dtype and trainer.master_dtype must be one of {', '.join(DTYPES)}")
    mesh = open_mesh(rank, world_size, device, cfg.parallel)
    if mesh.device.type == "cpu":
        torch.set_num_threads(cfg.trainer.threads)
    load = empty_policy if shards(cfg, mesh) else load_policy
    return kind(cfg, load(cfg.model.path, DTYPES[held_dtype(cfg)], cfg.trainer.logprob_chunk), mesh)


def open_trainer(
    cfg: Config,
    context: RunContext,
    kind: type[T],
    data: dict[str, Any] | None = None,
    prepare: Callable[[T], None] = lambda trainer: None,
) -> T:
    """Collective. The trainer of a run's rank; makes the process groups that are needed.

    ``data``: see ``Trainer.data``. ``prepare`` gets the trainer with the weights that the run starts from, which a
    resumed run replaces afterwards. Raises ``RunFailed`` on every rank if its checkpoint is damaged or does not fit.
    """
    if backend := needed_backend(cfg, context.world_size):
        context.init_process_group(backend)
    trainer = build_trainer(cfg, context.rank, context.world_size, kind=kind)
    trainer.data = data or {}
    trainer.saves.open()
    prepare(trainer)
    if cfg.resume:
        try:
            trainer.load_latest(context.run_dir / "checkpoints")
        except CheckpointError as error:
            raise RunFailed(str(error)) from None  # it says which file; where in the code that was found helps nobody
    return trainer
