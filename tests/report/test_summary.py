import json
import os

import pytest

from asyncrl.report.summary import Conservation, Summary, SummaryBuilder, ensure_summary, read_summary


def step(number, **metrics):
    return {"step": number, "attempt": 0, "time_s": 10.0 * number, "step_s": 2.0, **metrics}


def test_round_trip(tmp_path):
    summary = Summary("grpo", "failed", "generator/0 died 6 times", 3, conservation=Conservation(5, 2, {"nan": 1}))
    summary.write(tmp_path / "summary.json")
    assert read_summary(tmp_path / "summary.json") == summary


def test_a_failed_write_leaves_the_old_file_whole_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    Summary("grpo", "finished", "", 0).write(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Summary("grpo", "failed", "x", 0).write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path):
    path = tmp_path / "summary.json"
    Summary("grpo", "finished", "a long old reason", 0).write(path)
    with open(path) as old:
        Summary("grpo", "failed", "x", 0).write(path)
        assert json.load(old)["reason"] == "a long old reason"
    assert read_summary(path).reason == "x"


def test_nan_is_refused(tmp_path):
    with pytest.raises(ValueError):
        Summary("grpo", "finished", "", 0, mismatch_mean=float("nan")).write(tmp_path / "s.json")
    assert list(tmp_path.iterdir()) == []


def test_the_conservation_law():
    counts = Conservation(20, 8, {"nan": 1}, 3, {"deadline": 2}, 1, 2, 3)
    assert counts.missing == 0
    counts.buffered = 0
    assert counts.missing == 1


def test_figures_of_a_run():
    builder = SummaryBuilder()
    builder.add({"step": 0, "attempt": 0, "time_s": 1.0, "eval/accuracy": 0.4})
    builder.add(step(1, **{"staleness/mean": 0.0, "staleness/max": 0, "train/tokens": 100, "tokens/trained": 100}))
    builder.add(step(2, **{"staleness/mean": 1.0, "staleness/max": 2, "train/tokens": 300, "tokens/trained": 400}))
    builder.add(step(3, **{"staleness/mean": None, "staleness/max": 1, "train/tokens": 0, "tokens/generated": 900}))
    builder.add(
        {"step": 2, "attempt": 0, "time_s": 31.0, "eval/accuracy": 0.7, "eval/failed": 3}
    )  # late, of an older step
    summary = builder.build("grpo", 1, "finished", "", wall_s=40.0)
    assert (summary.steps, summary.attempts, summary.wall_s) == (3, 1, 40.0)
    assert (summary.accuracy_initial, summary.accuracy_final, summary.accuracy_final_step) == (0.4, 0.7, 2)
    assert summary.accuracy_final_failed == 3
    assert summary.staleness_mean == pytest.approx(0.75)
    assert (summary.staleness_max, summary.step_s_mean) == (2, 2.0)
    assert (summary.tokens_generated, summary.tokens_trained) == (900, 400)
    assert (summary.tokens_generated_per_s, summary.tokens_trained_per_s) == (22.5, 10.0)


def test_counts_by_reason_come_from_the_families():
    builder = SummaryBuilder()
    groups = {"groups/dispatched": 12, "groups/trained": 6, "groups/skipped": 2, "groups/skipped/nan_loss": 2}
    groups |= {"groups/failed": 3, "groups/failed/deadline": 1, "groups/in_flight": 1}
    builder.add(step(1, **groups))
    found = builder.build("grpo", 0, "finished", "", 1.0).conservation
    assert found.skipped == {"nan_loss": 2}
    assert found.failed == {"deadline": 1, "unnamed": 2}  # what has no reason still shows
    assert found.missing == 0


def test_wall_time_of_a_resumed_run_is_the_sum_over_attempts():
    builder = SummaryBuilder()
    builder.add(step(1) | {"time_s": 100.0})
    builder.add(step(1) | {"time_s": 30.0, "attempt": 1})
    assert builder.build("grpo", 0, "finished", "", wall_s=50.0).wall_s == 150.0


def test_a_run_without_a_step_has_nulls_not_zeros():
    summary = SummaryBuilder().build("grpo", 0, "failed", "no engine", 3.0)
    assert summary.accuracy_initial is summary.staleness_mean is summary.mismatch_mean is summary.step_s_mean is None
    assert (summary.steps, summary.ended, summary.reason) == (0, "failed", "no engine")


def test_a_summary_that_nobody_could_write_is_made_of_the_metrics(tmp_path):
    lines = [step(1, **{"reward/mean": 0.5}), step(2, **{"reward/mean": 0.75})]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = ensure_summary(tmp_path, "grpo", 3, "failed", "the controller ended (killed by SIGKILL)")
    assert made == read_summary(tmp_path / "summary.json")
    assert (made.ended, made.steps, made.reward_last, made.seed) == ("failed", 2, 0.75, 3)
    again = ensure_summary(tmp_path, "grpo", 3, "interrupted", "too late")
    assert again == made, "who writes first knows best"


def test_a_summary_of_a_run_that_did_not_get_to_its_first_metric(tmp_path):
    made = ensure_summary(tmp_path, "sft", 0, "interrupted", "interrupted by SIGINT")
    assert (made.ended, made.steps, made.attempts) == ("interrupted", 0, 1)
