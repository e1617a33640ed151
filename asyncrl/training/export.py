"""The Hugging Face folder of a checkpoint: loads as it is in transformers and vLLM.

Weights go out under the names of the source folder, each in the dtype that it has there (or ``checkpoint.hf_dtype``):
what was loaded and not trained comes out with the same bytes. They are read back from the checkpoint's own shards, one
tensor at a time, and the files are divided among ranks, so that no rank ever holds the model and no collective moves a
weight. Config, tokenizer and chat template are copied from the source.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrl.config.model_folder import read_safetensors_header, weight_files
from asyncrl.training.errors import ModelError
from asyncrl.training.files import digest, sync, write_bytes, write_json
from asyncrl.training.stored import DTYPES
from asyncrl.training.tensor_files import Spec, write_tensors

FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")
COMPUTED = (".rotary_emb.inv_freq",)  # old folders hold what follows from the config


@dataclass
class Plan:
    """``names``: name in the folder -> name of the parameter; they differ for a tied weight that is stored twice.

    ``dtypes``: of each name in the folder; ``chosen``: of all, empty if they are the source's.
    """

    source: Path
    chosen: str
    dtypes: dict[str, torch.dtype]
    names: dict[str, str]
    files: list[list[str]]  # names in the folder, file by file


class ModelExport:
    """The ``hf`` folder of a checkpoint. ``names``: see ``names_of``; ``dtype``: see ``checkpoint.hf_dtype``."""

    folder = "hf"

    def __init__(self, source: Path, dtype: str, names: Mapping[str, str]) -> None:
        self.source, self.dtype, self.names = source, dtype, names

    def prepare(self, weights: Mapping[str, Spec]) -> None:
        """Reads from the model's source what is needed; see :func:`plan_export`."""
        self.plan = plan_export(self.source, self.dtype, self.names, weights)

    def write(
        self, folder: Path, weights: Mapping[str, Spec], read: Callable[[str], Tensor], rank: int, world_size: int
    ) -> dict[str, dict[str, Any]]:
        """This rank's part; returns its files' digests."""
        written = write_weights(folder, self.plan, weights, read, rank, world_size)
        return written | write_rest(folder, self.plan, weights) if rank == 0 else written


def plan_export(source: Path, chosen: str, names: Mapping[str, str], weights: Mapping[str, Spec]) -> Plan:
    """What to write for a model loaded from ``source`` with the parameters ``weights`` and the ``names_of`` it."""
    stored, names = stored_dtypes(source), stored_as(source, names)
    dtypes = {name: getattr(torch, chosen) if chosen else stored[name] for name in names}
    sizes = {name: math.prod(weights[of][1]) * dtypes[name].itemsize for name, of in names.items()}
    return Plan(source, chosen, dtypes, names, plan_files(sizes))


def stored_dtypes(source: Path) -> dict[str, torch.dtype]:
    """Of every tensor in the folder's files, by name; they may differ, and from what its config says."""
    headers = [read_safetensors_header(file) for file in weight_files(source)]
    entries = {name: entry for header in headers for name, entry in header.items() if name != "__metadata__"}
    return {name: DTYPES[entry["dtype"]] for name, entry in entries.items()}


def names_of(lm: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the name that it is known by, in model order; a tied weight has several."""
    parameters = {id(p): name for name, p in lm.named_parameters()}
    return {name: parameters[id(p)] for name, p in lm.named_parameters(remove_duplicate=False)}


def stored_as(source: Path, every: Mapping[str, str]) -> dict[str, str]:
    """Every name that ``source`` stores a weight under -> the parameter that holds it; ``every``: see ``names_of``.

    A tied weight may be stored under both its names. Raises :class:`ModelError` if the folder stores something that
    the model does not hold, or lacks something: an export would then be another model than its source.
    """
    stored = weight_names(source)
    names = {name: of for name, of in every.items() if name == of or name in stored}
    missing = sorted(names.keys() - stored)
    left = sorted(name for name in stored - names.keys() if not name.endswith(COMPUTED))
    for what, found in (("does not store", missing), ("stores, and the model does not hold,", left)):
        if found:
            raise ModelError(f"{source} {what} {len(found)} weights, e.g. {found[0]}")
    return names


def weight_names(source: Path) -> set[str]:
    """Names of the tensors that the folder's model is made of."""
    if (source / INDEX).exists():
        return set(json.loads((source / INDEX).read_text())["weight_map"])
    with safe_open(source / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def plan_files(sizes: Mapping[str, int], limit: int = FILE_BYTES) -> list[list[str]]:
    """Consecutive names for each file, at most ``limit`` bytes a file (one larger tensor gets its own)."""
    files: list[list[str]] = [[]]
    size = 0
    for name, nbytes in sizes.items():
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_weights(
    folder: Path, plan: Plan, weights: Mapping[str, Spec], read: Callable[[str], Tensor], rank: int, world_size: int
) -> dict[str, dict[str, Any]]:
    """Writes this rank's files (file f: rank f mod world); ``read`` gives a whole parameter. Returns their digests."""
    written = {}
    for index in range(rank, len(plan.files), world_size):
        specs = {name: (plan.dtypes[name], weights[plan.names[name]][1]) for name in plan.files[index]}
        name = file_name(index, len(plan.files))
        written[name] = write_tensors(
            folder / name, specs, lambda of: read(plan.names[of]).to(plan.dtypes[of]), {"format": "pt"}
        )
    return written


def write_rest(folder: Path, plan: Plan, weights: Mapping[str, Spec]) -> dict[str, dict[str, Any]]:
    """Rank 0: config with the exported dtype, everything else of the source but its weights, and the index."""
    written = {}
    for path in sorted(plan.source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)
            written[path.name] = digest(folder / path.name)
    written["config.json"] = write_bytes(folder / "config.json", config_of(plan))
    if len(plan.files) > 1:
        total = sum(math.prod(weights[of][1]) * plan.dtypes[name].itemsize for name, of in plan.names.items())
        where = {name: file_name(f, len(plan.files)) for f, names in enumerate(plan.files) for name in names}
        written[INDEX] = write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return written


def config_of(plan: Plan) -> bytes:
    """The source's config.json: its very bytes, unless another dtype is chosen."""
    data = (plan.source / "config.json").read_bytes()
    config: dict[str, Any] = json.loads(data)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if not plan.chosen or config.get(key) == plan.chosen:
        return data
    return (json.dumps({**config, key: plan.chosen}, indent=2) + "\n").encode()
