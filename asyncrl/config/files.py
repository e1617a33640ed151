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


def save_config(config: Config, run_dir: Path) -> Path:
    """Writes ``<run>/config.json`` (temporary name, fsync, rename) and returns its path."""
    path = run_dir / CONFIG_FILE
    temporary = run_dir / (CONFIG_FILE + ".tmp")
    with open(temporary, "w") as file:
        json.dump(to_dict(config), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


def load_config(path: Path) -> Config:
    """Reads a file that ``save_config`` wrote; ``path`` is the file or its run folder."""
    if path.is_dir():
        path = path / CONFIG_FILE
    return from_dict(json.loads(path.read_text()))
