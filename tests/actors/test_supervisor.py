"""What the supervisor gives to the generators that it starts, and how it says that rank 0 has ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.actors import supervisor
from asyncrl.actors.news import News
from asyncrl.actors.process import spawn
from asyncrl.actors.supervisor import Generators, gpus_of_generators
from asyncrl.config.processes import clean_environment
from asyncrl.config.schema import Config
from asyncrl.report.summary import read_summary

REPORT = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['ASYNCRL_GENERATOR'], flush=True)"


def test_a_generator_sees_its_own_gpus_also_after_a_restart(tmp_path, monkeypatch):
    """In the place of each generator a process says what it sees, and dies."""
    (tmp_path / "said.py").write_text(f"{REPORT}\nraise SystemExit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all of them")
    monkeypatch.setattr(supervisor, "spawn", lambda module, arguments, **options: spawn("said", [], **options))
    news_fd, tell_fd = os.pipe()
    news = News(news_fd)
    generators = Generators(tmp_path, tmp_path, "", 1, tell_fd, {"generator/0": ["2", "3"], "generator/1": []})
    for name in ("generator/0", "generator/1"):
        generators.start(name)
    assert generators.heal("generator/0") is None
    assert news.restarts == 1
    assert "died 2 times, the last time with exit code 3: " in generators.heal("generator/0")
    assert news.restarts == 1, "the second death was not healed"
    generators.running["generator/1"].wait()
    assert generators.log("generator/0").read_text() == "2,3 generator/0\n" * 2
    assert generators.log("generator/1").read_text() == "all of them generator/1\n"


def test_ipc_keeps_all_generators_with_trainer_rank_0(monkeypatch):
    monkeypatch.setattr(supervisor, "visible_gpus", lambda: ["4", "5", "6"])
    cfg = Config()
    cfg.generator.replicas = 2
    assert gpus_of_generators(cfg, 1) == {"generator/0": ["5"], "generator/1": ["6"]}
    cfg.weights.backend = "ipc"
    assert gpus_of_generators(cfg, 1) == {"generator/0": ["4"], "generator/1": ["4"]}


ROUNDS = 30


@pytest.mark.parametrize(
    ("kind", "reason"), [("is killed", "trainer/0 died"), ("asks", "no such dtype")], ids=["killed", "asks"]
)
def test_a_rank_0_that_dies_with_many_threads_is_never_taken_for_an_interruption(tmp_path, kind, reason):
    """The kernel's SIGTERM comes when its first thread is gone, again with others, and rank 0 is still the parent."""
    command = [sys.executable, "-m", "tests.actors.dying_rank", kind, str(tmp_path), str(ROUNDS)]
    done = subprocess.run(command, env=clean_environment(), stderr=subprocess.PIPE, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    summaries = [read_summary(tmp_path / str(number) / "summary.json") for number in range(ROUNDS)]
    assert [(summary.ended, summary.reason) for summary in summaries] == [("failed", reason)] * ROUNDS
