"""What each lever of fine-tuning saves and costs: alone against a plain trainer, and one on top of the other.

    python -m benchmarks.sft_levers [--quick] [--json FILE]

The table that torchtune's README has, by one command, each row a process of its own: tokens a second (real ones,
padding is none) and peak memory. A Llama with random weights; conversations of varied lengths, the same in every row,
learnt in micro-batches of a token budget.

The baseline is plain: conversations padded to the longest of the batch, all logits of all positions by transformers,
cross-entropy in fp32, AdamW after the backward pass. Our trainer has neither padded rows nor all logits, so these two
are built in ``sft_levers_run.py``; everything else is the trainer with the keys that a user sets:

packing                    conversations behind each other, attention by document
compile                    trainer.compile=true (on a GPU)
chunked loss               the policy-loss head: logits of one chunk of the learnt tokens, three products
activation checkpointing   trainer.activation_checkpointing=full
in-backward                optim.in_backward=true
offload                    trainer.activation_offload=true (on a GPU)
8-bit                      AdamW's states by torchao, where that is installed; ours has none

Without a GPU: 10 M parameters in fp32, seconds of the processor, resident memory above loading, levers that make sense
there. On a GPU: 1.5 B parameters in bf16 (``--quick``: 135 M, each alone and all together, about 100 s).

Expected. Of padded rows a third to a half is real (lengths are log-normal), so packing alone should double to treble
the tokens a second and divide activations and logits alike. The chunked loss replaces logits in two dtypes, their
gradient and the softmax (12 to 16 bytes a token and vocabulary entry) by one chunk, and leaves out what is not learnt:
most of the memory where the vocabulary is large against width times layers. Checkpointing costs a forward, a third more
products, and leaves each layer's input. In-backward saves the gradient, 4 bytes a weight in fp32, if the peak is there:
little in this table, whose peak is in the activations. Together: at least 1.5 times the tokens a second of the baseline
in at most half of its memory above loading.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness import Claim, arguments, at_least, at_most, report
from benchmarks.jobs import run_job
from benchmarks.sft_vs_trl import THREADS, rates, worst_difference
from benchmarks.talks import LARGE, LEVERS, SMOLLM2, Shape
from requirements.env import has_nvidia_driver

LADDER = ("packing", "compile", "chunked loss", "activation checkpointing", "in-backward", "offload", "8-bit")
GPU_ONLY = ("compile", "offload")
BASELINE = "baseline"


@dataclass(frozen=True)
class Plan:
    gpu: bool
    shape: Shape
    batch: int  # conversations a step
    stretch: float  # their length, in those of benchmarks/talks.py
    budget: int  # tokens a micro-batch: a whole batch, padded, so that in-backward has no gradients to keep
    steps: int
    warm: int
    each: bool = True  # every rung of the ladder, not the last only


def plan_of(gpu: bool, quick: bool) -> Plan:
    if not gpu:
        return Plan(False, LEVERS, 8, 1.0, 8192, 3 if quick else 5, 1, each=not quick)
    if quick:
        return Plan(True, SMOLLM2, 32, 2.0, 65_536, 8, 3, each=False)
    return Plan(True, LARGE, 8, 2.0, 16_384, 8, 3)


def not_offered(gpu: bool, torchao: bool) -> dict[str, str]:
    """Levers that are left out on this machine, and why."""
    found = {} if torchao and gpu else {"8-bit": "needs a GPU" if torchao else "not offered: torchao is not installed"}
    return found if gpu else found | {name: "on a GPU only" for name in GPU_ONLY}


def rows_of(left_out: Sequence[str], each: bool) -> dict[str, list[str]]:
    """Levers of each row by its name: the baseline, each alone, then each with those before it.

    In-backward has its own AdamW, so 8-bit states take its place, as in torchtune.
    """
    usable = [name for name in LADDER if name not in left_out]
    rows: dict[str, list[str]] = {BASELINE: []} | {f"{name} alone": [name] for name in usable}
    for count in range(2, len(usable) + 1):
        levers = usable[:count]
        if "8-bit" in levers:
            levers = [name for name in levers if name != "in-backward"]
        if each or count == len(usable):
            rows[f"+ {usable[count - 1]}"] = levers
    return rows


def run(plan: Plan, rows: dict[str, list[str]], folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    fixed = {key: value for key, value in asdict(plan).items() if key not in ("warm", "each")}
    for number, (name, levers) in enumerate(rows.items()):
        job = fixed | {"levers": levers, "threads": THREADS}
        leg = run_job(sys.executable, "sft_levers_run", job, folder, f"row{number}")
        if "error" in leg:
            raise SystemExit(f"{name}: {leg['error']}")
        found[name] = figures_of(leg, levers, plan.warm)
        show(name, found[name], found[BASELINE], plan.gpu)
    return found


def figures_of(leg: dict[str, Any], levers: list[str], warm: int) -> dict[str, Any]:
    return {
        "levers": levers,
        **rates(leg["steps"], warm),
        "peak_bytes": leg["peak_bytes"],
        "above_loaded_bytes": leg["peak_bytes"] - leg["loaded_bytes"],
        "micro_batches": leg["steps"][-1]["micro_batches"],
        "losses": [step["loss"] for step in leg["steps"]],
    }


def speed_key(gpu: bool) -> str:
    return "tokens_per_s" if gpu else "tokens_per_cpu_s"


def show(name: str, row: dict[str, Any], base: dict[str, Any], gpu: bool) -> None:
    key, memory = speed_key(gpu), "peak_bytes" if gpu else "above_loaded_bytes"
    print(
        f"  {name:30s} {row[key]:10.1f} tokens/s {row[key] / base[key]:6.2f}   "
        f"{row[memory] / 2**20:9.0f} MiB {row[memory] / base[memory]:6.2f}   loss {row['losses'][-1]:.5f}",
        flush=True,
    )


def compare(rows: dict[str, dict[str, Any]], gpu: bool) -> list[Claim]:
    """Of each lever what it is for, and of all together (the last row) both."""
    key, memory, base = speed_key(gpu), "peak_bytes" if gpu else "above_loaded_bytes", rows[BASELINE]

    def speed(name: str) -> float:
        return rows[name][key] / base[key]

    def size(name: str) -> float:
        return rows[name][memory] / base[memory]

    last = list(rows)[-1]
    wrong = max(worst_difference(row["losses"], base["losses"]) for row in rows.values())
    claims = [
        at_least("packing alone: tokens per second over the baseline's", speed("packing alone"), 1.5),
        at_most("chunked loss alone: memory over the baseline's", size("chunked loss alone"), 0.8),
        at_most(
            "activation checkpointing alone: memory over the baseline's", size("activation checkpointing alone"), 0.9
        ),
        at_most("in-backward alone: memory over the baseline's", size("in-backward alone"), 1.02),
        at_least("together: tokens per second over the baseline's", speed(last), 1.5),
        at_most("together: memory over the baseline's", size(last), 0.5),
        at_most("worst relative difference of a row's loss", wrong, 2e-2 if gpu else 1e-4),
    ]
    if gpu:
        claims.append(at_least("compile alone: tokens per second over the baseline's", speed("compile alone"), 1.05))
        claims.append(at_most("offload alone: memory over the baseline's", size("offload alone"), 0.9))
    return claims


def main() -> int:
    """Command line; 1 if a claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    gpu = has_nvidia_driver()
    if not gpu:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    plan, left_out = plan_of(gpu, options.quick), not_offered(gpu, find_spec("torchao") is not None)
    for name, reason in left_out.items():
        print(f"  {name:30s} {reason}")
    with tempfile.TemporaryDirectory(prefix="sft_levers-") as name:
        rows = run(plan, rows_of(list(left_out), plan.each), Path(name))
    figures = {"plan": asdict(plan), "threads": THREADS, "rows": rows, "left_out": left_out}
    packages = ("torch", "transformers", "torchao")
    return report("sft_levers", figures, compare(rows, gpu), json_file=options.json, packages=packages)


if __name__ == "__main__":
    sys.exit(main())
