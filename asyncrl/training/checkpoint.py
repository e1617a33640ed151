"""Checkpoints: ``<run>/checkpoints/step_000020/``.

====================================  ===================================================================
``hf/``                               weights, config and tokenizer, as transformers and vLLM load them
``state/rank_00000.safetensors``      that rank's shards of master weights and AdamW state, by HF name
``state/rank_00000.json``             where each shard lies in its tensor; random number generators of the rank
``manifest.json``                     version, ranks, skipped steps, size and SHA-256 of every file
====================================  ===================================================================

A shard is a range of rows (FSDP2 shards dimension 0), so any number of ranks can load what any other wrote: each
reads only the slices that it needs. Nothing is pickled. Random number generators are restored if the number of ranks
is the same; the trainer draws no random numbers, so that a change of ranks does not change the run.

Failure: the error of any rank makes all ranks raise :class:`CheckpointError`; the previous checkpoint stays valid.
A damaged checkpoint is an error, never a warning.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.training import export
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import (
    digest,
    fresh,
    numbered,
    publish,
    read_manifest,
    rotate,
    seal,
    sync,
    temporary,
    verify,
    write_json,
)
from asyncrl.training.sharding import local

if TYPE_CHECKING:
    from asyncrl.training.step import Trainer

PREFIX = "step_"
FORMAT = 1
DISK_ERRORS = (OSError, SafetensorError)


def save(trainer: Trainer, root: Path, keep: int) -> Path:
    """Collective. Writes ``root/step_<version>`` and removes all but the ``keep`` newest (0: keeps all).

    Raises :class:`CheckpointError` on every rank if any rank could not write.
    """
    mesh, final = trainer.mesh, root / f"{PREFIX}{trainer.version:06d}"
    folder = temporary(final)
    source = Path(trainer.cfg.model.path)
    dtype = export.export_dtype(source, trainer.cfg.checkpoint.hf_dtype)
    parameters = trainer.named_parameters_hf()
    files = export.plan_files(parameters, dtype)

    def prepare() -> None:
        if mesh.rank == 0:
            fresh(folder)
            (folder / "hf").mkdir()
            (folder / "state").mkdir()

    def write() -> None:
        written = [*_write_state(trainer, folder / "state"), *export.write_weights(folder / "hf", mine, len(files))]
        if mesh.rank == 0:
            written += export.write_rest(folder / "hf", source, parameters, files, dtype)
        listed = {str(p.relative_to(folder)): digest(p) for p in written}
        write_json(folder / f".files_{mesh.rank:05d}.json", listed)

    def finish() -> None:
        if mesh.rank == 0:
            _seal(trainer, folder)
            publish(folder, final)
            rotate(root, PREFIX, keep)

    for name, action in (("prepare", prepare), ("write", write), ("finish", finish)):
        if name == "write":
            mine = export.gather_files(parameters, files, dtype, mesh.rank, mesh.world_size)
        try:
            _together(trainer, f"{name} checkpoint {final}", action)
        except CheckpointError:
            if mesh.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    return final


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint in ``root``, or None."""
    found = numbered(root, PREFIX)
    return found[-1] if found else None


def load(trainer: Trainer, folder: Path) -> None:
    """Collective. Restores weights, optimizer, version, counters and, with equal ranks, generators.

    Raises :class:`CheckpointError` on every rank if a file is missing or damaged or belongs to another model.
    """
    mesh = trainer.mesh

    def check() -> None:
        names = sorted(read_manifest(folder)["files"])
        verify(folder, names[mesh.rank :: mesh.world_size])

    def read() -> None:
        manifest = read_manifest(folder)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder} has checkpoint format {manifest['format']}, this version reads {FORMAT}")
        _read_state(trainer, folder / "state", manifest["ranks"])
        trainer.version = manifest["version"]
        trainer.skipped.clear()
        trainer.skipped.update(manifest["skipped"])
        trainer.load_update_state(manifest.get("update", {}))
        if manifest["ranks"] == mesh.world_size:
            saved = json.loads((folder / "state" / f"rank_{mesh.rank:05d}.json").read_text())
            _set_generators(saved["generators"], mesh.device)

    _together(trainer, f"verify checkpoint {folder}", check)
    _together(trainer, f"load checkpoint {folder}", read)


def _together(trainer: Trainer, what: str, action: Callable[[], None]) -> None:
    """Runs ``action`` on every rank; all raise if one failed, so that none is left waiting for the others."""
    failure: Exception | None = None
    try:
        action()
    except (*DISK_ERRORS, CheckpointError, KeyError) as e:
        failure = e
    failed = trainer.mesh.gather_rows(torch.tensor([failure is not None]))[:, 0]
    if failure is not None:
        raise CheckpointError(f"could not {what}: {failure}") from failure
    if failed.any():
        raise CheckpointError(f"could not {what}: rank {int(failed.nonzero()[0])} failed, see its message")


def _seal(trainer: Trainer, folder: Path) -> None:
    listed: dict[str, dict[str, Any]] = {}
    for rank in range(trainer.mesh.world_size):
        path = folder / f".files_{rank:05d}.json"
        listed |= json.loads(path.read_text())
        path.unlink()
    facts = {
        "format": FORMAT,
        "version": trainer.version,
        "ranks": trainer.mesh.world_size,
        "skipped": dict(trainer.skipped),
        "update": trainer.update_state(),
        "torch": torch.__version__,
    }
    seal(folder, listed, facts)


def _first_row(p: Tensor) -> int:
    """Row of the whole tensor where this rank's shard begins: FSDP2 cuts dimension 0 like ``torch.chunk``."""
    if not isinstance(p, DTensor):
        return 0
    chunk = -(-p.shape[0] // p.device_mesh.size())
    return min(p.device_mesh.get_local_rank() * chunk, p.shape[0])


def _pieces(trainer: Trainer) -> dict[str, tuple[Tensor, Tensor]]:
    """``weight/NAME``, ``exp_avg/NAME``, ``exp_avg_sq/NAME`` -> (local tensor, the parameter it belongs to)."""
    out: dict[str, tuple[Tensor, Tensor]] = {}
    for name, p in trainer.named_parameters_hf():
        out[f"weight/{name}"] = (local(p.detach()), p)
        state = trainer.optimizer.state.get(p, {})
        for moment in trainer.moments:
            if moment in state:
                out[f"{moment}/{name}"] = (local(state[moment]), p)
    return out


def _write_state(trainer: Trainer, folder: Path) -> list[Path]:
    mesh = trainer.mesh
    # Without FSDP2 every rank holds everything, and rank 0 alone writes it.
    writes = trainer.sharded or mesh.rank == 0
    pieces = _pieces(trainer) if writes else {}
    tensors = {k: t.cpu().contiguous() for k, (t, _) in pieces.items()}
    where = {k: {"first_row": _first_row(p), "shape": list(p.shape)} for k, (_, p) in pieces.items()}
    steps = {n: float(s["step"]) for n, p in trainer.named_parameters_hf() if (s := trainer.optimizer.state.get(p))}
    path = folder / f"rank_{mesh.rank:05d}"
    save_file(tensors, path.with_suffix(".safetensors"))
    sync(path.with_suffix(".safetensors"))
    write_json(
        path.with_suffix(".json"),
        {"shards": where, "optimizer_steps": steps, "generators": _get_generators(mesh.device)},
    )
    return [path.with_suffix(".safetensors"), path.with_suffix(".json")]


@torch.no_grad()
def _read_state(trainer: Trainer, folder: Path, ranks: int) -> None:
    tables = [json.loads((folder / f"rank_{r:05d}.json").read_text()) for r in range(ranks)]
    files = [safe_open(folder / f"rank_{r:05d}.safetensors", framework="pt") for r in range(ranks)]
    names = {name for name, _ in trainer.named_parameters_hf()}
    saved = {key.split("/", 1)[1] for table in tables for key in table["shards"]}
    if names != saved:
        raise CheckpointError(f"it holds another model: {sorted(names ^ saved)[:4]} are in only one of the two")
    steps = tables[0]["optimizer_steps"]
    for name, p in trainer.named_parameters_hf():
        _fill(local(p), p, f"weight/{name}", tables, files)
        if name not in steps:
            trainer.optimizer.state.pop(p, None)
            continue
        state = trainer.optimizer.state[p]
        state["step"] = torch.tensor(steps[name], dtype=torch.float32, device=local(p).device)
        for moment in trainer.moments:
            state[moment] = torch.zeros_like(p)
            _fill(local(state[moment]), p, f"{moment}/{name}", tables, files)


def _fill(into: Tensor, p: Tensor, key: str, tables: list[dict[str, Any]], files: list[Any]) -> None:
    """Copies the rows of ``into`` from whichever ranks' files hold them."""
    first, filled = _first_row(p), 0
    rows = into.shape[0] if into.ndim else 1
    for table, file in zip(tables, files, strict=True):
        place = table["shards"].get(key)
        if place is None:
            continue
        if place["shape"] != list(p.shape):
            raise CheckpointError(f"{key} has shape {place['shape']}, the model's is {list(p.shape)}")
        held = file.get_slice(key)
        begin = max(first, place["first_row"])
        end = min(first + rows, place["first_row"] + held.get_shape()[0])
        if end > begin:
            piece = held[begin - place["first_row"] : end - place["first_row"]]
            into[begin - first : end - first].copy_(piece)
            filled += end - begin
    if filled != rows:
        raise CheckpointError(f"{key}: {filled} of {rows} rows found")


def _get_generators(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's, torch's and the device's generator, JSON-able."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    out = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return out


def _set_generators(saved: dict[str, Any], device: torch.device) -> None:
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))

    def state(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(state(saved["torch"]))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(state(saved["cuda"]), device)
