"""Kills and errors at exact points of a real run, without a clock; see ``faulty/sitecustomize.py``.

    launch = Launch(settings(run_dir), env=plan(tmp_path / "plan", Fault(LOADING, do="kill parent")))

A function of a module that runs as ``python -m`` cannot be named: Python does not import it under its name.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

FAULTY = Path(__file__).with_name("faulty")


@dataclass
class Fault:
    """At the ``nth`` call (of one process) of ``module:function``, before it or ``after`` it.

    ``kill`` is SIGKILL, ``raise`` a RuntimeError with ``text``, ``no space`` the error of a full disk, ``hold`` never
    returns. ``always``: from the nth call on at every call, in every process.
    """

    at: str
    do: Literal["kill", "kill parent", "raise", "no space", "hold"] = "kill"
    nth: int = 1
    after: bool = False
    text: str = ""
    always: bool = False


def plan(folder: Path, *faults: Fault) -> dict[str, str]:
    """Environment of a run in which ``faults`` happen one after the other."""
    folder.mkdir()
    path = folder / "plan.json"
    path.write_text(json.dumps([asdict(fault) for fault in faults]))
    python_path = os.pathsep.join([str(FAULTY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"ASYNCRL_TEST_FAULTS": str(path), "PYTHONPATH": python_path}


def happened(folder: Path) -> int:
    """How many faults of the plan in ``folder`` have happened."""
    return sum(path.name.isdigit() for path in folder.iterdir())


# Points in the life of a generator. EngineCore is its child: "kill parent" there ends the generator, which ends both.
STARTING = "vllm.v1.engine.core:EngineCore.__init__"  # in EngineCore: the engine is starting
ANNOUNCED = "asyncrl.weights.staging:Receiver._announced"  # in EngineCore: a version is announced, not yet "ready"
TRANSFER = "asyncrl.weights.manifest:Staged.write"  # in EngineCore: a chunk has come
HOLDING = "asyncrl.actors.engine:Engine._params"  # in the generator, inside its event loop
SAMPLING = "asyncrl.actors.engine:Engine._draw"  # in the generator: one sample is to be drawn
VERIFIED = "asyncrl.actors.engine:Engine.update"  # in the generator: bytes are verified, told to load
LOADING = "asyncrl.weights.vllm_backend:ZmqWeightTransferEngine.receive_weights"  # in EngineCore: paused
