"""The summary's figures of weight pushes and restarts, however and whenever the run ends. The reporter is real."""

from __future__ import annotations

import io
import os
from collections import Counter
from typing import Any

import pytest

from asyncrl.actors.batches import Batch
from asyncrl.actors.news import News, tell
from asyncrl.actors.progress import Progress
from asyncrl.actors.supervisor import LONGEST_REASON
from asyncrl.config.schema import Config
from asyncrl.report.reporter import Reporter
from asyncrl.report.summary import Summary, read_summary

COUNTS: dict[str, Any] = {
    "dispatched": 0, "trained": 0, "buffered": 0, "in_training": 0, "in_flight": 0,
    "filtered": Counter(), "skipped": Counter(), "failed": Counter(),
}  # fmt: skip


class Attempt:
    """One attempt of a run: a progress whose supervisor is this test. ``fd`` is where the supervisor writes."""

    def __init__(self, run_dir) -> None:
        cfg = Config()
        cfg.report.wandb.enabled = False
        self.run_dir = run_dir
        read_end, self.fd = os.pipe()
        self.news = News(read_end)
        reporter = Reporter(run_dir, cfg, lambda: 0.0, io.StringIO())
        self.progress = Progress(cfg, reporter, lambda: 0.0, self.news)

    def commit(self, version: int, seconds: float) -> None:
        self.progress.synced({"version": version, "seconds": seconds, "pause_s": 0.1, "bytes": 8})

    def step(self, version: int) -> None:
        batch = Batch(version, [], [], {})
        self.progress.step(batch, {"busy_s": 0.0, "skipped": None, "metrics": {}}, COUNTS, {})

    def finish(self, ended="finished", reason="") -> Summary:
        self.progress.finish(ended, reason, COUNTS)
        return read_summary(self.run_dir / "summary.json")


@pytest.mark.parametrize(("ended", "reason"), [("finished", ""), ("failed", "a defect"), ("interrupted", "SIGTERM")])
def test_what_came_after_the_last_step_is_in_the_summary(tmp_path, ended, reason):
    run = Attempt(tmp_path)
    run.commit(0, 3.0)
    run.step(0)
    run.commit(1, 0.5)
    tell(run.fd, restarted="generator/0")
    found = run.finish(ended, reason)
    assert (found.weight_syncs, found.weight_sync_s, found.generator_restarts) == (2, 3.5, 1)


def test_a_run_that_fails_before_its_first_step(tmp_path):
    run = Attempt(tmp_path)
    tell(run.fd, restarted="generator/0")
    found = run.finish("failed", "generator/0 died 2 times")
    assert (found.weight_syncs, found.weight_sync_s, found.generator_restarts) == (0, None, 1)


def test_a_push_is_as_slow_as_its_slowest_engine_and_counted_once(tmp_path):
    run = Attempt(tmp_path)
    for version, seconds in ((0, 1.0), (0, 2.0), (1, 4.0), (0, 3.0), (1, 3.0)):  # the late one tells of version 0 again
        run.commit(version, seconds)
    run.step(0)
    assert run.progress.sync["sync/seconds"] == 4.0, "the newest push"
    found = run.finish()
    assert (found.weight_syncs, found.weight_sync_s) == (2, 3.0 + 4.0)


def test_a_resumed_run_adds_to_what_its_last_attempt_reported(tmp_path):
    first = Attempt(tmp_path)
    first.commit(0, 1.0)
    tell(first.fd, restarted="generator/0")
    first.step(0)
    first.finish("interrupted", "SIGINT")
    second = Attempt(tmp_path)
    tell(second.fd, restarted="generator/1")  # before the trainers have resumed
    second.progress.resume(0)
    second.commit(0, 2.0)
    tell(second.fd, restarted="generator/1")
    found = second.finish()
    assert (found.weight_syncs, found.weight_sync_s, found.generator_restarts) == (2, 3.0, 3)


def test_news_are_read_as_they_come():
    read_end, write_end = os.pipe()
    news = News(read_end)
    assert (news.restarts, news.failure) == (0, "")
    for name in ("generator/0", "generator/1"):
        tell(write_end, restarted=name)
    tell(write_end, failed="\u00e4" * LONGEST_REASON)
    tell(write_end, restarted="generator/0")
    assert (news.restarts, news.failure) == (3, "\u00e4" * LONGEST_REASON)
    assert (news.restarts, news.failure) == (3, "\u00e4" * LONGEST_REASON)
