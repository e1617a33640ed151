import io
import json
import statistics
import time

import pytest

from asyncrl.config.schema import Config
from asyncrl.report.keys import UndeclaredMetric
from asyncrl.report.metrics import read_lines
from asyncrl.report.reporter import Reporter
from asyncrl.report.summary import read_summary


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeWandb:
    """Stands in for WandbWriter: remembers what it is given."""

    def __init__(self) -> None:
        self.records, self.tables, self.ended, self.dropped = [], [], None, 0

    def log(self, record) -> None:
        self.records.append(dict(record))

    def table(self, name, step, columns, rows) -> None:
        self.tables.append((step, rows, name, columns))

    def finish(self, summary, exit_code, deadline_s) -> int:
        self.ended = (summary["ended"], exit_code)
        return self.dropped


def make(folder, wandb=None, steps=10):
    cfg = Config()
    cfg.trainer.steps = steps
    cfg.report.wandb.enabled = False
    clock, out = FakeClock(), io.StringIO()
    return Reporter(folder, cfg, clock, out, wandb), clock, out


def close(reporter, ended="finished", reason=""):
    reporter.finish(reporter.summary(ended, reason))


def test_a_run_from_start_to_end(tmp_path):
    wandb = FakeWandb()
    reporter, clock, out = make(tmp_path, wandb)
    reporter.status("starting vLLM")
    clock.now = 130.0
    reporter.evaluation(0, {"eval/accuracy": 0.4})
    reporter.start_training()
    for step in (1, 2):
        clock.now += 3.0
        metrics = {"step": step, "reward/mean": 0.5, "staleness/mean": 0.25, "staleness/max": 1}
        reporter.step(metrics | {"tokens/generated_per_s": 3100.0, "tokens/trained_per_s": 900, "train/tokens": 10})
    reporter.event("generator/0 restarted", warning=True)
    reporter.evaluation(2, {"eval/accuracy": 0.8})
    close(reporter)

    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["time_s"], line.get("step_s"), line["attempt"]) for line in lines] == [
        (0, 30.0, None, 0),
        (1, 33.0, 3.0, 0),  # from the start of training, not from the start of the engines
        (2, 36.0, 3.0, 0),
        (2, 36.0, None, 0),
    ]
    assert wandb.records == lines
    assert wandb.ended == ("finished", 0)
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.accuracy_initial, summary.accuracy_final, summary.wall_s) == (0.4, 0.8, 36.0)
    assert summary.versions["python"] and summary.machine["cores"] >= 1
    assert out.getvalue().splitlines() == [
        "starting vLLM  0:00",
        "held-out accuracy 0.400 at step 0",
        "step 1/10  reward 0.500  accuracy 0.400  staleness 0.25 (max 1)  left 0:27  tok/s generated 3.1k  trained 900",
        "step 2/10  reward 0.500  accuracy 0.400  staleness 0.25 (max 1)  left 0:24  tok/s generated 3.1k  trained 900",
        "generator/0 restarted",
        "held-out accuracy 0.800 at step 2",
        "finished after 2 steps in 0:36, held-out accuracy 0.400 -> 0.800",
    ]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["text"], e["level"], e["step"]) for e in events][1] == ("generator/0 restarted", "warning", 2)


@pytest.mark.parametrize("ended", ["failed", "interrupted"])
def test_the_summary_is_written_with_the_reason_whatever_ended_the_run(tmp_path, ended):
    wandb = FakeWandb()
    reporter, _, out = make(tmp_path, wandb)
    close(reporter, ended, "trainer/0 died: exit status 1")
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.ended, summary.reason) == (ended, "trainer/0 died: exit status 1")
    assert wandb.ended == (ended, 1)
    assert f"{ended}: trainer/0 died: exit status 1 after 0 steps" in out.getvalue()


def test_finish_twice_is_finish_once(tmp_path):
    reporter, _, _ = make(tmp_path)
    close(reporter)
    close(reporter, "failed", "late")
    assert read_summary(tmp_path / "summary.json").ended == "finished"
    reporter.event("after the end")  # another thread may still have something to say


def test_an_undeclared_metric_is_an_error_and_reaches_nobody(tmp_path):
    wandb = FakeWandb()
    reporter, _, _ = make(tmp_path, wandb)
    with pytest.raises(UndeclaredMetric):
        reporter.step({"step": 1, "reward/average": 1.0})
    with pytest.raises(ValueError, match="reward/mean"):
        reporter.evaluation(1, {"eval/accuracy": 1.0, "reward/mean": 0.1})
    assert wandb.records == []
    assert read_lines(tmp_path / "metrics.jsonl") == []
    close(reporter)


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path):
    reporter, clock, _ = make(tmp_path)
    reporter.evaluation(0, {"eval/accuracy": 0.3})
    clock.now += 50
    reporter.step({"step": 1})
    reporter.step({"step": 2})
    close(reporter, "failed", "killed")

    reporter, clock, _ = make(tmp_path)
    clock.now += 20
    reporter.step({"step": 2})
    close(reporter)
    assert [(x["step"], x["attempt"]) for x in read_lines(tmp_path / "metrics.jsonl")] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    summary = read_summary(tmp_path / "summary.json")
    assert (summary.attempts, summary.steps, summary.wall_s, summary.accuracy_initial) == (2, 2, 70.0, 0.3)


def test_time_to_go_ignores_the_start_of_the_engines(tmp_path):
    reporter, clock, out = make(tmp_path)
    clock.now += 60.0
    reporter.step({"step": 1})  # nobody said when training started
    clock.now += 2.0
    reporter.step({"step": 2})
    close(reporter)
    first, second = (line for line in out.getvalue().splitlines() if line.startswith("step"))
    assert "left -" in first
    assert "left 0:16" in second


def test_rates_of_the_summary_follow_corrected_counts(tmp_path):
    reporter, clock, _ = make(tmp_path)
    clock.now += 10.0
    summary = reporter.summary("finished")
    summary.tokens_generated = 500
    reporter.finish(summary)
    assert read_summary(tmp_path / "summary.json").tokens_generated_per_s == 50.0


def test_dropped_wandb_records_are_counted_in_metrics_summary_and_console(tmp_path):
    wandb = FakeWandb()
    reporter, _, out = make(tmp_path, wandb)
    wandb.dropped = 3
    reporter.step({"step": 1})
    close(reporter)
    assert read_lines(tmp_path / "metrics.jsonl")[0]["report/wandb_dropped"] == 3
    assert read_summary(tmp_path / "summary.json").wandb_dropped == 3
    assert "3 records not in W&B" in out.getvalue()


def test_rollouts_are_asked_for_every_n_steps_and_cut_to_the_limit(tmp_path):
    wandb = FakeWandb()
    reporter, _, _ = make(tmp_path, wandb)
    assert [step for step in range(25) if step and reporter.wants_rollouts(step)] == [1, 10, 20]
    reporter.rollouts(1, [{"reward": n} for n in range(100)])
    assert len(wandb.tables[0][1]) == 16
    close(reporter)
    plain, _, _ = make(tmp_path)
    assert not plain.wants_rollouts(10)
    close(plain)


def test_generations_are_kept_shown_and_sent(tmp_path):
    wandb = FakeWandb()
    reporter, _, out = make(tmp_path, wandb)
    row = {"prompt": "p" * 70, "reference": "r", "ended": True, "failure": None}
    rows = [{**row, "answer": f"a{n}", "score": n} for n in range(20)]
    reporter.generations(3, rows)
    reporter.generations(5, rows[:1])
    close(reporter)
    lines = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, "attempt": 0, **row} for step, row in [(3, r) for r in rows] + [(5, rows[0])]]
    assert f"step 3 answers '{'p' * 60}' with 'a0' (in the data 'r')" in out.getvalue()
    step, sent, name, columns = wandb.tables[0]
    assert (step, name, len(sent)) == (3, "generations", 16) and set(columns) <= sent[0].keys()


def test_generations_that_cannot_be_written_do_not_end_the_run(tmp_path):
    reporter, _, out = make(tmp_path)
    (tmp_path / "generations.jsonl").mkdir()
    reporter.generations(3, [{"prompt": "p", "answer": "a", "reference": "r", "ended": True, "score": None}])
    close(reporter)
    assert "generations.jsonl: lines lost" in out.getvalue()


def test_the_line_of_the_sft_mode_shows_its_losses_and_rate(tmp_path):
    reporter, clock, out = make(tmp_path)
    reporter._cfg.mode = "sft"
    reporter.start_training()
    clock.now += 2.0
    reporter.step({"step": 1, "train/loss": 1.5, "train/tokens": 300})
    reporter.evaluation(1, {"eval/loss": 1.25})
    clock.now += 2.0
    reporter.step({"step": 2, "train/loss": 1.0, "train/tokens": 500})
    reporter.evaluation(2, {"eval/loss": 1.0, "eval/accuracy": 0.5})
    clock.now += 2.0
    reporter.step({"step": 3, "train/loss": 0.5, "train/tokens": 600, "tokens/trained_per_s": 7.0})
    close(reporter)
    shown = out.getvalue()
    assert "loss 1.500  held out -  left" in shown and "tok/s trained 150" in shown
    assert "loss 1.000  held out 1.250  left" in shown and "tok/s trained 250" in shown
    assert "loss 0.500  held out 1.000  accuracy 0.500" in shown and "tok/s trained 7" in shown
    rates = [line["tokens/trained_per_s"] for line in read_lines(tmp_path / "metrics.jsonl") if "step_s" in line]
    assert rates == [150.0, 250.0, 7.0]


def test_a_run_that_finished_early_says_why(tmp_path):
    reporter, _, out = make(tmp_path)
    close(reporter, "finished", "stopped early")
    assert "finished: stopped early after 0 steps" in out.getvalue()


def test_a_nonfinite_metric_shows_as_missing_and_is_counted(tmp_path):
    reporter, _, out = make(tmp_path)
    reporter.step({"step": 1, "reward/mean": float("nan")})
    close(reporter)
    assert "reward -" in out.getvalue()
    assert read_summary(tmp_path / "summary.json").nonfinite == 1


def test_a_step_costs_the_caller_less_than_a_millisecond(tmp_path):
    """CPU time of the calling thread, W&B on: other processes on the machine do not count."""
    cfg = Config()
    cfg.report.wandb.mode = "offline"
    reporter = Reporter(tmp_path, cfg, stream=io.StringIO())
    row = {"prompt": "p" * 200, "completion": "c" * 200, "reward": 1.0}
    costs = []
    for step in range(1, 101):
        metrics = {"step": step, **{f"groups/failed/reason{n}": n for n in range(60)}, "reward/mean": 0.123456789}
        began = time.thread_time()
        reporter.step(metrics)
        if reporter.wants_rollouts(step):
            reporter.rollouts(step, [row] * 16)
        costs.append(time.thread_time() - began)
    reporter.finish(reporter.summary("finished"), deadline_s=60)
    assert statistics.median(costs) < 1e-3
    assert read_summary(tmp_path / "summary.json").wandb_dropped == 0
    print(f"\nmedian {statistics.median(costs) * 1e3:.3f} ms, largest {max(costs) * 1e3:.3f} ms")
