"""From a checkpoint back into a trainer: all of it or nothing.

Everything that can be wrong is found while the trainer is untouched: version of the format, mode, model, data, tensors,
completeness, checksums; then every block is read into memory of its own. Copying it into the trainer cannot fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.training.agreement import Agreement
from asyncrl.training.blocks import block_of
from asyncrl.training.checkpoint import FORMAT
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import read_manifest, verify
from asyncrl.training.generators import set_generators
from asyncrl.training.sharding import local
from asyncrl.training.snapshot import WEIGHT, reshard
from asyncrl.training.stored import StoredState, by_name, parse_specs
from asyncrl.training.tensor_files import NAMES, Spec

if TYPE_CHECKING:
    from asyncrl.training.step import Trainer

# Keys of a model's config.json that say nothing about its tensors or its function.
NOT_COMPARED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


def load(trainer: Trainer, folder: Path) -> None:
    """Collective. Restores weights, optimizer, version, counters and, with equal ranks, generators.

    Raises :class:`CheckpointError` on every rank if a file is missing or damaged, or if it is the checkpoint of another
    mode, model, data set or format; then the trainer is as it was.
    """
    mesh = trainer.mesh
    reshard(trainer.policy)
    agreement = Agreement(mesh.rank, mesh.world_size, mesh.control)
    manifest: dict[str, Any] = {}
    staged: dict[str, Tensor] = {}

    def check() -> None:
        manifest.update(read_manifest(folder))
        check_fits(trainer, folder, manifest)
        names = sorted(manifest["files"])
        verify(folder, names[mesh.rank :: mesh.world_size])

    def read() -> None:
        stored = StoredState(folder / "state", manifest["ranks"])
        whole = parse_specs(manifest["tensors"])
        stored.check_complete(whole)
        kinds = by_name(whole)
        for name, p in trainer.named_parameters_hf():
            block = block_of(name, p)
            for key in (f"{kind}/{name}" for kind in kinds[name]):
                staged[key] = stored.read(key, whole[key][0], block)
        manifest["generators"] = stored.tables[mesh.rank]["generators"] if manifest["ranks"] == mesh.world_size else {}

    agreement.together(f"verify checkpoint {folder}", check)
    agreement.together(f"load checkpoint {folder}", read)
    _install(trainer, manifest, staged)


def check_fits(trainer: Trainer, folder: Path, manifest: dict[str, Any]) -> None:
    """Raises :class:`CheckpointError` naming the first thing in which the checkpoint is not one of this trainer."""
    adapted = manifest.get("adapter") is not None
    use = "To start a new run from " + (
        f"its adapter: model.adapter={folder}/adapter" if adapted else f"its weights: model.path={folder}/hf"
    )
    cfg = trainer.cfg
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.get('format')}, this version of asyncrl reads {FORMAT}. {use}"
        )
    if manifest["mode"] != cfg.mode:
        raise CheckpointError(f"{folder} is a checkpoint of mode {manifest['mode']}, this run's is {cfg.mode}. {use}")
    model = json.loads((Path(cfg.model.path) / "config.json").read_text())
    if odd := differences(manifest["model"], model):
        raise CheckpointError(f"{folder} is of another model than {cfg.model.path}: its config.json had {odd}. {use}")
    _check_adapter(trainer, folder, manifest.get("adapter"), use)
    source = manifest["data"]["source"]
    if trainer.data and (odd := differences(source, trainer.data)):
        raise CheckpointError(f"{folder} counts its position in other data: it had {odd}. {use}")
    _check_tensors(trainer, folder, parse_specs(manifest["tensors"]))


def _check_adapter(trainer: Trainer, folder: Path, stored: dict[str, Any] | None, use: str) -> None:
    adapters = trainer.policy.adapters
    if (stored is None) != (adapters is None):
        had, has = ("all weights", "adapters") if stored is None else ("adapters", "all weights")
        raise CheckpointError(f"{folder} is of a run that trained {had}, and this one trains {has}. {use}")
    if stored is None or adapters is None:
        return
    if stored["base"] != adapters.base:
        raise CheckpointError(
            f"{folder} holds adapters of other weights than those in {trainer.cfg.model.path}: fingerprint "
            f"{stored['base'][:12]}, now {adapters.base[:12]}. Give the model.path that the run began with"
        )
    if odd := differences(stored, adapters.facts):
        raise CheckpointError(f"{folder} holds adapters of other settings (lora): it had {odd}. {use}")


def differences(old: dict[str, Any], new: dict[str, Any], most: int = 4) -> str:
    """The first keys with different values, as a reader of an error wants them; empty if there are none."""
    keys = sorted(k for k in old.keys() | new.keys() if k not in NOT_COMPARED and old.get(k) != new.get(k))
    return "; ".join(f"{k}={old.get(k)!r}, now {new.get(k)!r}" for k in keys[:most])


def _check_tensors(trainer: Trainer, folder: Path, whole: dict[str, Spec]) -> None:
    stored = by_name(whole)
    here = dict(trainer.named_parameters_hf())
    if here.keys() != stored.keys():
        odd = sorted(here.keys() ^ stored.keys())
        raise CheckpointError(f"{folder} holds another model: {odd[:4]} are in only one of the two")
    for name, p in here.items():
        if WEIGHT not in stored[name]:
            raise CheckpointError(f"{folder} has no weights of {name}")
        if other := sorted(set(stored[name]) - {WEIGHT, *trainer.moments}):
            wanted = ", ".join(trainer.moments)
            raise CheckpointError(
                f"{folder} has state of another optimizer: {other} of {name}; this run's keeps {wanted}"
            )
        for kind in stored[name]:
            dtype, shape = whole[f"{kind}/{name}"]
            if shape != tuple(p.shape):
                raise CheckpointError(
                    f"{folder}: {kind}/{name} has shape {list(shape)}, the model's is {list(p.shape)}"
                )
            if kind == WEIGHT and dtype != p.dtype:
                held = f"is {NAMES[dtype]}, the trainer's {NAMES[p.dtype]}"
                raise CheckpointError(f"{folder}: trainer.master_dtype differs: {kind}/{name} {held}")


@torch.no_grad()
def _install(trainer: Trainer, manifest: dict[str, Any], staged: dict[str, Tensor]) -> None:
    stored = by_name(staged)
    for name, p in trainer.named_parameters_hf():
        kinds = stored[name]
        local(p).copy_(staged[f"{WEIGHT}/{name}"])
        numbers = manifest["optimizer"].get(name, {})
        trainer.optimizer.state.pop(p, None)
        if not numbers and kinds == [WEIGHT]:
            continue
        state = trainer.optimizer.state[p]
        for kind, number in numbers.items():
            state[kind] = torch.tensor(number, dtype=torch.float32, device=local(p).device)
        for kind in kinds:
            if kind != WEIGHT:
                tensor = staged[f"{kind}/{name}"]
                state[kind] = torch.zeros_like(p, dtype=tensor.dtype)
                local(state[kind]).copy_(tensor)
    trainer.version = manifest["version"]
    trainer.position = manifest["data"]["position"]
    trainer.skipped.clear()
    trainer.skipped.update(manifest["skipped"])
    trainer.load_update_state(manifest["update"])
    if manifest["generators"]:
        set_generators(manifest["generators"], trainer.mesh.device)
