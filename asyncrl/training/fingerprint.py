"""What tells one model's weights from another's: a hash of the bits of every tensor in a Hugging Face folder.

It is of names, dtypes, shapes and values, not of how they are divided into files. Computed once a run, by all ranks
together; each reads its share of the tensors, which it maps and does not keep.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from asyncrl.config.model_folder import weight_files
from asyncrl.training.mesh import Mesh
from asyncrl.weights.digest import tensor_digest


def fingerprint(folder: Path, mesh: Mesh | None = None) -> str:
    """Hexadecimal, the same on every rank. Collective if there is a ``mesh``."""
    rank, world = (mesh.rank, mesh.world_size) if mesh else (0, 1)
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(f, framework="pt")) for f in weight_files(folder)]
        stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        names = sorted(stored)
        digests = torch.zeros(len(names), dtype=torch.int64)
        for i in range(rank, len(names), world):
            digests[i] = tensor_digest(stored[names[i]].get_tensor(names[i]))
        seen = hashlib.sha256()
        if mesh is not None:
            digests = mesh.gather_rows(digests).sum(0)
        for name, digest in zip(names, digests.tolist(), strict=True):
            place = stored[name].get_slice(name)
            seen.update(f"{name} {place.get_dtype()} {list(place.get_shape())} {digest}\n".encode())
    return seen.hexdigest()
