"""A sweep of adapters as one run against the same jobs one after another: makespan, and what each job has learnt.

    python -m benchmarks.multi_lora_sweep [--quick] [--json FILE]

Both are the real command on the shipped model, nine jobs of 40 steps (--quick: four of 10), once with
mode=multi_lora and once with mode=sft, which is one after another in one process. So both start once, read the same
data, evaluate and save as often; the makespan is of the whole command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.report.metrics import read_lines
from benchmarks.harness import arguments, at_most, report
from benchmarks.jobs import ROOT

SWEEP = ("lora.rank=8,16,32", "optim.lr=1e-3,2e-3,4e-3", "trainer.steps=40")
QUICK = ("lora.rank=8,16", "optim.lr=1e-3,2e-3", "trainer.steps=10", "eval.every=5", "checkpoint.every=5")
LIMIT_S = 1200.0


def sweep(mode: str, overrides: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Seconds of the command and of its steps; job -> its training losses and the last on held-out items."""
    command = [sys.executable, str(ROOT / "launch" / "train.py"), "-m", "+experiment=multi_lora", f"mode={mode}"]
    command += [*overrides, "report.wandb.enabled=false", f"run.sweep_root={folder}", f"run.root={folder / 'latest'}"]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=LIMIT_S
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    (where,) = folder.glob("20*")
    losses = {}
    for job in sorted(path for path in where.iterdir() if path.is_dir()):
        records = list(read_lines(job / "metrics.jsonl"))
        held = [r["eval/loss"] for r in records if "eval/loss" in r]
        losses[job.name] = [r["train/loss"] for r in records if "train/loss" in r] + held[-1:]
    return {"makespan_s": seconds, "losses": losses}


def main() -> int:
    """Command line; 1 if a claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    overrides = QUICK if options.quick else SWEEP
    with tempfile.TemporaryDirectory() as folder:
        packed = sweep("multi_lora", overrides, Path(folder) / "packed")
        alone = sweep("sft", overrides, Path(folder) / "alone")
    gap = max(
        abs(a - b) / abs(b)
        for job, losses in alone["losses"].items()
        for a, b in zip(packed["losses"][job], losses, strict=True)
    )
    ratio = packed["makespan_s"] / alone["makespan_s"]
    jobs = len(alone["losses"])
    print(f"{jobs} jobs: packed {packed['makespan_s']:.1f} s, one after another {alone['makespan_s']:.1f} s")
    for job, losses in alone["losses"].items():
        print(f"{job:40s} held-out loss packed {packed['losses'][job][-1]:.5f}, alone {losses[-1]:.5f}")
    claims = [
        at_most("makespan, packed over one after another", ratio, 1.0),
        at_most("largest relative difference of any loss of any job", gap, 1e-3),
    ]
    figures = {"jobs": jobs, "packed": packed, "one after another": alone}
    return report("multi_lora_sweep", figures, claims, json_file=options.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
