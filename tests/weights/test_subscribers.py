"""An engine that loses a link is dropped in full; a restarted one goes by its names and is not mixed up with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncrl.transport.frames import Message
from asyncrl.weights.planes import ZmqSending
from asyncrl.weights.publisher import WeightPublisher
from asyncrl.weights.subscribers import Subscribers
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
            lambda: self.parameters.items(),
            on_drop=lambda *who: self.drops.append(who),
            chunk_bytes=256,
            deadline_s=60,
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


def eventually(condition: Callable[[], object], deadline_s: float = 30) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("pushes", [0, 1])
def test_an_engine_whose_workers_link_is_lost_between_pushes_is_dropped_in_full(bench, pushes):
    """Its frontend lives on and would serve the last version for ever."""
    engine = FakeEngine(bench.publisher.endpoint, "generator/0", workers=2)
    bench.publisher.wait_for_engines(1, 30)
    for version in range(pushes):
        bench.publisher.publish(version)
        assert bench.publisher.wait_committed(30).engines == ["generator/0"]
    engine.receivers[1].close()
    eventually(lambda: bench.drops and engine.told)
    reason = "failed while nothing was asked of it: worker/0/1 left: closed"
    assert bench.drops == [("generator/0", reason)] and engine.told == reason
    bench.publisher.publish(pushes)
    report = bench.publisher.wait_committed(30)
    assert report.engines == [] and report.dropped == {} and len(bench.drops) == 1, "it is told once"
    engine.close()


def test_a_worker_that_reports_a_failure_while_idle_costs_the_engine_its_place(bench):
    engine = FakeEngine(bench.publisher.endpoint, "generator/0")
    bench.publisher.wait_for_engines(1, 30)
    engine.receivers[0].report("failed", version=-1, reason="no room")
    eventually(lambda: bench.drops and engine.told)
    assert engine.told == "failed while nothing was asked of it: worker/0/0: no room"
    engine.close()


def test_a_frontend_that_finds_a_workers_link_lost_is_told_at_once(bench):
    """The worker would not subscribe again, and the frontend would wait for weights for ever."""
    orphan = FakeEngine(
        bench.publisher.endpoint, "generator/0", workers=2, before_frontend=lambda e: e.receivers[0].close()
    )
    eventually(lambda: orphan.told)
    assert "came without its workers" in orphan.told and [name for name, _ in bench.drops] == ["generator/0"]
    orphan.close()


def test_a_generator_that_ends_in_order_is_not_reported_as_dropped(bench, caplog):
    first = FakeEngine(bench.publisher.endpoint, "generator/0")
    bench.publisher.wait_for_engines(1, 30)
    first._link.close()  # the frontend leaves first, as a generator that is told to stop does
    first.close()
    second = FakeEngine(bench.publisher.endpoint, "generator/1")
    bench.publisher.wait_for_engines(1, 30)
    bench.publisher.publish(0)
    assert bench.publisher.wait_committed(30).engines == ["generator/1"]
    assert bench.drops == [] and "dropped" not in caplog.text
    second.close()


class Links:
    """In the place of the publisher's listener: which process is behind each name, and what was sent."""

    def __init__(self) -> None:
        self.here: dict[str, int] = {}
        self.sent: list[tuple[str, str]] = []

    def session_id(self, peer: str) -> int | None:
        return self.here.get(peer)

    async def send(self, peer: str, kind: str, *_: object, **__: object) -> None:
        self.sent.append((peer, kind))


@pytest.mark.parametrize("replaced", [False, True])
def test_the_drop_of_an_old_process_is_not_told_to_its_successor(replaced):
    """The word of the old worker's silence may be read after the successor's frontend has come."""

    async def scenario() -> tuple[dict[str, str], list[tuple[str, str]]]:
        links = Links()
        subscribers = Subscribers(links, 60, ZmqSending(256))  # type: ignore[arg-type]
        for peer, role, session in (("worker/0/0", "worker", 11), ("frontend/0", "frontend", 12)):
            links.here[peer] = session
            who = {"generator": "generator/0", "role": role, "rank": 0, "workers": 1}
            subscribers._handle(Message("subscribe", who, (), peer, session))
        assert [e.name for e in subscribers.lacking(0)] == ["generator/0"]
        del links.here["worker/0/0"]
        if replaced:
            links.here["frontend/0"] = 13
        silence = {"session": 11, "reason": "not heard for 15.0 s", "goodbye": False, "unacknowledged": 0}
        subscribers._handle(Message("$left", silence, (), "worker/0/0", 11))
        await asyncio.gather(*subscribers._telling)
        return subscribers.dropped, links.sent

    dropped, sent = asyncio.run(scenario())
    assert sent == ([] if replaced else [("frontend/0", "dropped")])
    assert list(dropped) == ([] if replaced else ["generator/0"])
