"""What a user gets for bad input and bad luck: one clear error or a counter, and nothing lost."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from asyncrl.training.files import verify
from asyncrl.transport.keys import main as keys_main
from tests.e2e.command import ROOT, Launch, run, settings, steps, summary, trained_once
from tests.e2e.faults import Fault, plan

pytestmark = pytest.mark.timeout(600)


def task(name: str) -> dict[str, str]:
    return {"env__function": f"{ROOT / 'tests/e2e/task.py'}:{name}"}


def failed(tmp_path: Path, overrides: list[str], env: dict[str, str] | None = None) -> Launch:
    """The run ends with status 1 and one traceback at most: that of torchrun, which ends every failed launch."""
    launch = Launch(overrides, env=env or {})
    launch.start(tmp_path / "output.log")
    assert launch.wait() == 1, launch.output
    assert launch.output.count("Traceback (most recent call last)") <= 1, launch.output
    return launch


@pytest.mark.slow
def test_prompts_that_are_too_long_are_passed_over_and_counted(tmp_path):
    run_dir = tmp_path / "run"
    launch = run(tmp_path, settings(run_dir, trainer__steps=3, env__heldout_size=9, **task("often_long")))
    assert steps(run_dir)[-1]["prompts/too_long"] > 0
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if "eval/items" in r]
    assert [(r["eval/items"], r["eval/too_long"]) for r in evaluations] == [(5, 4), (5, 4)]
    assert "4 of 9 held-out prompts are longer than" in launch.output
    assert "a training prompt is longer than" in launch.output
    law = summary(run_dir)["conservation"]
    assert law["trained"] == 12 and not law["failed"]


@pytest.mark.slow
def test_no_prompt_fits(tmp_path):
    overrides = settings(tmp_path / "run", generator__max_model_len=10, env__heldout_size=0, env__size=50)
    launch = failed(tmp_path, overrides)
    assert "all 50 prompts have more than 4 tokens" in summary(tmp_path / "run")["reason"], launch.output


def test_equal_rewards_end_the_run_with_the_diagnosis(tmp_path):
    overrides = settings(tmp_path / "run", trainer__steps=500, algorithm__max_filtered_groups=40, **task("equal"))
    launch = failed(tmp_path, overrides)
    result = summary(tmp_path / "run")
    told = "0 of the last 40 groups had reward variance (the last reward was 0.5)"
    assert told in result["reason"] and "Raise sampling.temperature" in result["reason"]
    assert told in "\n".join(launch.output.splitlines()[-20:])
    assert result["steps"] == 0 and result["conservation"]["filtered"] == 40


@pytest.mark.slow
def test_rewards_that_are_no_numbers_end_the_run(tmp_path):
    launch = failed(tmp_path, settings(tmp_path / "run", **task("not_a_number")))
    reason = summary(tmp_path / "run")["reason"]
    assert "of the last 16 rewards failed, the last with: not_finite: nan" in reason, launch.output


@pytest.mark.slow
def test_a_reward_that_is_no_number_now_and_then_is_counted(tmp_path):
    run_dir = tmp_path / "run"
    run(tmp_path, settings(run_dir, **task("sometimes_not_a_number")))
    assert steps(run_dir)[-1]["reward/failed/not_finite"] > 0
    assert summary(run_dir)["ended"] == "finished"


@pytest.mark.slow
def test_a_full_disk_at_a_checkpoint_leaves_the_one_before_and_the_run_goes_on_from_it(tmp_path):
    run_dir = tmp_path / "run"
    overrides = settings(run_dir, checkpoint__every=2)
    fault = Fault("asyncrl.training.checkpoint:write_tensors", "no space", nth=2)
    launch = Launch(overrides, env=plan(tmp_path / "plan", fault))
    launch.start(tmp_path / "output.log")
    assert launch.wait() == 1
    reason = summary(run_dir)["reason"]
    assert "could not write checkpoint" in reason and "No space left on device" in reason, launch.output
    (kept,) = (run_dir / "checkpoints").iterdir()
    assert kept.name == "step_000002"
    verify(kept)
    resumed = run(tmp_path, [f"resume={run_dir}", *overrides[1:]])
    assert "resumed from version 2;" in resumed.output and summary(run_dir)["steps"] == 6
    assert trained_once(run_dir)


@pytest.mark.slow
def test_an_address_of_another_machine_is_named(tmp_path):
    """Ports are chosen by the system, so only the address can be wrong."""
    keys = tmp_path / "keys"
    assert keys_main([str(keys)]) == 0
    launch = failed(tmp_path, settings(tmp_path / "run", transport__host="192.0.2.1", transport__keys_dir=keys))
    reason = summary(tmp_path / "run")["reason"]
    assert "transport.host: " in reason and "controller cannot bind tcp://192.0.2.1:0" in reason, launch.output
    assert reason in "\n".join(launch.output.splitlines()[-20:])


@pytest.mark.slow
def test_a_second_run_beside_one_that_holds_torchruns_default_port(tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        run(tmp_path, settings(tmp_path / "run", trainer__steps=1), torchrun=())  # as in the README
    assert summary(tmp_path / "run")["ended"] == "finished"
