"""What every benchmark needs: the two options, the machine it ran on, and claims that are met or not."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from requirements.env import has_nvidia_driver


@dataclass(frozen=True)
class Claim:
    """A figure and what it should be; ``target`` reads like ``">= 0.5"``."""

    name: str
    value: float
    target: str
    met: bool


def at_least(name: str, value: float, bound: float) -> Claim:
    return Claim(name, value, f">= {bound:g}", value >= bound)


def at_most(name: str, value: float, bound: float) -> Claim:
    return Claim(name, value, f"<= {bound:g}", value <= bound)


def arguments(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """``--quick`` (a smaller run of the same) and ``--json FILE``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, machine and claims here")
    return parser.parse_args(argv)


def machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """The processor, its load when asked, and versions."""

    def version_of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "absent"

    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) >> 20 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": memory[0] if memory else None,
        "gpus": gpus(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {p: version_of(p) for p in packages},
    }


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that this process may use; their driver is asked, torch need not be there."""
    if not has_nvidia_driver() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def report(
    name: str,
    figures: dict[str, Any],
    claims: Sequence[Claim],
    *,
    json_file: Path | None,
    packages: Sequence[str] = (),
) -> int:
    """Print the claims, write the JSON; returns the exit status (1 if a claim is not met)."""
    print()
    for claim in claims:
        print(f"{'met    ' if claim.met else 'NOT MET'}  {claim.name}: {claim.value:.4g} (target {claim.target})")
    if json_file is not None:
        result = {
            "benchmark": name,
            "command": [Path(sys.executable).name, *sys.argv],
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(packages),
            "figures": figures,
            "claims": [asdict(c) for c in claims],
        }
        partial = json_file.with_name(json_file.name + ".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(json_file)
    return 0 if all(c.met for c in claims) else 1


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
