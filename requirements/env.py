"""Builds ``.venv`` from the lock file for this machine; does nothing when it is already right.

Needs only the standard library, as it runs before anything is installed. ``.venv/asyncrl-env.json`` is written last
and holds the hashes of what was installed, so an interrupted build is never taken for a finished one:

* the lock file, or the Python, changed: the environment is built anew (no leftovers of the old lock);
* only pyproject.toml changed: only the project itself is installed again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "asyncrl-env.json"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver answers: that, not the presence of a card, is what CUDA wheels need."""
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        return subprocess.run([tool, "-L"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def choose_lock(kind: str) -> Path:
    """The lock file for ``kind`` (``auto``, ``cpu`` or ``cuda``)."""
    if kind == "auto":
        kind = "cuda" if has_nvidia_driver() else "cpu"
    return ROOT / "requirements" / f"{kind}.txt"


def wanted(lock: Path) -> dict[str, str]:
    """What the stamp of an up-to-date environment holds."""
    return {
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "root": str(ROOT),  # an editable install names the folder; a moved checkout needs a new one
    }


def read_stamp(venv: Path) -> dict[str, str]:
    """The stamp of the last finished build; empty when there is none."""
    try:
        return json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def write_stamp(venv: Path, stamp: dict[str, str]) -> None:
    temporary = venv / (STAMP + ".tmp")
    temporary.write_text(json.dumps(stamp, indent=1) + "\n")
    os.replace(temporary, venv / STAMP)


def pinned_torch(lock: Path) -> str:
    """The lock's torch requirement, for example ``torch==2.13.0+cpu``."""
    for line in lock.read_text().splitlines():
        if line.startswith("torch="):
            return line.strip()
    raise SystemExit(f"{lock} pins no torch: regenerate it with `make locks`")


def index_arguments(python: Path | str, torch: str) -> list[str]:
    """Extra pip arguments: PyTorch's CPU index, and only when pip's own indexes lack this CPU build of torch.

    PyPI carries CUDA builds only, but a mirror or a ``find-links`` folder may have the CPU one.
    """
    if not torch.endswith("+cpu"):
        return []
    probe = [str(python), "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps", torch]
    found = subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    return [] if found else ["--extra-index-url", TORCH_CPU_INDEX]


def install_lock(venv: Path, lock: Path) -> None:
    """Builds the environment anew. The lock is complete, so pip must not resolve (``--no-deps``).

    An index that pip is not configured for is asked for torch alone: where it cannot be reached, that is said within
    seconds, not after retries for each package of the lock.
    """
    base = os.path.realpath(sys.executable)  # this may be the environment's own Python, about to be removed
    subprocess.run([base, "-m", "venv", "--clear", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    torch = pinned_torch(lock)
    if index := index_arguments(python, torch):
        subprocess.run([*pip, *index, torch], check=True)
    subprocess.run([*pip, "-r", str(lock)], check=True)


def install_project(venv: Path) -> None:
    """Installs this checkout, which also gives vLLM's processes the plugin's entry point."""
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)], check=True)


def build(venv: Path, lock: Path) -> None:
    """Brings ``venv`` up to date; raises CalledProcessError when a step fails."""
    want = wanted(lock)
    have = read_stamp(venv)
    if have == want:
        return
    (venv / STAMP).unlink(missing_ok=True)
    if any(have.get(key) != want[key] for key in ("lock", "python", "root")):
        print(f"Building {venv} from {lock.relative_to(ROOT)} (once; a few minutes)", flush=True)
        install_lock(venv, lock)
        write_stamp(venv, {**want, "project": ""})
    install_project(venv)
    write_stamp(venv, want)
    print(f"{venv} is ready", flush=True)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lock", choices=["auto", "cpu", "cuda"], default="auto")
    arguments = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        print(f"This is Python {sys.version.split()[0]}; 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.11")
        return 2
    with open(ROOT / "pyproject.toml") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # a second `make env` waits for the first
        try:
            build(arguments.venv.absolute(), choose_lock(arguments.lock))
        except subprocess.CalledProcessError as error:
            print(f"The environment is not built: {' '.join(map(str, error.cmd))} ended with {error.returncode}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
