"""The Hugging Face folder of a checkpoint: loads as it is in transformers and vLLM.

Weights go out under their Hugging Face names in the dtype of the source folder (or ``checkpoint.hf_dtype``). All
ranks gather each tensor once, in model order; the files are divided among ranks, which write after the last gather,
so that nobody waits in a collective for a disk. Config, tokenizer and chat template are copied from the source.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.training.files import sync, write_json

FILE_BYTES = 5 * 10**9
NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def export_dtype(source: Path, chosen: str) -> torch.dtype:
    """``chosen`` by name, else the dtype in the source's config, else fp32."""
    config = json.loads((source / "config.json").read_text())
    return getattr(torch, chosen or config.get("dtype") or config.get("torch_dtype") or "float32")


def plan_files(parameters: list[tuple[str, Tensor]], dtype: torch.dtype, limit: int = FILE_BYTES) -> list[list[str]]:
    """Consecutive names for each file, at most ``limit`` bytes a file (one larger tensor gets its own)."""
    files: list[list[str]] = [[]]
    size = 0
    for name, p in parameters:
        nbytes = p.numel() * dtype.itemsize
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


@torch.no_grad()
def gather_files(
    parameters: list[tuple[str, Tensor]], files: list[list[str]], dtype: torch.dtype, rank: int, world_size: int
) -> dict[int, dict[str, Tensor]]:
    """Collective. The whole tensors of the files that this rank writes (file f: rank f mod world), on the CPU."""
    owner = {name: f for f, names in enumerate(files) for name in names}
    mine: dict[int, dict[str, Tensor]] = {}
    for name, p in parameters:
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        if owner[name] % world_size == rank:
            mine.setdefault(owner[name], {})[name] = whole.detach().to("cpu", dtype).contiguous()
    return mine


def write_weights(folder: Path, mine: dict[int, dict[str, Tensor]], count: int) -> list[Path]:
    """Writes this rank's files."""
    written = []
    for index, tensors in mine.items():
        path = folder / file_name(index, count)
        save_file(tensors, path, metadata={"format": "pt"})
        sync(path)
        written.append(path)
    return written


def write_rest(
    folder: Path, source: Path, parameters: list[tuple[str, Tensor]], files: list[list[str]], dtype: torch.dtype
) -> list[Path]:
    """Rank 0: config with the exported dtype, everything else of the source but its weights, and the index."""
    written = []
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(NOT_COPIED):
            written.append(Path(shutil.copyfile(path, folder / path.name)))
            sync(written[-1])
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    written.append(folder / "config.json")
    if len(files) > 1:
        total = sum(p.numel() * dtype.itemsize for _, p in parameters)
        where = {name: file_name(f, len(files)) for f, names in enumerate(files) for name in names}
        index = folder / "model.safetensors.index.json"
        write_json(index, {"metadata": {"total_size": total}, "weight_map": where})
        written.append(index)
    return written
