"""vLLM's own process stands still: the generator ends with the reason, so that it can be replaced."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from asyncrl.actors.process import last_words
from asyncrl.weights.subscribers import Subscribers
from tests.e2e.rig import Rig, prompt_of


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    with Rig(tmp_path_factory.mktemp("hanging"), token_deadline_s=3) as rig:
        yield rig


@pytest.fixture
def engine(hanging):
    """A running generator that serves the model's present weights; it may be destroyed."""
    if hanging.process.poll() is not None:
        hanging.start()
    hanging.push()
    return hanging


def check_end(rig: Rig, reason: str, family: list[psutil.Process], seconds: float) -> None:
    assert rig.process.wait(seconds) == 1
    assert last_words(rig.log, rig.name).startswith(reason)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "a process that stands still outlived its generator"


def test_requests_that_get_no_token_end_the_generator(engine):
    family = engine.processes()
    engine.ask(0, 8, prompt_of(30), max_tokens=300)
    time.sleep(0.2)  # some tokens are drawn; it does not matter if none is yet
    os.kill(family[1].pid, signal.SIGSTOP)
    check_end(engine, "EngineBroken: waited 3 s for vLLM to draw a token for any of ", family, 60)
    assert "waited 3 s for vLLM" in engine.until("generator_failed").header["reason"]
    engine.samples.clear()


@pytest.mark.slow
def test_an_update_that_hangs_ends_the_generator_as_soon_as_the_publisher_has_given_it_up(engine, monkeypatch):
    family, load = engine.processes(), Subscribers.load

    async def stop_first(self, *arguments):
        os.kill(family[1].pid, signal.SIGSTOP)
        return await load(self, *arguments)

    monkeypatch.setattr(Subscribers, "load", stop_first)
    engine.version += 1
    engine.publisher.publish(engine.version)
    report = engine.publisher.wait_committed(60)
    assert "did not load and commit: worker/0/0 left: not heard for" in report.dropped["generator/0"]
    check_end(engine, f"the publisher gave this engine up: it {report.dropped['generator/0']}", family, 30)
