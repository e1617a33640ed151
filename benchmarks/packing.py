"""How much waiting a packing plan leaves: the step's cost over its floor (asyncrl.rollouts.packing), minus one.

ours         longest first over all bins, bins of similar size share a micro-batch
equal count  each rank gets every n-th sample and fills its micro-batches in order of arrival
in order     micro-batches are filled in order of arrival and dealt to the ranks in turn

Lengths are log-normal (median 400 tokens, sigma 0.8, at most 4096), as of reasoning answers; budget 16384 tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from itertools import zip_longest
from typing import Any

import numpy as np

from asyncrl.rollouts.packing import plan
from benchmarks.harness import Claim, arguments, at_most, report

BUDGET = 16_384


def lengths_of(samples: int, seed: int) -> list[int]:
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 0.8, samples), 16, 4096).astype(int).tolist()


def filled(lengths: list[int]) -> list[int]:
    """Tokens of the micro-batches that hold ``lengths`` in this order."""
    bins = [0]
    for length in lengths:
        if bins[-1] + length > BUDGET:
            bins.append(0)
        bins[-1] += length
    return bins


def waiting(loads: list[list[int]], total: int) -> tuple[int, float]:
    """(micro-batches, cost over the floor minus one) of the token counts of each rank's micro-batches."""
    steps = list(zip_longest(*loads, fillvalue=0))
    return len(steps), sum(map(max, steps)) * len(loads) / total - 1


def equal_count(lengths: list[int], ranks: int) -> tuple[int, float]:
    return waiting([filled(lengths[rank::ranks]) for rank in range(ranks)], sum(lengths))


def in_order(lengths: list[int], ranks: int) -> tuple[int, float]:
    bins = filled(lengths)
    return waiting([bins[rank::ranks] for rank in range(ranks)], sum(lengths))


def compare(samples: int, ranks: int, repeats: int) -> dict[str, Any]:
    rows: dict[str, list[tuple[int, float]]] = {"ours": [], "equal count": [], "in order": []}
    seconds = []
    for seed in range(repeats):
        lengths = lengths_of(samples, seed)
        began = time.perf_counter()
        packed = plan(lengths, ranks, BUDGET)
        seconds.append(time.perf_counter() - began)
        rows["ours"].append((packed.micro_batches, packed.imbalance))
        rows["equal count"].append(equal_count(lengths, ranks))
        rows["in order"].append(in_order(lengths, ranks))
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
        for name in ("ours", "equal count", "in order"):
            row = result[name]
            print(
                f"{samples:5d} samples {ranks:3d} ranks  {name:11s} {row['micro_batches']:6.1f} micro-batches  "
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
