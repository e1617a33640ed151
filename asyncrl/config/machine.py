"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def assign_gpus(gpus: Sequence[str], trainers: int, replicas: int, tensor_parallel: int) -> list[list[str]]:
    """The GPUs of each of ``replicas`` engines on a machine whose first ``trainers`` GPUs have a trainer rank each.

    Engines take the GPUs behind the trainers' in turn and begin anew at the first when none is left, so that nothing
    is shared while there are enough and no GPU ever has two engines more than another. Empty without GPUs.

    >>> assign_gpus(["0", "1", "2", "3"], trainers=1, replicas=2, tensor_parallel=2)
    [['1', '2'], ['3', '0']]

    Raises ``ValueError`` if one engine wants more GPUs than there are.
    """
    if not gpus:
        return [[] for _ in range(replicas)]
    if tensor_parallel > len(gpus):
        raise ValueError(f"an engine on {tensor_parallel} GPUs, and this machine has {len(gpus)}")
    first = [trainers + index * tensor_parallel for index in range(replicas)]
    return [[gpus[(begin + i) % len(gpus)] for i in range(tensor_parallel)] for begin in first]


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would see, as CUDA_VISIBLE_DEVICES names them, or else as many as the NVIDIA driver lists."""
    present = _count_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(present)]
    devices: list[str] = []
    for device in visible.split(","):
        if device.strip() in ("", "-1"):
            break  # CUDA ignores everything from the first invalid entry on
        devices.append(device.strip())
    return devices[:present]


def _count_present() -> int:
    try:
        return len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        pass  # no such folder: no driver, or a sandbox that hides it
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def compute_capability() -> tuple[int, int] | None:
    """The lowest compute capability of this machine's GPUs; None if nvidia-smi does not say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=60)
        found = [tuple(map(int, line.split("."))) for line in listing.stdout.split()]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return min(((major, minor) for major, minor in found), default=None) if listing.returncode == 0 else None
