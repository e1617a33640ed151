"""What happens to a run when its processes are killed, and that nothing is left behind."""

from __future__ import annotations

import json
import sqlite3

import pytest

from asyncrl.transport.keys import main as keys_main
from tests.e2e.command import Launch, gone, interrupt, run, settings, steps, summary, until

pytestmark = pytest.mark.timeout(900)
END_S = 40.0  # the bound is 10 s on a machine that has nothing else to do; here other tests may run


def started(tmp_path, after: int, **more) -> tuple[Launch, object]:
    """A run that has reported ``after`` steps."""
    run_dir = tmp_path / "run"
    launch = Launch(settings(run_dir, **({"trainer__steps": 500} | more)))
    launch.start(tmp_path / "output.log")
    until(lambda: len(steps(run_dir)) >= after, f"step {after}", launch)
    return launch, run_dir


def ledger_rows(run_dir, query: str) -> list[tuple]:
    with sqlite3.connect(f"file:{run_dir}/ledger/ledger.sqlite?mode=ro", uri=True) as db:
        return db.execute(query).fetchall()


def assert_each_group_was_trained_at_most_once(run_dir) -> None:
    ordinals = [o for (text,) in ledger_rows(run_dir, "SELECT ordinals FROM cuts") for o in json.loads(text)]
    assert len(ordinals) == len(set(ordinals))


def test_a_run_finishes_and_accounts_for_every_group(tmp_path):
    """prime-rl #2990, #3050: deadlocks at the last version and at shutdown."""
    run_dir = tmp_path / "run"
    run(tmp_path, settings(run_dir))
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
    assert_each_group_was_trained_at_most_once(run_dir)


def test_a_killed_generator_is_replaced_while_training_goes_on(tmp_path):
    """verl #7155, #3895, TRL #6628, SkyRL #1691: a trainer that waits for ever on a dead engine."""
    launch, run_dir = started(tmp_path, 3, trainer__steps=12, checkpoint__every=0)
    launch.child("asyncrl.actors.generator").kill()
    assert launch.wait() == 0, launch.output
    result = summary(run_dir)
    assert result["ended"] == "finished" and result["steps"] == 12 and result["generator_restarts"] == 1
    assert result["staleness_max"] <= 1
    assert_each_group_was_trained_at_most_once(run_dir)


SLOW = [pytest.param(victim, marks=pytest.mark.slow) for victim in ("rank", "torchrun", "supervisor")]


@pytest.mark.parametrize("victim", ["controller", *SLOW])
def test_a_death_ends_the_run_in_time_and_leaves_no_process(tmp_path, victim):
    launch, _ = started(tmp_path, 2)
    everything = launch.descendants()
    if victim == "torchrun":
        launch.process.kill()
    else:
        launch.child("launch/train.py" if victim == "rank" else f"asyncrl.actors.{victim}").kill()
    assert not gone(everything, END_S)
    assert launch.wait() != 0
    if victim == "controller":
        assert "the controller ended (killed by SIGKILL)" in launch.output


def test_a_run_killed_as_a_whole_resumes_and_trains_no_group_twice(tmp_path):
    """prime-rl #3004: deadlock after a resume. NeMo #3599: prompts skipped or repeated."""
    launch, run_dir = started(tmp_path, 5, checkpoint__every=3)
    launch.kill()
    launch.process.wait()
    before = steps(run_dir)
    resumed = run(tmp_path, [f"resume={run_dir}", *settings(run_dir, trainer__steps=18, checkpoint__every=3)[1:]])
    result = summary(run_dir)
    assert result["ended"] == "finished" and result["steps"] == 18 and result["attempts"] == 2
    assert "resumed from version 3" in resumed.output
    assert_each_group_was_trained_at_most_once(run_dir)
    again = {r["step"]: r for r in steps(run_dir) if r["attempt"] == 1}
    assert again[18]["tokens/trained"] == sum({r["step"]: r["train/tokens"] for r in steps(run_dir)}.values())
    assert min(again) == 4
    # checkpoints 12 and 15 were kept when the ledger was pruned last, and no restart from them needs the first attempt
    assert [path.name for path in sorted(run_dir.glob("ledger/segments/*.seg"))] == ["000002.seg"]
    for record in before[3:]:  # applied again on the same samples: the same step, to the last digit
        assert again[record["step"]]["train/loss"] == record["train/loss"]
        assert again[record["step"]]["reward/mean"] == record["reward/mean"]


def test_ctrl_c_ends_the_run_in_order(tmp_path):
    launch, run_dir = started(tmp_path, 2)
    everything = launch.descendants()
    interrupt(launch)
    assert launch.wait() != 0
    assert not gone(everything, END_S)
    assert summary(run_dir)["ended"] == "interrupted"


def test_two_trainer_ranks_share_the_batches(tmp_path):
    run_dir = tmp_path / "run"
    run(tmp_path, settings(run_dir, trainer__steps=3), ranks=2)
    assert summary(run_dir)["conservation"]["trained"] == 3 * 4
    assert [r["train/samples"] for r in steps(run_dir)] == [16, 16, 16]


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
