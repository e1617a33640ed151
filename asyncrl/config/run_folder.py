"""The folder of a run: chosen once, by rank 0, and never used twice by accident.

``<root>/<date>_<time>_<mode>`` for a run, ``<sweep_root>/<date>_<time>/<job>_<overrides>`` for a job of a sweep,
``run.dir`` if it is set. ``mkdir`` decides between two runs that start in the same second. ``<root>/latest`` is a link
to the newest. ``launch.json`` in the folder says how it was started and whether the mode has returned; with it a run
that torchrun restarts (--max-restarts) finds its earlier attempt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.errors import ConfigError, Problem
from asyncrl.config.files import load_config, replace_text, to_dict
from asyncrl.config.schema import Config

LAUNCH_FILE = "launch.json"
MAX_NAME = 120

# A resumed run trains again on what its ledger holds; with another value here that would no longer be the same run.
FIXED_ON_RESUME = ("mode", "seed", "model.path", "env", "batch", "staleness", "sampling.temperature")


def choose_run_dir(config: Config, sweep: Path | None = None, job: int = 0, overrides: Sequence[str] = ()) -> Path:
    """Makes and returns the absolute folder of a new run. Raises ConfigError when ``run.dir`` is in use."""
    if config.run.dir:
        return _claim(Path(config.run.dir).absolute())
    if sweep is not None:
        return make_unique(sweep / job_name(job, overrides))
    return make_unique(Path(config.run.root).absolute() / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{config.mode}")


def choose_sweep_dir(config: Config) -> Path:
    """Makes and returns the absolute folder of a new sweep."""
    return make_unique(Path(config.run.sweep_root).absolute() / time.strftime("%Y-%m-%d_%H-%M-%S"))


def job_name(job: int, overrides: Sequence[str]) -> str:
    """``<job>_<overrides>`` with only characters that are safe in a folder's name."""
    told = [text for text in overrides if not text.startswith(("+experiment=", "hydra.", "hydra/"))]
    name = re.sub(r"[^\w.=+,-]", "-", ",".join([f"{job}", *told]).replace(",", "_", 1))
    return name[:MAX_NAME].rstrip("-_,.")


def make_unique(path: Path) -> Path:
    """Makes ``path``, or the first of ``path_1``, ``path_2``, ... that does not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        candidate = path if number == 0 else path.with_name(f"{path.name}_{number}")
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _claim(path: Path) -> Path:
    remedy = f"another run.dir, or resume={path} to continue that run"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([Problem("run.dir", f"{path} cannot be made: {error.strerror}", "another run.dir")]) from None
    if any(path.iterdir()):
        raise ConfigError([Problem("run.dir", f"{path} is not empty, and a run never overwrites another", remedy)])
    return path


def link_latest(root: Path, run_dir: Path) -> None:
    """Points ``<root>/latest`` at ``run_dir``; a reader sees the old link or the new one, never none."""
    root.mkdir(parents=True, exist_ok=True)
    link = root / "latest"
    if link.is_dir() and not link.is_symlink():
        raise ConfigError([Problem("run.root", f"{link} is a folder, not a link", f"move {link} away")])
    temporary = root / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(run_dir.resolve(), root.resolve()))
    os.replace(temporary, link)


def changed_on_resume(config: Config) -> list[Problem]:
    """Problems of resuming ``config.resume`` with values that the run's own history forbids to change."""
    old, new = to_dict(load_config(Path(config.resume))), to_dict(config)
    problems = []
    for key in FIXED_ON_RESUME:
        for leaf, before, after in _differences(key, _select(old, key), _select(new, key)):
            message = f"{after!r} now, {before!r} in {config.resume}; the run could not continue its own history"
            problems.append(
                Problem(leaf, message, f"{leaf}={before}, or start a new run from a checkpoint of that one")
            )
    return problems


def _select(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _differences(key: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [found for name in old for found in _differences(f"{key}.{name}", old[name], new[name])]
    return [] if old == new else [(key, old, new)]


@dataclasses.dataclass
class Launch:
    """Contents of ``launch.json``. ``agent`` is the torchrun process, the same over its restarts of a run."""

    argv: list[str]
    host: str
    agent: list[float]  # pid and start time
    job: int
    attempt: int
    returned: bool = False  # the mode returned without an error

    @classmethod
    def now(cls, job: int, attempt: int) -> Launch:
        parent = psutil.Process(os.getppid())
        return cls(sys.argv, socket.gethostname(), [parent.pid, parent.create_time()], job, attempt)

    def same_run(self, other: Launch) -> bool:
        return (self.host, self.agent, self.job) == (other.host, other.agent, other.job)

    def write(self, run_dir: Path) -> None:
        replace_text(run_dir / LAUNCH_FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def earlier_attempt(config: Config, launch: Launch) -> tuple[Path, Launch] | None:
    """The folder of this very run before torchrun restarted it, newest attempt first; None when there is none."""
    places = [Path(config.run.dir)] if config.run.dir else []
    places += [*Path(config.run.root).absolute().glob("*"), *Path(config.run.sweep_root).absolute().glob("*/*")]
    if config.resume:
        places.append(Path(config.resume))
    found = []
    for folder in places:
        try:
            record = Launch(**json.loads((folder / LAUNCH_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            continue  # not a run, or one whose start was cut off before it was recorded
        if record.same_run(launch) and not folder.is_symlink():
            found.append((record.attempt, str(folder), record))
    if not found:
        return None
    _, folder_name, record = max(found, key=lambda item: item[:2])
    return Path(folder_name), record
