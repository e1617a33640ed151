"""Damage on the way to an engine is found and named; no process outlives what it belongs to."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest
import torch

from asyncrl.weights.subscribers import Subscribers
from tests.e2e.rig import Rig, make_model, prompt_of, reference_logprobs


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    with Rig(tmp_path_factory.mktemp("untied"), make_model(tied=False)) as rig:
        yield rig


@pytest.fixture
def engine(untied):
    """A running generator that serves the model's present weights; it may be destroyed."""
    if untied.process.poll() is not None:
        untied.start()
    untied.dropped.clear()
    untied.push()
    return untied


def end_of(rig: Rig, seconds: float = 20) -> tuple[int, str]:
    """Exit code of the generator process, and its log."""
    return rig.process.wait(seconds), rig.log.read_text()


def test_an_untied_head_is_updated(engine):
    """PipelineRL 7ae377c, Molt #26, vLLM #51665: a head skipped, or its copy stale."""
    prompt = prompt_of(30)
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(-1)  # the head alone
    engine.push()
    for sample in engine.generate(0, 8, prompt):
        expected = reference_logprobs(engine.model, prompt, sample.token_ids, 1.0)
        assert np.abs(sample.logprobs - expected).max() < 1e-4


def test_flipped_bits_are_found_and_every_tensor_is_named(engine, monkeypatch):
    move = Subscribers.move

    async def damaged(self, version, offset, data, engines):
        data = data.clone()
        data[5] ^= 1
        return await move(self, version, offset, data, engines)

    monkeypatch.setattr(Subscribers, "move", damaged)
    engine.version += 1
    engine.publisher.publish(engine.version)
    report = engine.publisher.wait_committed(60)
    names = [name for name, _ in engine.model.named_parameters()]
    first = names[0]
    assert report.engines == [] and list(report.dropped) == ["generator/0"]
    assert "tensors arrived changed" in report.dropped["generator/0"] and first in report.dropped["generator/0"]
    assert engine.dropped == [("generator/0", report.dropped["generator/0"])]
    code, log = end_of(engine)
    assert code == 1 and f"weights of version {engine.version} do not match" in log.splitlines()[-1]
    assert "do not match" in engine.until("generator_failed").header["reason"]


@pytest.mark.slow
def test_a_skipped_tensor_is_named(engine, monkeypatch):
    parameters = list(engine.model.named_parameters())
    monkeypatch.setattr(engine.publisher, "_named_params", lambda: parameters[:-1])
    monkeypatch.setattr(engine.publisher, "_gatherer", None)
    try:
        engine.version += 1
        engine.publisher.publish(engine.version)
        report = engine.publisher.wait_committed(60)
    finally:
        engine.publisher._gatherer = None
    assert "tensors that the engine needs are missing: lm_head.weight" in report.dropped["generator/0"]
    assert end_of(engine)[0] == 1


def test_sigkill_leaves_no_process_and_a_successor_gets_the_current_version(engine):
    family = engine.processes()
    assert len(family) >= 2, "vLLM's EngineCore is a process of its own"
    os.kill(engine.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family[1:], timeout=10)
    assert not alive
    engine.process.wait()
    engine.start()
    engine.publisher.publish(engine.version)
    assert engine.publisher.wait_committed(60).engines == ["generator/0"]
    assert engine.generate(1, 1, prompt_of(5))[0].versions[0] == engine.version


@pytest.mark.slow
def test_the_death_of_enginecore_ends_the_generator_with_the_reason(engine):
    core = engine.processes()[1]
    core.kill()
    code, log = end_of(engine)
    assert code == 1 and log.splitlines()[-1].startswith("generator/0: ")
    assert engine.until("generator_failed").header["reason"]


@pytest.mark.slow
def test_sigterm_ends_everything_within_seconds_even_under_load(engine):
    family = engine.processes()
    engine.ask(2, 64, prompt_of(30), max_tokens=300)
    os.kill(engine.process.pid, signal.SIGTERM)
    code, _ = end_of(engine, 10)
    assert code == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family[1:], timeout=5)
    assert not alive
    engine.samples.clear()


@pytest.mark.slow
def test_stop_ends_the_generator_with_0(engine):
    engine.controller.send(engine.name, "stop", {"reason": "finished"})
    assert end_of(engine, 10)[0] == 0


def test_an_engine_that_cannot_start_says_why(tmp_path):
    rig = Rig(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(AssertionError, match="generator/0: "), rig:
        pass
    assert rig.process.wait(10) == 1
