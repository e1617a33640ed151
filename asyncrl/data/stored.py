"""What is known of a data file before any record is read: its kind, its contents' hash, where its records are.

One rank reads each file once from end to end (``survey``) and writes what it found below the run's folder; every rank,
and the run when it is resumed, opens that. A file whose size and time of change are still the same is not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.config.forms import ENDINGS, Kind
from asyncrl.data.errors import SourceError
from asyncrl.data.text_index import array_starts, csv_starts, line_starts, write_index

_STARTS = {"lines": line_starts, "array": array_starts, "csv": csv_starts}
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Stored:
    """A surveyed file or folder. ``stamp``: (name, size, time of change) of each of its files."""

    path: str
    kind: Kind
    stamp: list[list[Any]]
    digest: str  # sha256 of the contents
    rows: int  # of the index: with a CSV file's header
    index: str  # file; empty where the format has its own


def kind_of(path: Path) -> Kind:
    """Raises ``SourceError`` when nothing is there, or nothing that can be read."""
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise SourceError(str(path), "there is no such file", "the path is relative to the folder the run starts in")
    kind = ENDINGS.get(path.suffix.lower())
    if kind is None:
        raise SourceError(
            str(path),
            f"the ending {path.suffix!r} is none of {', '.join(ENDINGS)}",
            "rename or convert the file; a compressed one must be unpacked, as records are read where they lie",
        )
    return kind


def survey(path: Path, folder: Path) -> Path:
    """Reads ``path`` once and writes what it found below ``folder``; returns that file, for ``read_survey``.

    Raises ``SourceError`` for a file that is empty, broken as a whole, or changes meanwhile.
    """
    kind = kind_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    target, index = folder / f"{name}.json", folder / f"{name}.index"
    stamp = stamp_of(path)
    if target.exists() and (known := read_survey(target)).stamp == stamp and known.path == str(path):
        return target
    try:
        if kind in _STARTS:
            kind, digest, rows = _index(path, kind, index)
        else:
            digest, rows, index = _digest(path), 0, Path()
    except OSError as error:
        remedy = "see that it can be read, and that there is space for 16 bytes a record below the run's folder"
        raise SourceError(str(path), f"cannot be read through and indexed: {error}", remedy) from error
    if stamp_of(path) != stamp:
        raise SourceError(str(path), "has changed while it was read", "start the run when it is complete")
    found = Stored(str(path), kind, stamp, digest, rows, str(index) if rows else "")
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(found)))
    os.replace(temporary, target)
    return target


def read_survey(file: Path) -> Stored:
    return Stored(**json.loads(file.read_text()))


def stamp_of(path: Path) -> list[list[Any]]:
    """[name, size, time of change in ns] of ``path``, or of every file in it."""
    return [[str(file.relative_to(path)), (stat := file.stat()).st_size, stat.st_mtime_ns] for file in _files(path)]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _index(path: Path, kind: Kind, index: Path) -> tuple[Kind, str, int]:
    """Writes the index; (the kind as its first character shows it, digest, rows)."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        if kind == "array" and _first_character(file) != b"[":
            kind = "lines"  # many files of one object a line end in .json
        temporary = index.with_suffix(".tmp")
        rows = write_index(_STARTS[kind](file, str(path), hasher.update), temporary)
    if rows <= (kind == "csv"):
        raise SourceError(str(path), "is empty: it holds no record", "write one record a line, or leave it out")
    os.replace(temporary, index)
    return kind, hasher.hexdigest(), rows


def _first_character(file: BinaryIO) -> bytes:
    head = file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return head[:1]


def _digest(path: Path) -> str:
    hasher = hashlib.sha256()
    for name in _files(path):
        hasher.update(f"{name.relative_to(path)}\0{name.stat().st_size}\0".encode())
        with open(name, "rb") as file:
            for block in iter(lambda file=file: file.read(_BLOCK), b""):  # type: ignore[misc]
                hasher.update(block)
    return hasher.hexdigest()
