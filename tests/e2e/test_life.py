"""Runs that finish: alone, on two ranks, encrypted, in a sweep."""

from __future__ import annotations

import json

import pytest

from asyncrl.transport.keys import main as keys_main
from tests.e2e.calls import Calls
from tests.e2e.command import run, settings, steps, summary, trained_once

pytestmark = pytest.mark.timeout(900)


def test_a_run_finishes_and_accounts_for_every_group(tmp_path):
    """prime-rl #2990, #3050: deadlocks at the last version and at shutdown."""
    run_dir, calls = tmp_path / "run", Calls(tmp_path)
    offline_wandb = {"WANDB_MODE": "offline"}
    run(tmp_path, settings(run_dir, report__wandb__enabled="true"), env={**calls.env, **offline_wandb})
    assert ("connect", "127.0.0.1") in calls.all() and calls.away() == set(), "a run calls nobody"
    result = summary(run_dir)
    law = result["conservation"]
    proven = [
        (r["step"] - 1, r["weights/version/generator_0"], r["weights/digest/generator_0"]) for r in steps(run_dir)
    ]
    assert all(step - 1 <= version <= step for step, version, _ in proven)
    assert len({digest for _, _, digest in proven}) == len({version for _, version, _ in proven}) > 1
    assert result["ended"] == "finished" and result["steps"] == 6
    assert law["trained"] == 6 * 4 and law["dispatched"] >= law["trained"]
    ended = law["trained"] + sum(law["skipped"].values()) + law["filtered"] + sum(law["failed"].values())
    assert law["dispatched"] == ended + law["buffered"] + law["in_training"] + law["in_flight"]
    assert result["staleness_max"] <= 1 and result["accuracy_final"] is not None
    assert (run_dir / "checkpoints" / "step_000006" / "hf" / "model.safetensors").exists()
    assert trained_once(run_dir)


def test_two_trainer_ranks_share_the_batches(tmp_path):
    run_dir = tmp_path / "run"
    run(tmp_path, settings(run_dir, trainer__steps=3), ranks=2)
    assert summary(run_dir)["conservation"]["trained"] == 3 * 4
    assert [r["train/samples"] for r in steps(run_dir)] == [16, 16, 16]


@pytest.mark.slow
def test_the_best_checkpoint_by_held_out_accuracy_stays_beside_the_newest(tmp_path):
    """Evaluations end after later checkpoints have been written; the last one after the last."""
    run_dir = tmp_path / "run"
    best = {"checkpoint__keep": 1, "checkpoint__keep_best": 1, "eval__every": 2, "trainer__steps": 8}
    run(tmp_path, settings(run_dir, env__heldout_size=16, **best))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = {r["step"]: r["eval/accuracy"] for r in records if r.get("eval/accuracy") is not None and r["step"]}
    assert 8 in scores and len(scores) > 1, "a version may be passed over while an older one is evaluated"
    first = max(scores, key=lambda step: (scores[step], step))
    found = {p.name for p in (run_dir / "checkpoints").glob("step_*")}
    assert found == {f"step_{first:06d}", "step_000008"}
    assert (run_dir / "checkpoints" / "best").resolve().name == f"step_{first:06d}"
    assert len([r for r in steps(run_dir) if r.get("time/checkpoint_hold_s", 0) > 0]) == 3, (
        "the last has no step after it"
    )


@pytest.mark.slow
def test_a_run_whose_links_are_encrypted(tmp_path):
    assert keys_main([str(tmp_path / "keys")]) == 0
    run_dir = tmp_path / "run"
    run(tmp_path, settings(run_dir, trainer__steps=2, transport__keys_dir=tmp_path / "keys"))
    assert summary(run_dir)["steps"] == 2


@pytest.mark.slow
def test_a_sweep_runs_every_job_in_a_folder_of_its_own(tmp_path):
    overrides = [s for s in settings(tmp_path / "unused", trainer__steps=2) if not s.startswith("run.dir")]
    run(tmp_path, [*overrides, f"run.sweep_root={tmp_path}/sweeps", "optim.lr=1e-4,3e-4"], flags=["-m"])
    found = sorted(tmp_path.glob("sweeps/*/*/summary.json"))
    assert len(found) == 2
    rates = [steps(path.parent)[-1]["train/lr"] for path in found]
    assert len(set(rates)) == 2
