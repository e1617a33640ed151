"""Where the records of a torchtune dataset lie: a local file, or a folder that the user saves them to."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.forms import ENDINGS
from asyncrl.data.errors import DataError
from asyncrl.data.records import open_records
from asyncrl.data.stored import read_survey, survey

_READERS = ("json", "csv", "parquet")  # of the datasets library, for files


@dataclass(frozen=True)
class Place:
    """``command``: writes ``path`` if it is not there; empty for a file of the user's."""

    path: str
    command: str = ""


def places_of(source: str, loading: Mapping[str, Any]) -> list[Place]:
    """The files that ``datasets.load_dataset(source, **loading)`` reads, or the folder that would hold its records."""
    arguments = {key: value for key, value in loading.items() if value is not None}
    files = arguments.pop("data_files", None)
    names = [files] if isinstance(files, str) else files
    whole = arguments.pop("split", "train") == "train" and not arguments
    if source in _READERS and whole and isinstance(names, list) and all(map(_is_readable, names)):
        return [Place(name) for name in names]
    what = [source, *(str(value) for key, value in loading.items() if key in ("name", "split") and value)]
    folder = "data/" + re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(what)).strip("-")
    said = ", ".join([repr(source), *(f"{key}={value!r}" for key, value in loading.items() if value is not None)])
    script = f"from datasets import load_dataset; load_dataset({said}).save_to_disk({folder!r})"
    quoted = shlex.quote(script) if re.search(r'["$`\\!]', script) else f'"{script}"'
    return [Place(folder, f"python -c {quoted}")]


def _is_readable(name: Any) -> bool:
    return isinstance(name, str) and "://" not in name and "*" not in name and Path(name).suffix.lower() in ENDINGS


def count(path: str) -> int | None:
    """Records at ``path``; None if nothing is there yet, or nothing that can be read (the run says why)."""
    if not Path(path).exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            return len(open_records(read_survey(survey(Path(path), Path(folder)))))
        except (DataError, ImportError):
            return None
