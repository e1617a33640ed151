"""The order of a rank's step. Trainer, publisher and command are fakes that write down what is asked of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.config.errors import RunFailed
from asyncrl.modes import grpo
from asyncrl.rollouts import cut
from asyncrl.training.metrics import StepReport


class FakePublisher:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def publish(self, version: int) -> None:
        self.log.append(f"publish {version}")

    def wait_gathered(self) -> None:
        self.log.append("wait_gathered")


class FakeTrainer:
    def __init__(self, log: list[str], skips: bool = False) -> None:
        self.log, self.version, self.skips = log, 3, skips

    def step(self, micro_batches, before_update):
        self.log.append("forward and backward")
        if not self.skips:
            before_update()
            self.log.append("update")
        self.version += 1
        return StepReport(skipped="no_tokens" if self.skips else None, version=self.version)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(cut, "decode", lambda header, buffers: [])
    return SimpleNamespace(header={"version": 3}, buffers=[np.zeros(0)])


def test_a_push_overlaps_the_next_forward_and_backward_and_no_more(command):
    log: list[str] = []
    trainer, publisher = FakeTrainer(log), FakePublisher(log)
    grpo._step(trainer, publisher, command)
    command.header["version"] = 4
    grpo._step(trainer, publisher, command)
    step = ["forward and backward", "wait_gathered", "update"]
    assert log == [*step, "publish 4", *step, "publish 5"]


def test_a_skipped_step_is_a_version_that_engines_get(command):
    log: list[str] = []
    report = grpo._step(FakeTrainer(log, skips=True), FakePublisher(log), command)
    assert log == ["forward and backward", "publish 4"] and report.skipped == "no_tokens"


def test_a_batch_of_another_version_is_refused(command):
    command.header["version"] = 5
    with pytest.raises(RunFailed, match="batch 5 arrived at a trainer of version 3"):
        grpo._step(FakeTrainer([]), FakePublisher([]), command)
