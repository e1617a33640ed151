"""Processes that benchmarks start: one JSON job in, one JSON result out; and the environment that holds TRL."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from requirements.env import has_nvidia_driver, index_arguments

ROOT = Path(__file__).resolve().parent.parent
TRL_VENV = ROOT / ".venv-trl"
TRL_LOCK = Path(__file__).with_name("requirements-trl.txt")
LIMIT_S = 1200.0  # of one process


def run_job(
    python: Path | str,
    module: str,
    job: dict[str, Any],
    folder: Path,
    name: str,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    """``python -m benchmarks.MODULE job.json result.json``: its result with ``wall_s``.

    A process that fails gives ``{"error": the end of its output, "wall_s": ...}``. Files in ``folder`` bear ``name``.
    """
    job_file, result, log = (folder / f"{name}.{kind}" for kind in ("job.json", "result.json", "log"))
    job_file.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    command = [str(python), "-m", f"benchmarks.{module}", str(job_file), str(result)]
    began = time.monotonic()
    with open(log, "w") as output:
        status = subprocess.run(
            command, cwd=ROOT, env=clean(python) | (environment or {}), stdout=output, stderr=output, timeout=LIMIT_S
        ).returncode
    wall = time.monotonic() - began
    if status or not result.exists():
        return {"error": f"exit status {status}: {log.read_text()[-500:]}", "wall_s": wall}
    return {**json.loads(result.read_text()), "wall_s": wall}


def clean(python: Path | str) -> dict[str, str]:
    """This environment; another Python gets none of this one's packages."""
    found = dict(os.environ)
    if str(python) != sys.executable:
        found.pop("PYTHONPATH", None)
    return found


def trl_python() -> Path:
    """A Python that has TRL as ``requirements-trl.txt`` pins it: this one, or that of TRL's own environment.

    The latter is built when it is absent or its requirements have changed.
    """
    if installed("trl") == pinned("trl"):
        return Path(sys.executable)
    python = TRL_VENV / "bin" / "python"
    stamp = TRL_VENV / "requirements.sha256"
    wanted = hashlib.sha256(TRL_LOCK.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"building {TRL_VENV.name} from {TRL_LOCK.name}", flush=True)
        subprocess.run([os.path.realpath(sys.executable), "-m", "venv", "--clear", str(TRL_VENV)], check=True)
        # The CPU build of torch where no GPU could use the other: a fraction of the download.
        torch = f"torch=={pinned('torch')}" + ("" if has_nvidia_driver() else "+cpu")
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *index_arguments(python, torch), torch, "-r", str(TRL_LOCK)], check=True)
        stamp.write_text(wanted)
    return python


def pinned(package: str) -> str:
    """The version in ``requirements-trl.txt``."""
    lines = TRL_LOCK.read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def installed(package: str) -> str | None:
    """The version that this Python has; None if it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
