"""The resolved configuration on disk: ``<run>/config.json`` is what every process of a run reads."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.typed import build

CONFIG_FILE = "config.json"


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values only: what ``from_dict`` and JSON take."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of ``to_dict``; raises ConfigError on unknown keys and wrong types."""
    return build(Config, values)


def replace_text(path: Path, text: str) -> None:
    """Write to a temporary name, fsync, rename: a reader sees the old file, none, or all of the new one.

    Raises ``OSError`` if the file system refuses; no half-written file stays behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_config(config: Config, run_dir: Path) -> Path:
    """Writes ``<run>/config.json`` and returns its path."""
    path = run_dir / CONFIG_FILE
    replace_text(path, json.dumps(to_dict(config), indent=1) + "\n")
    return path


def load_config(path: Path) -> Config:
    """Reads a file that ``save_config`` wrote; ``path`` is the file or its run folder."""
    if path.is_dir():
        path = path / CONFIG_FILE
    return from_dict(json.loads(path.read_text()))
