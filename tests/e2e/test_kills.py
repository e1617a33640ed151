"""A generator killed at any moment is restarted, rejoins with current weights, and what it owed is asked for again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import Launch, gone, interrupt, ledger_rows, settings, steps, summary, trained_once, until
from tests.e2e.faults import ANNOUNCED, HOLDING, LOADING, SAMPLING, STARTING, TRANSFER, VERIFIED, Fault, happened, plan

pytestmark = pytest.mark.timeout(900)

FEW = [
    Fault(STARTING, "kill parent"),
    Fault(SAMPLING, "kill", nth=20),  # 19 samples are in flight
    Fault(LOADING, "kill parent", nth=2),  # generation is paused
]
ALL = [
    *FEW,
    Fault(ANNOUNCED, "kill parent"),  # before it is ready; its first push
    Fault(ANNOUNCED, "kill parent", nth=2),
    Fault(TRANSFER, "kill parent", nth=2),
    Fault(VERIFIED, "kill", nth=2),  # every byte is verified, nothing loaded
    Fault(VERIFIED, "kill", nth=2, after=True),  # it has committed and told nobody
    Fault(ANNOUNCED, "kill", nth=2),  # EngineCore alone, its frontend lives
    Fault(LOADING, "kill", nth=2),  # the same while generation is paused
]


def events(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def check_rejoins(run_dir: Path, name: str, at_least: int) -> None:
    """``name`` has come back ``at_least`` times, each time with weights that were current."""
    served = [e for e in events(run_dir) if e["text"].startswith(f"{name} serves version ")]
    assert len(served) > at_least
    for event in served:
        # the push of the version that has just been trained may be on its way
        assert int(event["text"].rpartition(" ")[2]) >= event["step"] - 1, event


def test_killed_at_one_moment_after_another(tmp_path):
    """verl #7155, #3895, TRL #6628, SkyRL #1691: a trainer that waits for ever on a dead engine.

    verl-omni #433: requests of a dead engine came back as if they had been answered.
    """
    run_dir = tmp_path / "run"
    more = {"trainer__steps": 10, "generator__max_restarts": len(FEW), "checkpoint__every": 0}
    launch = Launch(settings(run_dir, **more), env=plan(tmp_path / "plan", *FEW))
    launch.start(tmp_path / "output.log")
    code, everything = launch.wait_watching()
    assert code == 0, launch.output
    assert not gone(list(everything), 10), "a process outlived the generator that was killed"
    assert happened(tmp_path / "plan") == len(FEW)
    result = summary(run_dir)
    assert result["ended"] == "finished" and result["steps"] == 10 and result["staleness_max"] <= 1
    assert result["generator_restarts"] == len(FEW), "the first was killed before it had greeted the controller"
    assert f"generator/0 died (killed by SIGKILL); restart {len(FEW)} of {len(FEW)}" in launch.output
    check_rejoins(run_dir, "generator/0", len(FEW) - 1)
    assert trained_once(run_dir)
    assert ledger_rows(run_dir, "SELECT count(*) FROM groups WHERE dispatches > 1")[0][0] > 0


@pytest.mark.slow
def test_training_goes_on_beside_a_generator_that_is_killed_at_every_moment(tmp_path):
    run_dir = tmp_path / "run"
    more = {
        "trainer__steps": 100_000,
        "checkpoint__every": 0,
        "generator__replicas": 2,
        "transport__dead_after_s": 6,
    }
    launch = Launch(settings(run_dir, generator__max_restarts=2 * len(ALL), **more), env=plan(tmp_path / "plan", *ALL))
    launch.start(tmp_path / "output.log")
    seen = []
    for number in range(1, len(ALL) + 1):
        until(lambda number=number: happened(tmp_path / "plan") >= number, f"fault {number}", launch)
        seen.append(len(steps(run_dir)))
        until(lambda: len(steps(run_dir)) >= seen[-1] + 2, f"two steps after fault {number}", launch)
    interrupt(launch)
    assert launch.wait() != 0
    assert summary(run_dir)["ended"] == "interrupted" and summary(run_dir)["staleness_max"] <= 1
    assert trained_once(run_dir)
    restarts = launch.output.count("; restart ")
    assert restarts == len(ALL), launch.output


@pytest.mark.slow
def test_a_generator_whose_event_loop_is_held_is_restarted(tmp_path):
    """Its supervisor sees processes end, and nothing in a loop that is held can end it."""
    run_dir = tmp_path / "run"
    more = {"generator__token_deadline_s": 10, "transport__dead_after_s": 6}
    launch = Launch(settings(run_dir, **more), env=plan(tmp_path / "plan", Fault(HOLDING, "hold", nth=20)))
    launch.start(tmp_path / "output.log")
    code, everything = launch.wait_watching()
    assert code == 0 and not gone(list(everything), 10), launch.output
    assert happened(tmp_path / "plan") == 1 and summary(run_dir)["ended"] == "finished"
    assert "generator/0 died (exit code 1: waited 10 s for a call that holds the event loop to return" in launch.output
    assert trained_once(run_dir)
