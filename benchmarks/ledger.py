"""What the ledger costs a step of 32 groups of 16 samples.

ours, grouped     one transaction for every 16 samples, as an engine step finishes them
ours, one by one  a transaction for each sample and each score
json lines        the usual rollout file: one JSON object a sample, lists of numbers, fsynced once a step
floor             the payload bytes alone, appended to one file, fsynced once a step

CPU time is what the controller's loop loses; wall time also holds the fsyncs, which depend on the disk.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.segments import encode_prompt, encode_sample
from asyncrl.rollouts.types import Group, Prompt, Sample
from benchmarks.harness import arguments, at_most, report

GROUPS, SIZE, AT_ONCE = 32, 16, 16
STEP_S = 1.0  # the step that the shares refer to


def groups_of(step: int, tokens: int) -> list[Group]:
    """A batch of groups with all their samples."""
    rng = np.random.default_rng(step)
    groups = []
    for number in range(GROUPS):
        ordinal = step * GROUPS + number
        prompt = Prompt(
            f"train:{ordinal}", ordinal, np.arange(64, dtype=np.int32), {"question": "q" * 80, "answer": "4"}
        )
        samples = [
            Sample(
                ordinal,
                index,
                rng.integers(0, 150_000, tokens, dtype=np.int32),
                -rng.random(tokens, dtype=np.float32),
                np.full(tokens, step, np.int32),
                "stop",
                "generator/0",
                text="t" * (4 * tokens),
            )
            for index in range(SIZE)
        ]
        groups.append(Group(ordinal, prompt, samples))
    return groups


def in_arrival_order(groups: list[Group]) -> list[Sample]:
    return [group.samples[index] for index in range(SIZE) for group in groups]


def chunks(samples: list[Sample]) -> Iterable[list[Sample]]:
    return (samples[start : start + AT_ONCE] for start in range(0, len(samples), AT_ONCE))


def ledger_step(ledger: Ledger, step: int, groups: list[Group], grouped: bool) -> None:
    """Everything a step records: dispatch, samples, scores, the cut, its outcome, one commit."""

    def together() -> AbstractContextManager[None]:
        return ledger.transaction() if grouped else nullcontext()

    with together():
        for group in groups:
            ledger.dispatched(group, "generator/0", size=SIZE, version=step, cursor={"epoch": 0, "position": 1})
    for some in chunks(in_arrival_order(groups)):
        with together():
            for sample in some:
                ledger.sample(sample)
    for group in groups:
        with together():
            for sample in group.samples:
                ledger.scored(sample.ordinal, sample.index, reward=1.0)
    ledger.cut(step, [group.ordinal for group in groups])
    ledger.step(step, "trained", {"loss": 0.1, "grad_norm": 1.0})
    ledger.committed("generator/0", step + 1)


def json_step(file: Any, groups: list[Group]) -> None:
    for sample in in_arrival_order(groups):
        record = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sample).items()
        }
        file.write(json.dumps(record) + "\n")
        file.flush()
    os.fsync(file.fileno())


def payload_step(fd: int, groups: list[Group]) -> None:
    for group in groups:
        os.write(fd, encode_prompt(group.prompt))
    for some in chunks(in_arrival_order(groups)):
        os.write(fd, b"".join(encode_sample(sample) for sample in some))
    os.fsync(fd)


def measure(steps: int, tokens: int, one: Callable[[int, list[Group]], None]) -> dict[str, float]:
    """Medians over steps, in milliseconds; the first step is not counted."""
    cpu, wall = [], []
    for step in range(steps + 1):
        groups = groups_of(step, tokens)
        cpu_0, wall_0 = time.process_time(), time.perf_counter()
        one(step, groups)
        cpu.append(1e3 * (time.process_time() - cpu_0))
        wall.append(1e3 * (time.perf_counter() - wall_0))
    return {"cpu_ms": statistics.median(cpu[1:]), "wall_ms": statistics.median(wall[1:])}


def run(tokens: int, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    figures = {}
    for name, grouped in (("ours, grouped", True), ("ours, one by one", False)):
        with Ledger(folder / f"{name}-{tokens}") as ledger:
            figures[name] = measure(
                steps, tokens, lambda step, groups, to=ledger, how=grouped: ledger_step(to, step, groups, how)
            )
    with open(folder / f"{tokens}.jsonl", "w") as file:
        figures["json lines"] = measure(steps, tokens, lambda _, groups: json_step(file, groups))
    with open(folder / f"{tokens}.bin", "wb", buffering=0) as raw:
        figures["floor"] = measure(steps, tokens, lambda _, groups: payload_step(raw.fileno(), groups))
    return figures


def main() -> int:
    options = arguments(__doc__ or "")
    steps = 5 if options.quick else 30
    figures: dict[str, Any] = {"groups": GROUPS, "group_size": SIZE, "at_once": AT_ONCE}
    print(f"{GROUPS * SIZE} samples a step; median of {steps} steps")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for tokens in (16, 256, 1024):
            figures[f"{tokens} tokens"] = measured = run(tokens, steps, Path(folder))
            for name, value in measured.items():
                print(f"{tokens:5d} tokens  {name:17s} cpu {value['cpu_ms']:7.2f} ms  wall {value['wall_ms']:7.2f} ms")
    short, long = figures["16 tokens"], figures["1024 tokens"]
    events_ms = short["ours, grouped"]["cpu_ms"] - short["floor"]["cpu_ms"]
    claims = [
        at_most("CPU of the events, share of a 1 s step", events_ms / 1e3 / STEP_S, 0.01),
        at_most(
            "CPU against JSON lines, 1024 tokens", long["ours, grouped"]["cpu_ms"] / long["json lines"]["cpu_ms"], 0.5
        ),
    ]
    return report("ledger", figures, claims, json_file=options.json, packages=("numpy",))


if __name__ == "__main__":
    sys.exit(main())
