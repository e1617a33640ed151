"""A restarted engine goes by its predecessor's names and is not mixed up with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.weights.publisher import WeightPublisher
from tests.weights.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
MUTE = """
import signal, sys
from tests.weights.fake_engine import FakeEngine
engine = FakeEngine(sys.argv[1], "generator/0", deaf_to=tuple(sys.argv[2:]))
print("here", flush=True)
signal.pause()
"""


class Bench:
    def __init__(self) -> None:
        self.parameters = {"weight": torch.arange(600, dtype=torch.float32).reshape(30, 20)}
        self.drops: list[tuple[str, str]] = []
        self.publisher = WeightPublisher(
            lambda: self.parameters.items(), on_drop=lambda *who: self.drops.append(who), chunk_bytes=256, deadline_s=60
        )

    def process(self, *deaf_to: str) -> subprocess.Popen[str]:
        """An engine in a process of its own, so that SIGKILL can end it without a goodbye."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", MUTE, self.publisher.endpoint, *deaf_to]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        self.publisher.wait_for_engines(1, 60)
        return process


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.publisher.close()


@pytest.mark.parametrize("moment", ["announce", "load"])
def test_a_successor_ends_the_wait_for_a_killed_engine_and_is_not_dropped_for_it(bench, moment):
    old = bench.process(moment)  # never answers ``moment``
    bench.publisher.publish(0)
    with pytest.raises(TimeoutError):
        bench.publisher.wait_committed(0.5)
    old.kill()
    old.wait()
    new = FakeEngine(bench.publisher.endpoint, "generator/0")
    report = bench.publisher.wait_committed(30)  # the deadline of a phase is 60
    assert report.engines == [] and report.dropped == {} and bench.drops == []
    bench.publisher.wait_for_engines(1, 30)
    bench.publisher.publish(0)
    report = bench.publisher.wait_committed(30)
    assert report.engines == ["generator/0"] and new.versions == [0] and new.told == ""
    assert torch.equal(new.weights["weight"], bench.parameters["weight"])
    new.close()


def test_a_successor_of_an_idle_engine_lacks_every_version(bench):
    old = bench.process()
    bench.publisher.publish(4)
    assert bench.publisher.wait_committed(30).engines == ["generator/0"]
    old.kill()
    old.wait()
    new = FakeEngine(bench.publisher.endpoint, "generator/0")
    bench.publisher.publish(4)
    report = bench.publisher.wait_committed(30)
    if not report.engines:  # its links came one after the other, the push between them
        bench.publisher.wait_for_engines(1, 30)
        bench.publisher.publish(4)
        report = bench.publisher.wait_committed(30)
    assert report.engines == ["generator/0"] and new.versions == [4] and bench.drops == []
    new.close()
