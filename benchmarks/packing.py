"""How much waiting a packing plan leaves: the step's cost over its floor (asyncrl.rollouts.packing), minus one.

ours         longest first over all bins, bins of similar size share a micro-batch
in order     samples in order of arrival into micro-batches of the budget, dealt to the ranks in turn (the usual way)
sorted       the same after sorting by length

Lengths are log-normal (median 400 tokens, sigma 0.8, at most 4096), as of reasoning answers; budget 16384 tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

from asyncrl.rollouts.packing import plan
from benchmarks.harness import Claim, arguments, at_most, report

BUDGET = 16_384


def lengths_of(samples: int, seed: int) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 0.8, samples), 16, 4096).astype(int).tolist()


def dealt(lengths: list[int], ranks: int) -> tuple[int, float]:
    """(micro-batches, imbalance) of filling bins in the given order and dealing them to the ranks in turn."""
    bins = [0]
    for length in lengths:
        if bins[-1] + length > BUDGET:
            bins.append(0)
        bins[-1] += length
    micro = -(-len(bins) // ranks)
    cost = sum(max(bins[start : start + ranks]) for start in range(0, len(bins), ranks))
    return micro, cost * ranks / sum(lengths) - 1


def compare(samples: int, ranks: int, repeats: int) -> dict[str, Any]:
    rows: dict[str, list[tuple[int, float]]] = {"ours": [], "in order": [], "sorted": []}
    seconds = []
    for seed in range(repeats):
        lengths = lengths_of(samples, seed)
        began = time.perf_counter()
        packed = plan(lengths, ranks, BUDGET)
        seconds.append(time.perf_counter() - began)
        rows["ours"].append((packed.micro_batches, packed.imbalance))
        rows["in order"].append(dealt(lengths, ranks))
        rows["sorted"].append(dealt(sorted(lengths, reverse=True), ranks))
    return {
        "plan_ms": 1e3 * statistics.median(seconds),
        **{
            name: {
                "micro_batches": statistics.mean(micro for micro, _ in row),
                "imbalance_mean": statistics.mean(imbalance for _, imbalance in row),
                "imbalance_max": max(imbalance for _, imbalance in row),
            }
            for name, row in rows.items()
        },
    }


def main() -> int:
    options = arguments(__doc__ or "")
    repeats = 5 if options.quick else 50
    figures: dict[str, Any] = {"budget": BUDGET, "repeats": repeats}
    claims: list[Claim] = []
    for samples, ranks in ((512, 1), (512, 2), (512, 8), (512, 64), (4096, 8), (4096, 64)):
        figures[f"{samples} samples, {ranks} ranks"] = result = compare(samples, ranks, repeats)
        for name in ("ours", "in order", "sorted"):
            row = result[name]
            print(
                f"{samples:5d} samples {ranks:3d} ranks  {name:9s} {row['micro_batches']:6.1f} micro-batches  "
                f"waiting {100 * row['imbalance_mean']:6.2f} % mean  {100 * row['imbalance_max']:6.2f} % worst"
            )
        print(f"{'':25s} plan made in {result['plan_ms']:.2f} ms")
        if samples // ranks >= 64:
            claims.append(
                at_most(f"waiting, {samples} samples on {ranks} ranks", result["ours"]["imbalance_max"], 0.01)
            )
    return report("packing", figures, claims, json_file=options.json, packages=("numpy",))


if __name__ == "__main__":
    sys.exit(main())
