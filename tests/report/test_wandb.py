"""The W&B writer against the real wandb package, offline and with servers that fail, and against fakes where named so.

A fake is a package named ``wandb`` put on the child's path: the child process, the pipes and the deadlines are real.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.schema import WandbConfig
from asyncrl.report import wandb_writer
from asyncrl.report.reporter import ROLLOUT_COLUMNS
from asyncrl.report.wandb_process import choose_mode
from asyncrl.report.wandb_writer import WandbWriter

FAKE_ERRORS = """
class errors:
    class Error(Exception): ...
class _Setup:
    class settings:
        api_key, identity_token_file, base_url = "k", None, "http://localhost"
def setup(): return _Setup
def teardown(): ...
Settings = dict
"""


def environ(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return {**kept, "NETRC": "/nonexistent", "HOME": "/nonexistent", "WANDB_ERROR_REPORTING": "false", **more}


class Events(list):
    def __call__(self, text: str, warning: bool) -> None:
        self.append((text, warning))

    @property
    def warnings(self) -> list[str]:
        return [text for text, warning in self if warning]


def make(folder: Path, events: Events, env: dict[str, str], **limits) -> WandbWriter:
    cfg = WandbConfig(mode=limits.pop("mode", "auto"))
    return WandbWriter(folder, cfg, "a run", {"seed": 3, "optim": {"lr": 1e-3}}, events, environ=env, **limits)


def fake_wandb(folder: Path, body: str) -> dict[str, str]:
    (folder / "fake").mkdir()
    (folder / "fake" / "wandb.py").write_text(FAKE_ERRORS + body)
    return environ(PYTHONPATH=str(folder / "fake"))


def until(condition, seconds: float = 60.0) -> None:
    """Wait for another process; the bound only ends a hung test."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def logged(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file: a 7 byte head, then LevelDB's log format (blocks of 32 KiB)."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def history(folder: Path) -> list[Any]:
    """The records of wandb's own file, decoded with wandb's own schema."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for data in logged(path):
        records.append(wandb_internal_pb2.Record())
        records[-1].ParseFromString(data)
    return records


def test_real_wandb_offline_gets_metrics_axes_table_and_summary(tmp_path):
    events = Events()
    writer = make(tmp_path, events, environ())
    for step in (1, 2, 3):
        writer.log({"step": step, "reward/mean": step / 10, "train/loss": None})
    writer.table(
        "rollouts", 3, ROLLOUT_COLUMNS, [dict.fromkeys(ROLLOUT_COLUMNS, "x") | {"reward": 1.0}, {"prompt": "only"}]
    )
    assert writer.finish({"accuracy_final": 0.9}, 0, deadline_s=60) == 0
    assert writer.mode == "offline"
    assert events.warnings == []

    records = history(tmp_path)
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row.get("reward/mean")) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.3), (3, None)]
    assert not any("train/loss" in row for row in rows)
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    axes = {(metric.name or metric.glob_name, metric.step_metric) for metric in metrics}
    assert {("step", ""), ("*", "step"), ("eval/accuracy", "step")} <= axes
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == list(ROLLOUT_COLUMNS)
    assert [row[3] for row in content["data"]] == [1.0, None]


def test_a_resumed_run_keeps_its_wandb_id(tmp_path):
    ids = []
    for _ in range(2):
        writer = make(tmp_path, Events(), environ(WANDB_MODE="disabled"))
        ids.append(writer._init["id"])
        writer.finish({}, 0, 60)
        assert writer.mode == "disabled"
    assert ids[0] == ids[1]


def test_real_wandb_with_a_server_that_refuses_goes_offline_and_loses_nothing(tmp_path):
    events = Events()
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
    env = environ(WANDB_API_KEY="a" * 40, WANDB_BASE_URL=f"http://127.0.0.1:{closed.getsockname()[1]}")
    writer = make(tmp_path, events, env, init_timeout_s=2.0)
    writer.log({"step": 1})
    until(lambda: writer.mode)
    assert writer.finish({}, 0, 60) == 0
    assert writer.mode == "offline"
    (warning,) = events.warnings
    assert "this run is kept offline" in warning
    assert any(record.WhichOneof("record_type") == "history" for record in history(tmp_path))


def test_real_wandb_with_a_server_that_never_answers_blocks_nobody(tmp_path):
    events = Events()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        env = environ(WANDB_API_KEY="a" * 40, WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}")
        writer = make(tmp_path, events, env, init_timeout_s=300.0)
        for step in range(5):
            writer.log({"step": step})
        child = psutil.Process(until_child(writer))
        assert writer.finish({}, 1, deadline_s=0.5) == 5
    assert events.warnings == ["W&B did not finish within 0.5 s"]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def until_child(writer: WandbWriter) -> int:
    until(lambda: writer._child is not None)
    return writer._child.pid


def test_fake_init_that_hangs_ends_at_our_deadline_and_every_record_is_counted(tmp_path):
    env = fake_wandb(tmp_path, "import time\ndef init(**k): time.sleep(600)")
    events = Events()
    writer = make(tmp_path, events, env, init_deadline_s=1.0)
    for step in range(7):
        writer.log({"step": step})
    until(writer._ended.is_set)
    writer.log({"step": 8})
    assert writer.finish({}, 0, 30) == 8
    assert events.warnings == ["W&B did not start within 1 s; this run goes on without it"]


def test_fake_init_that_fails_is_reported_once(tmp_path):
    events = Events()
    writer = make(
        tmp_path, events, fake_wandb(tmp_path, "def init(**k): raise errors.Error('no quota')"), mode="offline"
    )
    writer.log({"step": 1})
    until(writer._ended.is_set)
    assert writer.finish({}, 0, 30) == 1
    assert events.warnings == ["W&B: Error: no quota"]


FAKE_RUN = """
import os, time
class Run:
    url, dir, summary = "", "/x/files", {}
    def define_metric(self, *a, **k): ...
    def log(self, record): %s
    def finish(self, exit_code): ...
def init(**k): return Run()
"""


def test_fake_log_that_hangs_fills_the_bounded_queue_and_drops_are_counted(tmp_path):
    env = fake_wandb(tmp_path, FAKE_RUN % "time.sleep(600)")
    events = Events()
    writer = make(tmp_path, events, env, max_records=10)
    until(lambda: writer.mode)
    for step in range(500):
        writer.log({"step": step, "train/skipped": "x" * 1000})
    assert writer._queue.qsize() <= 10
    assert 300 < writer.dropped < 500  # some fitted the pipe
    assert writer.finish({}, 0, deadline_s=0.5) == 500  # none was ever confirmed
    assert events.warnings == ["W&B does not keep up: records are dropped (counted in report/wandb_dropped)"]


def test_fake_bytes_in_the_queue_are_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_writer, "MAX_BYTES", 10_000)
    writer = make(tmp_path, Events(), fake_wandb(tmp_path, "import time\ndef init(**k): time.sleep(600)"))
    for step in range(100):
        writer.log({"step": step, "train/skipped": "x" * 1000})
    assert writer._queue.qsize() == 9
    assert writer.finish({}, 0, 0.1) == 100


def test_fake_log_that_raises_costs_its_record_only(tmp_path):
    body = "\n        if record['step'] == 2: raise errors.Error('bad record')"
    events = Events()
    writer = make(tmp_path, events, fake_wandb(tmp_path, FAKE_RUN % body))
    for step in (1, 2, 3):
        writer.log({"step": step})
    assert writer.finish({}, 0, 30) == 1
    assert events.warnings == ["W&B: Error: bad record"]


def test_a_killed_writer_process_is_reported_and_counted(tmp_path):
    events = Events()
    writer = make(tmp_path, events, environ())
    writer.log({"step": 1})
    until(lambda: writer._confirmed == 1)
    os.kill(until_child(writer), signal.SIGKILL)
    until(writer._ended.is_set)
    writer.log({"step": 2})
    assert writer.finish({}, 0, 30) == 1
    (warning,) = events.warnings
    assert warning.startswith("W&B writer ended")


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_killed_parent(tmp_path, kill):
    """wandb's service process included."""
    code = """
import sys, time
from pathlib import Path
from asyncrl.config.schema import WandbConfig
from asyncrl.report.wandb_writer import WandbWriter
writer = WandbWriter(Path(sys.argv[1]), WandbConfig(), "n", {}, lambda text, warning: None)
writer.log({"step": 1})
while not writer._confirmed:
    time.sleep(0.02)
print("up", flush=True)
time.sleep(600)
"""
    env = environ(PYTHONPATH=str(Path(__file__).parents[2]))
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    assert parent.stdout.readline() == b"up\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 2, "the child and wandb's service"
    parent.send_signal(kill)
    parent.wait()
    until(lambda: all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in family), 15)
    # what was confirmed is in wandb's file even so
    assert any(record.WhichOneof("record_type") == "history" for record in history(tmp_path))


def test_calls_are_refused_quietly_after_the_end(tmp_path):
    writer = make(tmp_path, Events(), environ(WANDB_MODE="disabled"))
    writer.log({"step": 1})
    assert writer.finish({}, 0, 60) == 0
    writer.log({"step": 2})
    assert writer.dropped == 1


@pytest.mark.parametrize(
    ("wanted", "env", "key", "mode"),
    [
        ("auto", {}, False, "offline"),
        ("auto", {}, True, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_MODE": "dryrun"}, True, "offline"),
        ("auto", {"WANDB_MODE": "online"}, False, "online"),
        ("offline", {"WANDB_MODE": "online"}, True, "offline"),
    ],
)
def test_mode(wanted, env, key, mode):
    assert choose_mode(wanted, env, key) == mode


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ValueError, match="sometimes"):
        choose_mode("sometimes", {}, True)


def test_rollout_rows_may_hold_numpy_numbers(tmp_path):
    import numpy as np

    writer = make(tmp_path, Events(), environ(WANDB_MODE="disabled"))
    writer.table("rollouts", 1, ROLLOUT_COLUMNS, [{"reward": np.float32(0.5), "version": np.int64(3)}])
    assert writer.finish({}, 0, 60) == 0
