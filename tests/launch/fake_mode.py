"""launch/train.py with a fake in place of asyncrl.modes.grpo, for tests of what surrounds a mode.

The first argument says what the fake does; the rest is launch/train.py's own command line.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
behaviour = sys.argv.pop(1)


def run(config, context):
    from asyncrl.config.errors import RunFailed

    assert "torch" not in sys.modules or context.rank > 0 or context.job > 0, "torch was imported before the mode"
    if behaviour == "offline":
        from asyncrl.config.offline import OFFLINE

        print(json.dumps({name: os.environ.get(name) for name in OFFLINE}), flush=True)
    lr, attempt = config.optim.lr, context.place.attempt
    print(f"rank {context.rank} job {context.job} attempt {attempt} lr {lr:g} resume {bool(config.resume)}", flush=True)
    print(f"folder {context.run_dir}", flush=True)
    context.init_process_group("gloo", timeout_s=60.0)
    if behaviour == "run_failed":
        raise RunFailed("no group had reward variance")
    if behaviour == "bug" or (behaviour == "fail_once_in_job_1" and context.job == 1 and attempt == 0):
        raise ZeroDivisionError("a bug")
    if behaviour == "report" and context.rank == 0:
        from asyncrl.report.reporter import Reporter

        reporter = Reporter(context.run_dir, config)
        reporter.step({"step": 1, "train/lr": lr})
        reporter.finish(reporter.summary("finished"), deadline_s=120.0)
    if behaviour == "wait":
        print("waiting", flush=True)
        while True:  # a main thread that notices a signal, whichever thread the kernel gives it to
            time.sleep(0.1)
    if behaviour == "interrupt":
        raise KeyboardInterrupt


fake = types.ModuleType("asyncrl.modes.grpo")
fake.run = run  # type: ignore[attr-defined]
sys.modules["asyncrl.modes.grpo"] = fake
sys.argv[0] = str(ROOT / "launch" / "train.py")
runpy.run_path(sys.argv[0], run_name="__main__")
