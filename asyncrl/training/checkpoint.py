"""Checkpoints: ``<run>/checkpoints/step_000020/``.

====================================  ===================================================================
``hf/``                               weights, config and tokenizer, as transformers and vLLM load them
``adapter/``                          instead of ``hf`` if adapters are trained: a PEFT folder; ``state`` then holds
                                      adapters alone, and the manifest the fingerprint of the weights beside them
``state/rank_00000.safetensors``      that rank's blocks of master weights and optimizer state, by HF name
``state/rank_00000.json``             where each block lies in its tensor; random number generators of the rank
``manifest.json``                     mode, version, position in the data, the run's and the model's config, git
                                      revision, every tensor's dtype and shape, size and SHA-256 of every file
====================================  ===================================================================

Saving: training waits only for the copy of this rank's blocks to host memory (``time/checkpoint_hold_s``). A thread
writes it under a temporary name and fsyncs; rank 0 renames the folder once every rank has written (``saver.py``). The
``hf`` folder is made by those threads from the written blocks. Of ranks that hold the same block one writes it.

Loading: a block is a range along every dimension, so any number of ranks on any mesh can load what any other wrote;
each reads only what it needs. Everything is checked and read before the first weight of the trainer changes. Random
number generators are restored if the number of ranks is the same; the trainer draws no random numbers, so that a change
of ranks does not change the run.

Why not ``torch.distributed.checkpoint`` (read in torch 2.13): its file-system writer pickles its metadata, its
safetensors writer builds a rank's whole file in memory once more and keeps no checksums, and both exchange their plans
between ranks as pickled objects. What is left of it would be the planning of blocks, which is ``blocks.py`` and
``StoredState.read``. Here nothing is pickled, neither on disk nor between ranks.

Failure: the error of any rank makes all ranks raise :class:`CheckpointError`; the previous checkpoint stays valid.
A damaged checkpoint is an error, never a warning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.config.files import to_dict
from asyncrl.config.revision import git_revision
from asyncrl.training import export
from asyncrl.training.adapter import AdapterExport
from asyncrl.training.agreement import Agreement
from asyncrl.training.errors import CheckpointError
from asyncrl.training.export import ModelExport
from asyncrl.training.files import fresh, numbered, publish, seal, sweep, temporary, write_json
from asyncrl.training.keeping import BEST_LINK, Keep, tidy
from asyncrl.training.saver import Job
from asyncrl.training.snapshot import Snapshot, take
from asyncrl.training.stored import StoredState, describe_specs, state_file
from asyncrl.training.tensor_files import write_tensors

if TYPE_CHECKING:
    from asyncrl.training.step import Trainer

PREFIX = "step_"
FORMAT = 2


def begin(
    trainer: Trainer,
    root: Path,
    keep: Keep,
    position: dict[str, Any] | None = None,
    on_saved: Callable[[Path], None] = lambda path: None,
    on_failed: Callable[[CheckpointError], None] = lambda error: None,
) -> None:
    """Collective. Copies the trainer's state and has it written as ``root/step_<version>``; older ones go by ``keep``.

    ``position``: where in its data the run is. One of ``on_saved`` and ``on_failed`` is called on every rank, from the
    saver's thread, once the checkpoint is complete or has failed. ``trainer.saves.wait()`` raises what failed.
    """

    def job() -> Job:
        write = _plan(trainer, root, keep, position or {})
        return Job(f"write checkpoint {write.final}", write, on_saved, on_failed)

    trainer.saves.begin(job)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint in ``root``, or None."""
    found = numbered(root, PREFIX)
    return found[-1] if found else None


def preferred(root: Path) -> Path | None:
    """The best checkpoint in ``root`` if one is kept for that, else the newest; None if there is none."""
    best = root / BEST_LINK
    return best.resolve() if best.exists() else latest(root)


def _plan(trainer: Trainer, root: Path, keep: Keep, position: dict[str, Any]) -> Write:
    cfg, mesh = trainer.cfg, trainer.mesh
    snapshot = take(trainer, trainer.saves.memory)
    facts = {
        "format": FORMAT,
        "mode": cfg.mode,
        "version": snapshot.version,
        "ranks": mesh.world_size,
        "skipped": snapshot.skipped,
        "torch": torch.__version__,
        "config": to_dict(cfg),
        "data": {"source": trainer.data, "position": {"batches": snapshot.version, **position}},
        "tensors": describe_specs(snapshot.whole),
        "optimizer": snapshot.scalars,
        "update": snapshot.update,
        "adapter": trainer.policy.adapters.facts if trainer.policy.adapters else None,
    }
    return Write(
        root, root / f"{PREFIX}{snapshot.version:06d}", keep, snapshot, facts, Path(cfg.model.path), export_of(trainer)
    )


def export_of(trainer: Trainer) -> ModelExport | AdapterExport:
    """What a checkpoint holds for other programs, in the sub-folder ``folder`` of it."""
    cfg, policy = trainer.cfg, trainer.policy
    if policy.adapters is not None:
        return AdapterExport.of(policy, cfg)
    return ModelExport(Path(cfg.model.path), cfg.checkpoint.hf_dtype, export.names_of(policy.lm))


@dataclass
class Write:
    """One checkpoint on its way to the disk. Calling it is a collective of the savers' threads."""

    root: Path
    final: Path
    keep: Keep
    snapshot: Snapshot
    facts: dict[str, Any]
    source: Path  # of the model
    exported: ModelExport | AdapterExport
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # written by this rank

    def __call__(self, agreement: Agreement) -> Path:
        """Returns the complete folder. Raises :class:`CheckpointError` on every rank if any could not do its part."""
        self.folder, self.rank, self.ranks = temporary(self.final), agreement.rank, agreement.world_size
        stages = (("prepare", self.prepare), ("write", self.write), ("export", self.export), ("finish", self.finish))
        for name, action in stages:
            try:
                agreement.together(f"{name} checkpoint {self.final}", action)
            except CheckpointError:
                self.snapshot.copies.release()
                if self.rank == 0:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise
        return self.final

    def prepare(self) -> None:
        """What the export needs from the model's source; rank 0 makes the folder."""
        self.exported.prepare(self.snapshot.weights)
        self.facts["model"] = json.loads((self.source / "config.json").read_text())
        if self.rank == 0:
            sweep(self.root, PREFIX)
            fresh(self.folder)
            (self.folder / self.exported.folder).mkdir()
            (self.folder / "state").mkdir()

    def write(self) -> None:
        """This rank's blocks."""
        if not (self.folder / "state").is_dir():
            raise CheckpointError(
                f"{self.folder}, made by rank 0, is not there: all ranks have to share the run's folder"
            )
        snapshot, path = self.snapshot, f"state/{state_file(self.rank)}"
        specs = {key: (t.dtype, tuple(t.shape)) for key, t in snapshot.copies.tensors.items()}
        tensors = self.folder / f"{path}.safetensors"
        self.files[f"{path}.safetensors"] = write_tensors(tensors, specs, snapshot.copies.tensors.__getitem__)
        blocks = {key: {"start": list(b.start), "size": list(b.size)} for key, b in snapshot.blocks.items()}
        table = {"blocks": blocks, "generators": snapshot.generators}
        self.files[f"{path}.json"] = write_json(self.folder / f"{path}.json", table)
        snapshot.copies.release()

    def export(self) -> None:
        """This rank's part of the folder for other programs, from what all ranks have written."""
        folder, weights = self.exported.folder, self.snapshot.weights
        stored = StoredState(self.folder / "state", self.ranks)

        def read(name: str) -> Tensor:
            return stored.read_whole(f"weight/{name}", weights[name])

        written = self.exported.write(self.folder / folder, weights, read, self.rank, self.ranks)
        self.files |= {f"{folder}/{name}": told for name, told in written.items()}
        write_json(self.folder / f".files_{self.rank:05d}.json", self.files)

    def finish(self) -> None:
        """Rank 0 describes the folder, names it, and removes older ones."""
        if self.rank != 0:
            return
        listed: dict[str, dict[str, Any]] = {}
        for rank in range(self.ranks):
            path = self.folder / f".files_{rank:05d}.json"
            listed |= json.loads(path.read_text())
            path.unlink()
        seal(self.folder, listed, {**self.facts, "git": git_revision()})
        publish(self.folder, self.final)
        tidy(self.root, PREFIX, self.keep)
