"""The order of a rank's step. Trainer, publisher and command are fakes that write down what is asked of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.config.errors import RunFailed
from asyncrl.modes import grpo
from asyncrl.rollouts import cut
from asyncrl.training import checkpoint
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import verify
from asyncrl.training.metrics import StepReport
from asyncrl.training.opening import build_trainer
from asyncrl.transport.errors import PeerLost
from tests.training.tiny import tiny_folder, tiny_run


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


class FakeLink:
    """Writes down what is sent, and whether the checkpoint was complete by then."""

    def __init__(self, root: Path, gone: bool = False) -> None:
        self.root, self.gone, self.sent = root, gone, []

    def send(self, kind: str, header: dict) -> None:
        if self.gone:
            raise PeerLost("controller", "it has left")
        complete = checkpoint.latest(self.root)
        if complete is not None:
            verify(complete)
        self.sent.append((kind, header, complete))


def saving(tmp_path, rank: int = 0, gone: bool = False):
    """A trainer whose checkpoint has been begun, and the link that hears of it."""
    cfg = tiny_run(tiny_folder(tmp_path / "model"), "float32")
    trainer, link = build_trainer(cfg, 0, 1), FakeLink(tmp_path / "checkpoints", gone)
    grpo._save(cfg, SimpleNamespace(rank=rank, run_dir=tmp_path), trainer, link)
    return trainer, link


def test_saved_is_said_once_the_checkpoint_is_complete_and_by_rank_0(tmp_path):
    trainer, link = saving(tmp_path / "0")
    trainer.saves.close()
    folder = tmp_path / "0" / "checkpoints" / "step_000000"
    assert link.sent == [("saved", {"version": 0, "path": str(folder)}, folder)]
    trainer, link = saving(tmp_path / "1", rank=1)
    trainer.saves.close()
    assert link.sent == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_said_at_once_by_every_rank(tmp_path, monkeypatch, rank):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    trainer, link = saving(tmp_path, rank)
    with pytest.raises(CheckpointError):
        trainer.saves.close()
    ((kind, header, complete),) = link.sent
    assert kind == "trainer_failed" and complete is None
    assert header["reason"].startswith("CheckpointError: could not write checkpoint") and "No space" in header["reason"]


def test_a_controller_that_has_left_does_not_make_a_good_checkpoint_fail(tmp_path):
    trainer, link = saving(tmp_path, gone=True)
    trainer.saves.close()
    assert link.sent == [] and checkpoint.latest(tmp_path / "checkpoints") is not None
