"""How close the planner comes to the makespan that nothing can beat, and what simpler ways of running a sweep take.

In simulation, 120 LoRA jobs on 8 devices (asyncrl.lora.schedule; steps cost what asyncrl.lora.cost says):

one at a time    on one device, one job after another
one a device     a job at a time on each device, longest first
static packs     rank-greedy packs (PLoRA, arXiv 2508.02932: the most rank a second under the memory limit), each
                 trained until its last job ends, longest pack first
ours             the plan of asyncrl.lora.planner

The coefficients are arithmetic from 790 TFLOP/s and published sizes, not measurements: 7B with 15.2 GB and 0.5B bases
resident (floor: CUDA-graphed steps), 70B with its weights streamed at 50 GB/s. Batches 1, 2 or 4; 4000 samples a job.
"""

from __future__ import annotations

import random
import statistics
import sys
from typing import Any

from asyncrl.lora.bound import lower_bound, pack_seconds
from asyncrl.lora.cost import StepTime, job_load
from asyncrl.lora.jobs import Machine, PlanJob
from asyncrl.lora.planner import plan
from asyncrl.lora.schedule import by_path, simulate
from benchmarks.harness import Claim, arguments, at_most, report

DEVICES, JOBS, SAMPLES = 8, 120, 4000
RANKS, BATCHES = (8, 16, 32, 64, 128), (1, 2, 4)


def step_time(parameters: float, floor: float) -> StepTime:
    """Forward, and the backward pass to the activations: 4 FLOP a parameter and token; 15 % for what is no product."""
    return StepTime(floor + 5e-4, 5e-4, 1.15 * 4 * parameters / 790e12, per_rank_token=1e-11, per_job=2e-5)


# name: step time, lengths of documents, bytes of state a unit of rank, bytes for adapters on a device
SCENARIOS: dict[str, tuple[StepTime, tuple[int, ...], float, float]] = {
    "7B, 32-64 tokens": (step_time(7.6e9, 8e-3), (32, 64), 45e6, 100e9),
    "7B, 128-256 tokens": (step_time(7.6e9, 8e-3), (128, 256), 45e6, 100e9),
    "7B, 1024 tokens": (step_time(7.6e9, 8e-3), (1024,), 45e6, 100e9),
    "0.5B, 128-256 tokens": (step_time(0.5e9, 2e-3), (128, 256), 10e6, 100e9),
    "70B streamed, 512 tokens": (step_time(70e9, 5.6), (512,), 230e6, 100e9),
}


def drawn_jobs(lengths: tuple[int, ...], rank_bytes: float, seed: int) -> list[PlanJob]:
    draw = random.Random(seed)
    jobs = []
    for number in range(JOBS):
        batch, length, rank = draw.choice(BATCHES), draw.choice(lengths), draw.choice(RANKS)
        load = job_load([length] * batch, rank)
        jobs.append(PlanJob(f"job{number}", SAMPLES // batch, load, rank_bytes * rank))
    return jobs


def one_at_a_time(jobs: list[PlanJob], machine: Machine, cost: StepTime) -> float:
    return sum(job.steps * pack_seconds([job], cost, machine) for job in jobs)


def one_a_device(jobs: list[PlanJob], machine: Machine, cost: StepTime) -> float:
    alone = Machine(machine.replicas, 1, machine.tokens, machine.state_bytes)
    return simulate([by_path(jobs, cost, alone)], alone, cost, alone.tokens).seconds


def static_packs(jobs: list[PlanJob], machine: Machine, cost: StepTime) -> float:
    """Packs by descending rank; the size of each maximises its sum of ranks over its step time."""
    left = sorted(jobs, key=lambda job: (-job.state_bytes, job.name))
    packs: list[list[PlanJob]] = []
    while left:
        fitting = [size for size in range(1, len(left) + 1) if size == 1 or fits(left[:size], machine)]
        rate = {n: sum(j.state_bytes for j in left[:n]) / pack_seconds(left[:n], cost, machine) for n in fitting}
        size = max(rate, key=lambda n: rate[n])
        packs.append(left[:size])
        left = left[size:]
    ends = [0.0] * machine.replicas
    for seconds in sorted((pack_alone(pack, machine, cost) for pack in packs), reverse=True):
        ends[ends.index(min(ends))] += seconds
    return max(ends)


def fits(pack: list[PlanJob], machine: Machine) -> bool:
    tokens, state = sum(job.load.tokens for job in pack), sum(job.state_bytes for job in pack)
    return len(pack) <= machine.slots and tokens <= machine.tokens and state <= machine.state_bytes


def pack_alone(pack: list[PlanJob], machine: Machine, cost: StepTime) -> float:
    """Of one pack on one device, whose slots stay empty when a job has ended."""
    one = Machine(1, machine.slots, machine.tokens, machine.state_bytes)
    return simulate([by_path(pack, cost, one)], one, cost, one.tokens).seconds


def compare(name: str, slots: int, seeds: int) -> dict[str, Any]:
    cost, lengths, rank_bytes, memory = SCENARIOS[name]
    machine = Machine(DEVICES, slots, 32_768, memory)
    ways = {"one at a time": one_at_a_time, "one a device": one_a_device, "static packs": static_packs}
    rows: dict[str, list[float]] = {"ours": [], **{way: [] for way in ways}}
    for seed in range(seeds):
        jobs = drawn_jobs(lengths, rank_bytes, seed)
        bound = lower_bound(jobs, machine, cost)
        rows["ours"].append(plan(jobs, machine, cost).outcome.seconds / bound)
        for way, seconds in ways.items():
            rows[way].append(seconds(jobs, machine, cost) / bound)
    return {way: {"mean": statistics.mean(ratios), "worst": max(ratios)} for way, ratios in rows.items()}


def main() -> int:
    options = arguments(__doc__ or "")
    seeds = 1 if options.quick else 3
    figures: dict[str, Any] = {"devices": DEVICES, "jobs": JOBS, "seeds": seeds}
    claims: list[Claim] = []
    print("makespan over the lower bound, mean (worst)")
    for name in SCENARIOS:
        for slots in (24, 4):
            figures[f"{name}, {slots} slots"] = result = compare(name, slots, seeds)
            row = "  ".join(f"{way} {r['mean']:.3f} ({r['worst']:.3f})" for way, r in result.items())
            print(f"{name + f', {slots} slots':34s} {row}", flush=True)
            claims.append(at_most(f"ours over the bound, {name}, {slots} slots", result["ours"]["worst"], 1.10))
    return report("lora_planner", figures, claims, json_file=options.json, packages=("ortools",))


if __name__ == "__main__":
    sys.exit(main())
