"""Our fine-tuning on one JSON job: the loop of asyncrl/modes/sft.py as it is, with a meter where its reporter would be.

    python -m benchmarks.sft_run job.json result.json

``job``: ``config`` (as in a run's config.json), ``run_dir`` and ``gpu``. Encoding and packing are part of each step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as runs have it; OpenMP reads it when torch loads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from asyncrl.config.context import Place, RunContext
from asyncrl.config.files import from_dict
from asyncrl.modes.sft import train
from benchmarks.meter import Meter


class Recorder:
    """Takes the place of the reporter: starts the meter when all is loaded, notes each step."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def event(self, text: str, **_: Any) -> None:
        print(text)

    def start_training(self) -> None:
        self.meter.start()

    def step(self, figures: Mapping[str, Any]) -> None:
        keys = ("loss", "grad_norm", "tokens", "padding_share", "packing_efficiency", "micro_batches")
        self.meter.step(**{key: float(figures[f"train/{key}"]) for key in keys})


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    meter = Meter(job["gpu"])
    context = RunContext(Place(), Path(job["run_dir"]))
    context.run_dir.mkdir(parents=True, exist_ok=True)
    train(from_dict(job["config"]), context, Recorder(meter))  # type: ignore[arg-type]
    Path(sys.argv[2]).write_text(json.dumps(meter.result(), indent=1))
    context.close()


if __name__ == "__main__":
    main()
