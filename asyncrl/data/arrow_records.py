"""Records of Parquet files and of folders that the datasets library has saved."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.data.errors import SourceError


class ParquetRecords:
    """Row groups are what can be read at once: two stay in memory, and ``blocks`` has their sizes."""

    def __init__(self, path: str) -> None:
        import pyarrow
        import pyarrow.parquet as parquet

        self._path = path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise SourceError(path, f"is no Parquet file: {error}", "write it again, or give it its real ending") from (
                error
            )
        footer = self._file.metadata
        sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        self.blocks: Sequence[int] = sizes
        self._starts = np.cumsum([0, *sizes])
        if not len(self):
            raise SourceError(path, "is empty: it holds no record", "leave it out")
        self._group = functools.lru_cache(maxsize=2)(self._read)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"

    def _read(self, group: int) -> Any:
        import pyarrow

        try:
            return self._file.read_row_group(group)
        except (pyarrow.ArrowException, OSError) as error:
            first = int(self._starts[group])
            rows = f"rows {first + 1} to {first + self.blocks[group]}"
            raise SourceError(self._path, f"is broken: {rows} cannot be read: {error}", "write it again") from error

    def record(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        return _row(self._group(group).slice(index - int(self._starts[group]), 1))


class FolderRecords:
    """One split of a folder that the datasets library's ``save_to_disk`` wrote; Arrow files, mapped."""

    blocks: Sequence[int] = ()

    def __init__(self, path: str, split: str) -> None:
        import datasets

        if not any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json")):
            raise SourceError(
                path,
                "is a folder, but none that the datasets library saved (no state.json or dataset_dict.json)",
                "write it with Dataset.save_to_disk, or name the file in it",
            )
        try:
            found = datasets.load_from_disk(path)
        except (OSError, ValueError) as error:
            raise SourceError(path, f"cannot be loaded: {error}", "save it again with save_to_disk") from error
        self._path = path
        if isinstance(found, datasets.DatasetDict):
            found, self._path = _split(found, split, path)
        if not len(found):
            raise SourceError(self._path, "is empty: it holds no record", "leave it out")
        self._rows = found.with_format("arrow")  # images and the like stay undecoded

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"

    def record(self, index: int) -> dict[str, Any]:
        return _row(self._rows[index])


def _split(found: Any, split: str, path: str) -> tuple[Any, str]:
    if not split and len(found) == 1:
        (split,) = found
    if split not in found:
        what = f"has no split {split}" if split else "has several splits"
        raise SourceError(path, f"{what}: {', '.join(found)}", f"split: {next(iter(found), '')}")
    return found[split], f"{path}/{split}"


def _row(table: Any) -> dict[str, Any]:
    (row,) = table.to_pylist()
    return _present(row)


def _present(value: Any) -> Any:
    """Without the keys that Arrow adds to a struct because another record has them."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_present(item) for item in value]
    return value
