import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.report.keys import UndeclaredMetric
from asyncrl.report.metrics import FSYNC_EVERY_S, MetricsWriter, merge_steps, read_lines, read_metrics

ROOT = Path(__file__).parents[2]


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60)


def test_a_line_a_step_comes_back_as_written(tmp_path):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "reward/mean": np.float32(0.5), "tokens/trained": np.int64(7), "train/skipped": "nan"})
    writer.write({"step": 2, "reward/mean": None})
    writer.close()
    assert read_lines(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "tokens/trained": 7, "train/skipped": "nan"},
        {"step": 2, "reward/mean": None},
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -np.inf, np.float32("nan")])
def test_a_nonfinite_number_is_null_and_counted(tmp_path, bad):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write({"step": 1, "train/loss": 1.0})
    assert writer.write({"step": 2, "train/loss": bad, "train/grad_norm": bad})["train/loss"] is None
    writer.write({"step": 3, "train/loss": bad})
    # strict JSON: no NaN literal that another reader chokes on
    lines = [json.loads(x, parse_constant=pytest.fail) for x in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line.get("report/nonfinite") for line in lines] == [None, 2, 3]
    assert writer.nonfinite == 3


@pytest.mark.parametrize("bad", [[1.0], "0.5", {"a": 1}, np.zeros(3), 1j])
def test_a_value_of_another_type_is_an_error_and_writes_nothing(tmp_path, bad):
    writer = MetricsWriter(tmp_path / "m.jsonl")
    with pytest.raises(TypeError, match="reward/mean"):
        writer.write({"step": 1, "reward/mean": bad})
    with pytest.raises(TypeError, match="must be text"):
        writer.write({"step": 1, "train/skipped": 1})
    with pytest.raises(UndeclaredMetric):
        writer.write({"step": 1, "made_up": 1})
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_a_torn_last_line_is_cut_off_and_the_rest_continued(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    writer = MetricsWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"x" * 200_000)
    MetricsWriter(path).close()
    assert path.read_bytes() == b""


def test_lines_survive_sigkill(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from asyncrl.report.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]))
for step in range(1, 4):
    writer.write({"step": step})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code, str(tmp_path / "m.jsonl")).returncode == -signal.SIGKILL
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1, 2, 3]


def test_a_full_disk_costs_lines_and_leaves_whole_ones(tmp_path):
    """The kernel's own file size limit stands in for a full disk: it too accepts a part of the last line."""
    code = """
import resource, sys
from pathlib import Path
from asyncrl.report.metrics import MetricsWriter
lost = []
writer = MetricsWriter(Path(sys.argv[1]), on_lost=lost.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for step in range(1, 11):
    writer.write({"step": step, "tokens/trained": 123456789})
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write({"step": 11})
print(writer.lost_lines, len(lost), lost[0])
"""
    done = run_python(code, str(tmp_path / "m.jsonl"))
    assert done.returncode == 0, done.stderr
    lines = read_lines(tmp_path / "m.jsonl")  # raises on a torn line
    assert [line["step"] for line in lines] == [1, 2, 11]
    assert lines[-1]["report/lost_lines"] == 8
    assert done.stdout.startswith("8 8 m.jsonl: line lost: only ")


def test_fsync_happens_at_most_every_interval_and_on_close(tmp_path, monkeypatch):
    synced, now = [], [0.0]
    monkeypatch.setattr(os, "fsync", synced.append)
    writer = MetricsWriter(tmp_path / "m.jsonl", clock=lambda: now[0])
    for step in range(5):
        writer.write({"step": step})
    assert len(synced) == 0
    now[0] = FSYNC_EVERY_S
    writer.write({"step": 5})
    writer.write({"step": 6})
    assert len(synced) == 1
    writer.close()
    writer.close()
    assert len(synced) == 2


def test_merge_keeps_the_latest_attempt_and_the_evaluations():
    lines = [
        {"step": 0, "attempt": 0, "time_s": 1.0, "eval/accuracy": 0.4},
        {"step": 1, "attempt": 0, "time_s": 2.0, "step_s": 1.0, "train/skipped": "nan"},
        {"step": 2, "attempt": 0, "time_s": 3.0, "step_s": 1.0},
        {"step": 1, "attempt": 0, "time_s": 3.5, "eval/accuracy": 0.5},
        {"step": 1, "attempt": 1, "time_s": 0.5, "step_s": 2.0},
    ]
    assert merge_steps(lines) == [
        {"step": 0, "attempt": 0, "time_s": 1.0, "eval/accuracy": 0.4},
        {"step": 1, "attempt": 1, "time_s": 0.5, "step_s": 2.0, "eval/accuracy": 0.5},
        {"step": 2, "attempt": 0, "time_s": 3.0, "step_s": 1.0},
    ]


def test_reading_a_file_that_is_not_there(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []
