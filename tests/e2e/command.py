"""Runs the real command, ``torchrun launch/train.py``, on a tiny random model and a task that takes no skill.

Nothing here is a fake: vLLM, sockets, FSDP2 and the ledger are those of a user. The model knows nothing and the reward
counts letters of its answer, so that groups have variance without any training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = str(Path(sys.executable).parent / "torchrun")
LIMIT_S = 600.0


def settings(run_dir: Path, **more: Any) -> list[str]:
    """Overrides of a small run that ends in seconds; ``more`` replaces them (dots written as ``__``)."""
    values = {
        "run.dir": run_dir,
        "env.kind": "function",
        "env.function": f"{ROOT / 'tests/e2e/letters.py'}:letters",
        "env.size": 64,
        "env.heldout_size": 4,
        "env.task_config": "{}",
        "batch.groups": 4,
        "batch.group_size": 4,
        "sampling.max_tokens": 6,
        "trainer.steps": 6,
        "trainer.threads": 1,
        "generator.threads": 1,
        "checkpoint.every": 2,
        "report.wandb.enabled": "false",
        "deadline.start_s": 180,
        "deadline.batch_s": 90,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in values.items()]


@dataclass
class Launch:
    """One launch of the command. ``ranks`` trainers; ``overrides`` as typed."""

    overrides: list[str]
    ranks: int = 1
    flags: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    experiment: str = "grpo"
    torchrun: tuple[str, ...] = ("--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")

    def start(self, log: Path) -> None:
        arguments = [TORCHRUN, f"--nproc-per-node={self.ranks}", *self.torchrun]
        arguments += [str(ROOT / "launch/train.py"), *self.flags]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*arguments, f"+experiment={self.experiment}", *self.overrides],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
                env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", **self.env},
                cwd=log.parent,
            )

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end in {LIMIT_S:g} s:\n{self.output}") from None

    def wait_watching(self) -> tuple[int, set[psutil.Process]]:
        """As ``wait``, and every process that the run was seen to have, of whatever parent it is by now."""
        seen: set[psutil.Process] = set()
        end_at = time.monotonic() + LIMIT_S
        while self.process.poll() is None and time.monotonic() < end_at:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                seen.update(self.descendants())
            time.sleep(0.05)
        return self.wait(), seen

    def kill(self) -> None:
        """SIGKILL to every process of the run."""
        for process in [psutil.Process(self.process.pid), *self.descendants()]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it died with its parent
                process.kill()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, *words: str) -> psutil.Process:
        """The descendant whose command line holds all ``words``."""
        found = [p for p in self.descendants() if all(w in " ".join(p.cmdline()) for w in words)]
        assert found, f"no process with {words}; there are {[p.cmdline() for p in self.descendants()]}"
        return found[0]


def run(tmp_path: Path, overrides: list[str], ranks: int = 1, **options: Any) -> Launch:
    """Launch, wait, and expect success. ``options``: see ``Launch``."""
    launch = Launch(overrides, ranks, **options)
    launch.start(tmp_path / "output.log")
    code = launch.wait()
    assert code == 0, f"exit code {code}:\n{launch.output}"
    return launch


def until(condition: Callable[[], bool], what: str, launch: Launch) -> None:
    """Wait for ``condition`` while the run goes on."""
    end_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_at, f"waited {LIMIT_S:g} s for {what}:\n{launch.output}"
        assert launch.process.poll() is None, f"the run ended before {what}:\n{launch.output}"
        time.sleep(0.1)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The step records of metrics.jsonl, in the order written."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [r for r in records if "train/loss" in r]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def ledger_rows(run_dir: Path, query: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run_dir}/ledger/ledger.sqlite?mode=ro", uri=True) as db:
        return db.execute(query).fetchall()


def trained_once(run_dir: Path) -> bool:
    """Whether no group is in two batches of the surviving history."""
    ordinals = [o for (text,) in ledger_rows(run_dir, "SELECT ordinals FROM cuts") for o in json.loads(text)]
    return len(ordinals) == len(set(ordinals))


def gone(processes: list[psutil.Process], deadline_s: float) -> list[psutil.Process]:
    """Which of ``processes`` still run after ``deadline_s``; zombies do not."""
    _, alive = psutil.wait_procs(processes, timeout=deadline_s)
    return [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def interrupt(launch: Launch) -> None:
    """Ctrl-C at a terminal: SIGINT to the foreground process group."""
    os.killpg(launch.process.pid, signal.SIGINT)
