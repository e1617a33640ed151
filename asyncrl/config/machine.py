"""What this machine has, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def count_gpus() -> int:
    """GPUs that CUDA would see: CUDA_VISIBLE_DEVICES if set, else what the NVIDIA driver lists."""
    present = _count_present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    devices: list[str] = []
    for device in visible.split(","):
        if device.strip() in ("", "-1"):
            break  # CUDA ignores everything from the first invalid entry on
        devices.append(device)
    return min(len(devices), present)


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
