"""Reading a checkpoint's shards: any block of any tensor, whatever blocks the ranks that wrote it held."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.training.errors import CheckpointError
from asyncrl.training.tensor_files import NAMES, Spec
from asyncrl.weights.gather import Block

DTYPES = {name: dtype for dtype, name in NAMES.items()}


def state_file(rank: int) -> str:
    """Name of a rank's file in ``state/``, without its suffix."""
    return f"rank_{rank:05d}"


def describe_specs(specs: Mapping[str, Spec]) -> dict[str, Any]:
    """Dtypes and shapes as JSON."""
    return {key: {"dtype": NAMES[dtype], "shape": list(shape)} for key, (dtype, shape) in specs.items()}


def parse_specs(described: Mapping[str, Any]) -> dict[str, Spec]:
    """The inverse of ``describe_specs``."""
    return {key: (DTYPES[told["dtype"]], tuple(told["shape"])) for key, told in described.items()}


def by_name(keys: Iterable[str]) -> dict[str, list[str]]:
    """Parameter name -> its kinds of state, for keys ``kind/name``."""
    out: dict[str, list[str]] = {}
    for key in keys:
        kind, _, name = key.partition("/")
        out.setdefault(name, []).append(kind)
    return out


class StoredState:
    """The ``state`` folder that ``ranks`` ranks wrote. Files are opened when they are first needed."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.tables = [json.loads((folder / f"{state_file(r)}.json").read_text()) for r in range(ranks)]
        self.blocks: dict[str, list[tuple[int, Block]]] = {}
        self._files: dict[int, Any] = {}
        for rank, table in enumerate(self.tables):
            for key, place in table["blocks"].items():
                block = Block(tuple(place["start"]), tuple(place["size"]))
                self.blocks.setdefault(key, []).append((rank, block))

    def check_complete(self, whole: Mapping[str, Spec]) -> None:
        """Raises :class:`CheckpointError` unless the blocks are exactly the tensors of ``whole``."""
        if odd := sorted(self.blocks.keys() ^ {k for k, (_, shape) in whole.items() if Block((), shape).numel}):
            raise CheckpointError(f"shards and manifest do not list the same tensors, e.g. {odd[0]}")
        for key, blocks in self.blocks.items():
            dtype, shape = whole[key]
            inside = all(
                len(b.start) == len(b.size) == len(shape)
                and all(s >= 0 and s + n <= m for s, n, m in zip(b.start, b.size, shape, strict=True))
                for _, b in blocks
            )
            held, wanted = sum(b.numel for _, b in blocks), Block((), shape).numel
            if not inside or held != wanted:
                raise CheckpointError(f"{key}: shards hold {held} of {wanted} elements of shape {list(shape)}")
            for rank, block in blocks:
                self._check_header(rank, key, dtype, block)

    def _check_header(self, rank: int, key: str, dtype: torch.dtype, block: Block) -> None:
        """A reader allocates by the manifest, so that the file has to agree before anything is copied."""
        stored = self._file(rank).get_slice(key)
        found = (stored.get_dtype(), tuple(stored.get_shape()))
        if found != (NAMES[dtype], block.size):
            raise CheckpointError(
                f"{state_file(rank)} holds {key} as {found}, its table says {NAMES[dtype]} {block.size}"
            )

    def read(self, key: str, dtype: torch.dtype, wanted: Block) -> Tensor:
        """A fresh tensor on the CPU. Raises :class:`CheckpointError` if the shards do not cover ``wanted``."""
        for rank, block in self.blocks.get(key, ()):
            if block == wanted:
                return self._file(rank).get_tensor(key).clone()  # safetensors maps the file
        out = torch.empty(wanted.size, dtype=dtype)
        filled = 0
        for rank, block in self.blocks.get(key, ()):
            begin = [max(a, b) for a, b in zip(block.start, wanted.start, strict=True)]
            end = [
                min(a + n, b + m) for a, n, b, m in zip(block.start, block.size, wanted.start, wanted.size, strict=True)
            ]
            if any(e <= b for b, e in zip(begin, end, strict=True)):
                continue
            there = tuple(slice(b - s, e - s) for b, e, s in zip(begin, end, block.start, strict=True))
            here = tuple(slice(b - s, e - s) for b, e, s in zip(begin, end, wanted.start, strict=True))
            piece = self._file(rank).get_slice(key)[there]
            out[here] = piece
            filled += piece.numel()
        if filled != wanted.numel:
            raise CheckpointError(f"{key}: {filled} of {wanted.numel} elements found")
        return out

    def read_whole(self, key: str, spec: Spec) -> Tensor:
        """The whole tensor."""
        return self.read(key, spec[0], Block((0,) * len(spec[1]), spec[1]))

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            path = self.folder / f"{state_file(rank)}.safetensors"
            self._files[rank] = safe_open(path, framework="pt")
        return self._files[rank]
