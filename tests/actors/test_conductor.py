"""What the controller waits for at the end of a run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors.conductor import Conductor
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.transport.frames import Message


def conductor(**deadlines: float) -> Any:
    cfg = Config()
    cfg.trainer.steps = 4
    for name, seconds in deadlines.items():
        setattr(cfg.deadline, name, seconds)
    desk = SimpleNamespace(fleet=SimpleNamespace(live=["generator/0"], in_flight=0), evaluated={0, 4})
    ledger = SimpleNamespace(saved=[])
    ledger.checkpoint = ledger.saved.append
    progress = SimpleNamespace(event=lambda text: None)
    made = Conductor(cfg, 1, None, desk, ledger, progress, None)  # type: ignore[arg-type]
    made.trainers = {0: "trainer/0"}
    return made


def test_a_run_ends_once_its_last_checkpoint_is_complete():
    made = conductor()
    made.version, made.saved_version = 4, 2
    assert not made._finished
    made._on_saved(Message("saved", {"version": 4, "path": "x"}, (), peer="trainer/0"))
    assert made._finished and made.ledger.saved == [4]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (4, r"waited 0\.02 s for checkpoint 4 to be written \(deadline\.checkpoint_s\)"),
        (3, r"waited 0\.01 s for the trainers to report step 3 \(deadline\.batch_s\)"),
    ],
)
def test_the_last_checkpoint_has_a_deadline_of_its_own_and_is_named(version, reason):
    made = conductor(batch_s=0.01, checkpoint_s=0.02)
    made.version = version
    with pytest.raises(RunFailed, match=reason):
        asyncio.run(made._next_reaction())
