"""A checkpoint is written while training goes on. The disk of these tests waits for an event, never for a clock."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from asyncrl.training import checkpoint
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import verify
from asyncrl.training.host_memory import HostMemory
from asyncrl.training.keeping import Keep
from asyncrl.training.opening import build_trainer
from asyncrl.training.packing import pack
from tests.training.tiny import make_samples, tiny_folder, tiny_run

PATIENCE_S = 60


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def path(request, tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", tied=request.param)


def trainer_on(path, **sections):
    return build_trainer(tiny_run(path, "float32", **sections), 0, 1)


def weights(trainer):
    return torch.cat([p.detach().flatten() for _, p in trainer.named_parameters_hf()]).clone()


def moments(trainer):
    return torch.cat([trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainer.parameters]).clone()


@contextmanager
def slow_disk(monkeypatch, where="asyncrl.training.checkpoint.write_tensors"):
    """Writes wait until ``released`` is set; ``writing`` is set when the first has begun."""
    writing, released = threading.Event(), threading.Event()
    module, _, name = where.rpartition(".")
    real = getattr(__import__(module, fromlist=[name]), name)

    def wait(*args, **kwargs):
        writing.set()
        assert released.wait(PATIENCE_S)
        return real(*args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(where, wait)
        try:
            yield writing, released
        finally:
            released.set()


@pytest.mark.parametrize("stage", ["checkpoint", "export"])
def test_steps_that_run_while_it_is_written_do_not_leak_into_it(path, tmp_path, monkeypatch, stage):
    trainer = trainer_on(path)
    trainer.step([make_samples()])
    want, moment = weights(trainer), moments(trainer)
    with slow_disk(monkeypatch, f"asyncrl.training.{stage}.write_tensors") as (writing, released):
        checkpoint.begin(trainer, tmp_path, Keep())
        assert writing.wait(PATIENCE_S)
        trainer.step([make_samples(seed=1)])
        trainer.skipped["no_tokens"] = 3
        assert not torch.equal(weights(trainer), want) and checkpoint.latest(tmp_path) is None
        released.set()
        trainer.saves.wait()
    other = trainer_on(path)
    folder = other.load_latest(tmp_path)
    verify(folder)
    assert other.version == 1 and not other.skipped
    assert torch.equal(weights(other), want) and torch.equal(moments(other), moment)
    other.step([make_samples(seed=1)])
    assert torch.equal(weights(other), weights(trainer))
    fresh = build_trainer(tiny_run(str(folder / "hf"), "float32"), 0, 1)
    assert torch.equal(weights(fresh), want)


def test_row_7_outputs_are_identical_before_while_and_after_it_is_written(path, tmp_path, monkeypatch):
    """torchtune #2834: an asynchronous save merged into the live weights."""
    trainer = trainer_on(path, checkpoint={"hf_dtype": "bfloat16"})
    trainer.step([make_samples()])
    batch = pack(make_samples(seed=5), 1, torch.device("cpu"), torch.float32)

    def outputs():
        with torch.no_grad():
            return torch.cat(trainer.policy(batch, 1.0))

    before = outputs()
    with slow_disk(monkeypatch, "asyncrl.training.export.write_tensors") as (writing, released):
        checkpoint.begin(trainer, tmp_path, Keep())
        assert writing.wait(PATIENCE_S)
        assert torch.equal(outputs(), before)
        released.set()
        trainer.saves.wait()
    assert torch.equal(outputs(), before)
    trainer.save(tmp_path)
    assert torch.equal(outputs(), before)


def test_it_is_reported_once_it_is_complete(path, tmp_path):
    trainer = trainer_on(path)
    seen = []

    def saved(folder: Path) -> None:
        verify(folder)
        seen.append((folder, checkpoint.latest(tmp_path), threading.current_thread() is threading.main_thread()))

    checkpoint.begin(trainer, tmp_path, Keep(), on_saved=saved)
    trainer.saves.close()
    folder = tmp_path / "step_000000"
    assert seen == [(folder, folder, False)]


def test_a_second_save_begins_before_the_first_is_written(path, tmp_path, monkeypatch):
    trainer = trainer_on(path)
    done = []
    with slow_disk(monkeypatch) as (writing, released):
        for _ in range(2):
            trainer.step([])
            checkpoint.begin(trainer, tmp_path, Keep(), on_saved=lambda p: done.append(p.name))
        assert writing.wait(PATIENCE_S) and not done
        trainer.step([])
        third = threading.Thread(target=checkpoint.begin, args=(trainer, tmp_path, Keep()))
        third.start()
        released.set()  # before it, the third would have waited for a copy's memory
        third.join(PATIENCE_S)
        trainer.saves.wait()
    assert done == ["step_000001", "step_000002"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step_00000{i}" for i in (1, 2, 3)]


def test_a_disk_that_does_not_keep_pace_is_waited_for_no_longer_than_said(path, tmp_path, monkeypatch):
    trainer = trainer_on(path, checkpoint={"copies": 1}, deadline={"checkpoint_s": 0.01})
    with slow_disk(monkeypatch):
        checkpoint.begin(trainer, tmp_path, Keep())
        with pytest.raises(CheckpointError, match=r"rank 0 waited 0\.01 s for room .*checkpoint\.copies.*deadline\.ch"):
            checkpoint.begin(trainer, tmp_path, Keep())
        with pytest.raises(CheckpointError, match=r"waited 0\.01 s for its checkpoints to be written"):
            trainer.saves.wait()
    trainer.saves.deadline_s = PATIENCE_S
    trainer.saves.close()
    assert trainer.save(tmp_path).name == "step_000000"  # the copy that had no room is not counted as taken


def test_a_failure_in_the_background_is_told_at_once_and_raised_at_the_next_wait(path, tmp_path, monkeypatch):
    trainer = trainer_on(path)
    good = trainer.save(tmp_path)
    told, saved = [], []

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    trainer.step([make_samples()])
    with monkeypatch.context() as m:
        m.setattr("asyncrl.training.checkpoint.write_tensors", full)
        checkpoint.begin(trainer, tmp_path, Keep(1), on_saved=saved.append, on_failed=lambda e: told.append(str(e)))
        with pytest.raises(CheckpointError, match=r"could not write checkpoint .*No space left"):
            trainer.saves.wait()
    assert len(told) == 1 and "No space left" in told[0] and not saved
    verify(good)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]
    trainer.saves.wait()  # told once
    assert trainer.save(tmp_path, keep=1).name == "step_000001"


def test_an_unexpected_error_in_the_background_is_a_failure_too(path, tmp_path):
    def saved(folder: Path) -> None:
        raise RuntimeError("the listener is gone")

    trainer = trainer_on(path)
    checkpoint.begin(trainer, tmp_path, Keep(), on_saved=saved)
    with pytest.raises(CheckpointError, match="the listener is gone"):
        trainer.saves.close()
    assert trainer.load_latest(tmp_path).name == "step_000000"


def test_the_hold_is_measured_and_told_once(path, tmp_path, monkeypatch):
    trainer = trainer_on(path)
    assert trainer.saves.metrics() == {}
    with slow_disk(monkeypatch) as (_, released):
        checkpoint.begin(trainer, tmp_path, Keep())
        held = trainer.saves.metrics()
        assert held.keys() == {"time/checkpoint_hold_s"} and held["time/checkpoint_hold_s"] > 0
        released.set()
        trainer.saves.wait()
    assert trainer.saves.metrics().keys() == {"time/checkpoint_write_s"} and trainer.saves.metrics() == {}


def test_a_folder_that_ranks_do_not_share_is_named(path, tmp_path):
    trainer = trainer_on(path)
    written = []
    trainer.saves.begin = lambda take: written.append(take())
    checkpoint.begin(trainer, tmp_path, Keep())
    job = written[0].write
    job.folder, job.rank, job.ranks = tmp_path / ".step_000000.tmp", 1, 2
    with pytest.raises(CheckpointError, match=r"step_000000\.tmp, made by rank 0, is not there: all ranks .* share"):
        job.write()


def test_leftovers_of_a_crash_go_with_the_next_save(path, tmp_path):
    for name in (".step_000003.tmp", ".step_000002.old"):
        (tmp_path / name / "state").mkdir(parents=True)
    trainer_on(path).save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000"]


def state_like(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(5, 7, generator=generator),
        "b": torch.randn(3, 4, generator=generator).t(),
        "c": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
        "d": torch.tensor(3.5, dtype=torch.float64),
    }


@pytest.mark.parametrize("slab", [64, 200, 1 << 20])
def test_copies_are_copies_and_their_memory_is_used_again(slab):
    memory = HostMemory(torch.device("cpu"), slab)
    live, want = state_like(), state_like()
    first = memory.copy(live)
    for tensor in live.values():
        tensor.zero_()
    second = memory.copy(state_like(1))
    assert all(first.tensors[k].dtype == t.dtype and torch.equal(first.tensors[k], t) for k, t in want.items())
    places = {s.data_ptr() for s in first.slabs}
    assert not places & {s.data_ptr() for s in second.slabs}
    first.release()
    third = memory.copy(state_like(2))
    assert {s.data_ptr() for s in third.slabs} == places
    assert torch.equal(second.tensors["a"], state_like(1)["a"]) and torch.equal(third.tensors["a"], state_like(2)["a"])
    third.release()
    smaller = memory.copy({"a": torch.ones(2)})
    assert torch.equal(smaller.tensors["a"], torch.ones(2)) and len(memory._free) < max(2, len(places))


@pytest.mark.gpu
def test_a_gpu_is_copied_into_pinned_memory_and_steps_do_not_leak(path, tmp_path, monkeypatch):
    trainer = trainer_on(path)
    assert trainer.mesh.device.type == "cuda"
    trainer.step([make_samples()])
    want = weights(trainer)
    with slow_disk(monkeypatch) as (_, released):
        checkpoint.begin(trainer, tmp_path, Keep())
        trainer.step([make_samples(seed=1)])
        released.set()
        trainer.saves.wait()
    other = trainer_on(path)
    other.load_latest(tmp_path)
    assert torch.equal(weights(other), want)
    other.step([make_samples(seed=1)])
    assert torch.equal(weights(other), weights(trainer))
