"""Durable folders: write under a temporary name, fsync, describe in a manifest with checksums, rename.

A folder with its final name is complete. A crash or a full disk at any moment leaves the previous folders as they
were and at most one folder whose name starts with a dot.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.training.errors import CheckpointError

MANIFEST = "manifest.json"
OWN = "sha256"


def digest(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as f:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def sync(path: Path) -> None:
    """Forces a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> dict[str, Any]:
    """Writes a small file and forces it to disk; returns size and SHA-256 of what was to be written."""
    path.write_bytes(data)
    sync(path)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def write_json(path: Path, value: Any, sort_keys: bool = True) -> dict[str, Any]:
    """As ``write_bytes``."""
    return write_bytes(path, json.dumps(value, indent=1, sort_keys=sort_keys).encode())


def temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.tmp")


def fresh(path: Path) -> Path:
    """An empty folder at ``path``; whatever a crashed attempt left there is removed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def seal(folder: Path, files: dict[str, dict[str, Any]], facts: dict[str, Any]) -> None:
    """Writes the manifest of a temporary folder, and forces its sub-folders to disk."""
    for sub in {(folder / name).parent for name in files}:
        sync(sub)
    manifest = json.loads(json.dumps({**facts, "files": files}))  # as a reader will see it
    write_json(folder / MANIFEST, {**manifest, OWN: own_checksum(manifest)})
    sync(folder)


def own_checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest's content without this entry."""
    content = {key: value for key, value in manifest.items() if key != OWN}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def publish(folder: Path, final: Path) -> None:
    """Gives a sealed folder its final name. An older folder of that name is replaced; it survives a failure."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    try:
        folder.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises :class:`CheckpointError` if there is no readable manifest, or it is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MANIFEST}: {e}") from e
    if not isinstance(manifest, dict) or manifest.get(OWN, own_checksum(manifest)) != own_checksum(manifest):
        raise CheckpointError(f"checkpoint {folder} is damaged: {MANIFEST} differs from its own checksum")
    return manifest


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compares files (default: all of the manifest) with their recorded sizes and checksums.

    Raises :class:`CheckpointError` naming the first that is missing or differs.
    """
    recorded = read_manifest(folder)["files"]
    for name in recorded if names is None else names:
        path, told = folder / name, recorded[name]
        if not path.exists():
            problem = "is missing"
        elif path.stat().st_size != told["bytes"]:
            size = path.stat().st_size
            how = "truncated" if size < told["bytes"] else "longer"
            problem = f"is {how}: {size} bytes, {told['bytes']} were written"
        elif digest(path)["sha256"] != told["sha256"]:
            problem = "differs from its checksum"
        else:
            continue
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {name} {problem}. Remove this folder to continue from the one before it"
        )


def remove(folder: Path) -> None:
    """Renames a complete folder before it deletes it, so that it is never seen in part."""
    trash = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash)


def sweep(root: Path, prefix: str) -> None:
    """Removes what crashed attempts left: temporary folders and those half removed."""
    for pattern in (f".{prefix}*.tmp", f".{prefix}*.old"):
        for folder in root.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def numbered(root: Path, prefix: str) -> list[Path]:
    """Folders ``<prefix><number>`` in ``root``, oldest first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if p.name.startswith(prefix) and p.name.removeprefix(prefix).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(prefix)))
