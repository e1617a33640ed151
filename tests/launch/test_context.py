"""Ranks meet in torchrun's store; each job of a sweep has keys and a process group of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.context import Place, RunContext, lead_context
from asyncrl.config.errors import RunFailed

WORKER = Path(__file__).with_name("worker.py")


def torchrun(*arguments: str, ranks: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd)


def test_two_ranks_and_three_jobs_each_with_its_own_process_group(tmp_path):
    result = torchrun(str(WORKER), str(tmp_path), "3", ranks=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    expected = {f"rank {rank} job {job} folder job{job} sum 11" for rank in (0, 1) for job in (0, 1, 2)}
    # The ranks share a pipe and print end and line break apart: a line of one may hold a line of the other.
    assert sorted(re.findall(r"rank \d job \d folder job\d sum 11", result.stdout)) == sorted(expected)


def test_a_world_of_one_needs_no_torchrun(tmp_path):
    environment_free = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path), "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment_free,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["rank 0 job 0 folder job0 sum 1", "rank 0 job 1 folder job1 sum 1"]


def test_what_is_published_is_read_back(tmp_path):
    context = lead_context(Place(), tmp_path, 0, 5.0, {"start": json.dumps({"a": 1})})
    context.publish("controller", "tcp://127.0.0.1:1")
    assert context.await_published("controller", 1.0) == "tcp://127.0.0.1:1"
    assert json.loads(context.await_published("start", 1.0)) == {"a": 1}
    context.close()


def test_a_wait_that_expires_says_who_waited_how_long_and_for_what(tmp_path):
    context = RunContext(Place(), tmp_path)
    with pytest.raises(RunFailed, match=r"rank 0 waited 0\.2 s for another rank to publish 'controller'"):
        context.await_published("controller", 0.2)


def test_jobs_do_not_see_each_others_keys(tmp_path):
    first = lead_context(Place(), tmp_path, 0, 5.0, {})
    first.publish("key", "of job 0")
    second = lead_context(Place(), tmp_path, 1, 5.0, {})
    with pytest.raises(RunFailed):
        second.await_published("key", 0.2)


def test_place_is_read_from_torchrun(monkeypatch):
    for name, value in {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert Place.from_environment() == Place(5, 1, 8, 4, 1, 2)
