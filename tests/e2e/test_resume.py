"""``resume=outputs/latest`` goes on from wherever the run ended, and trains no group twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import Launch, interrupt, settings, steps, summary, trained_once, until
from tests.e2e.faults import Fault, plan

pytestmark = pytest.mark.timeout(900)


def attempts(run_dir: Path) -> dict[int, dict[int, dict]]:
    """attempt -> step -> record."""
    found: dict[int, dict[int, dict]] = {}
    for record in steps(run_dir):
        found.setdefault(record["attempt"], {})[record["step"]] = record
    return found


def start(tmp_path: Path, *overrides: str, env: dict[str, str] | None = None, **more) -> Launch:
    """The command in its own default folder, as a user types it."""
    launch = Launch([*settings(Path(), **more)[1:], *overrides], env=env or {})
    launch.start(tmp_path / f"output{len(list(tmp_path.glob('output*.log')))}.log")
    return launch


def test_resumed_before_the_first_checkpoint_and_after_ctrl_c(tmp_path):
    """Killed at its first step, interrupted after some more, then finished: two resumes in a row.

    prime-rl #3004: deadlock after a resume. NeMo #3599: prompts skipped or repeated.
    """
    run_dir = tmp_path / "outputs" / "latest"
    more = {"checkpoint__every": 4}
    launch = start(tmp_path, trainer__steps=500, **more)
    until(lambda: len(steps(run_dir)) >= 1, "step 1", launch)
    launch.kill()
    launch.process.wait()
    assert not list((run_dir / "checkpoints").glob("step_*")), "the run was quicker than its end"
    launch = start(tmp_path, "resume=outputs/latest", trainer__steps=500, **more)
    until(lambda: len(attempts(run_dir).get(1, {})) >= 6, "six steps of the second attempt", launch)
    interrupt(launch)
    assert launch.wait() != 0
    assert "resumed from version 0;" in launch.output and summary(run_dir)["ended"] == "interrupted"
    last = max(attempts(run_dir)[1])
    launch = start(tmp_path, "resume=outputs/latest", trainer__steps=last + 4, **more)
    assert launch.wait() == 0, launch.output
    result, found = summary(run_dir), attempts(run_dir)
    assert (result["ended"], result["attempts"], result["steps"]) == ("finished", 3, last + 4)
    assert min(found[1]) == 1 and min(found[2]) % 4 == 1 and max(found[2]) == last + 4
    for again, before in ((1, 0), (2, 1)):  # a batch that is applied again is the same batch
        for step in found[again].keys() & found[before].keys():
            assert found[again][step]["train/loss"] == found[before][step]["train/loss"]
    assert trained_once(run_dir)
    tokens = {record["step"]: record["train/tokens"] for record in steps(run_dir)}
    assert found[2][last + 4]["tokens/trained"] == sum(tokens.values()), "applied again, counted once"
    assert result["conservation"]["trained"] == 4 * (last + 4)


@pytest.mark.slow
def test_resumed_after_the_last_step(tmp_path):
    """Ended before the last checkpoint was written, then just after it, then finished, then finished once more."""
    run_dir = tmp_path / "outputs" / "latest"
    more = {"trainer__steps": 3, "checkpoint__every": 0, "eval__every": 0}
    env = plan(
        tmp_path / "plan",
        Fault("asyncrl.training.checkpoint:Write.finish", "kill"),
        Fault("asyncrl.actors.conductor:Conductor._on_saved", "kill", after=True),
    )
    outputs = []
    for number in range(4):
        launch = start(tmp_path, *(["resume=outputs/latest"] if number else []), env=env, **more)
        code = launch.wait()
        assert (code == 0) == (number >= 2), launch.output
        outputs.append(launch.output)
    assert "resumed from version 0; 3 batches applied again" in outputs[1]
    assert "resumed from version 3; 0 batches applied again" in outputs[2]
    found, result = attempts(run_dir), summary(run_dir)
    assert sorted(found) == [0, 1], "the last two trained nothing"
    assert sorted(found[0]) in ([1, 2], [1, 2, 3]) and sorted(found[1]) == [1, 2, 3]  # the kill may outrun a report
    assert all(found[0][step]["train/loss"] == found[1][step]["train/loss"] for step in found[0])
    assert (result["ended"], result["steps"], result["attempts"]) == ("finished", 3, 4)
    assert result["accuracy_final_step"] == 3 and result["conservation"]["trained"] == 12
    assert json.loads((run_dir / "launch.json").read_text())["returned"]
    assert trained_once(run_dir)


@pytest.mark.slow
def test_killed_as_a_whole_after_a_checkpoint(tmp_path):
    """prime-rl #3004: deadlock after a resume. NeMo #3599: prompts skipped or repeated."""
    run_dir = tmp_path / "outputs" / "latest"
    launch = start(tmp_path, trainer__steps=500, checkpoint__every=3)
    until(lambda: len(steps(run_dir)) >= 5, "step 5", launch)
    launch.kill()
    launch.process.wait()
    before = steps(run_dir)
    launch = start(tmp_path, "resume=outputs/latest", trainer__steps=18, checkpoint__every=3)
    assert launch.wait() == 0, launch.output
    assert "resumed from version 3" in launch.output and trained_once(run_dir)
    again = attempts(run_dir)[1]
    assert min(again) == 4
    # checkpoints 12 and 15 were kept when the ledger was pruned last, and no restart from them needs the first attempt
    assert [path.name for path in sorted(run_dir.glob("ledger/segments/*.seg"))] == ["000002.seg"]
    for record in before[3:]:  # applied again on the same samples: the same step, to the last digit
        assert again[record["step"]]["train/loss"] == record["train/loss"]
        assert again[record["step"]]["reward/mean"] == record["reward/mean"]
