from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.training import checkpoint, export
from asyncrl.training.errors import CheckpointError
from asyncrl.training.opening import build_trainer
from tests.training.tiny import make_samples, tiny_folder, tiny_run


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def path(request, tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", tied=request.param)


def trainer_on(path, dtype="float64", **sections):
    sections = {"optim": {"weight_decay": 0.1, "schedule": "cosine"}, "trainer": {"steps": 9}} | sections
    return build_trainer(tiny_run(path, dtype, **sections), 0, 1)


def steps(trainer, first, last):
    for i in range(first, last):
        trainer.step([make_samples(seed=i)])


def weights(trainer):
    return torch.cat([p.detach().flatten() for _, p in trainer.named_parameters_hf()]).clone()


def test_save_load_continue_equals_uninterrupted(path, tmp_path):
    whole = trainer_on(path)
    steps(whole, 0, 6)
    first = trainer_on(path)
    steps(first, 0, 3)
    bad = make_samples(seed=50)
    folder = first.save(tmp_path)
    assert folder.name == "step_000003" and bad
    second = trainer_on(path)
    assert second.load_latest(tmp_path) == folder
    assert second.version == 3 and torch.equal(weights(second), weights(first))
    steps(second, 3, 6)
    assert torch.equal(weights(second), weights(whole))  # same mesh, order and kernels: bit-identical


def test_load_replaces_what_the_trainer_had(path, tmp_path):
    trainer = trainer_on(path)
    steps(trainer, 0, 2)
    want = weights(trainer)
    folder = trainer.save(tmp_path)
    steps(trainer, 2, 5)
    trainer.skipped["no_tokens"] = 9
    trainer.load(folder)
    assert torch.equal(weights(trainer), want) and trainer.version == 2 and not trainer.skipped
    steps(trainer, 2, 3)
    again = trainer_on(path)
    steps(again, 0, 3)
    assert torch.equal(weights(trainer), weights(again))


def test_a_checkpoint_before_the_first_step_has_no_optimizer_state(path, tmp_path):
    folder = trainer_on(path).save(tmp_path)
    second = trainer_on(path)
    steps(second, 0, 1)
    second.load(folder)
    assert not second.optimizer.state
    steps(second, 0, 1)
    fresh = trainer_on(path)
    steps(fresh, 0, 1)
    assert torch.equal(weights(second), weights(fresh))


def test_export_loads_in_transformers_as_it_is(path, tmp_path):
    trainer = trainer_on(path, "float32")
    steps(trainer, 0, 2)
    before = weights(trainer)
    hf = trainer.save(tmp_path) / "hf"
    assert torch.equal(weights(trainer), before)
    lm, info = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    names = dict(lm.named_parameters())
    for name, p in trainer.named_parameters_hf():
        assert torch.equal(names[name], p), name
    assert AutoTokenizer.from_pretrained(hf).convert_ids_to_tokens([5]) == ["t5"]
    build_trainer(tiny_run(str(hf), "float32"), 0, 1)


@pytest.mark.parametrize("chosen", ["", "bfloat16"])
def test_export_dtype_is_the_source_s_unless_chosen(path, tmp_path, chosen):
    hf = trainer_on(path, checkpoint={"hf_dtype": chosen}).save(tmp_path) / "hf"
    want = torch.bfloat16 if chosen else torch.float32
    assert {t.dtype for t in load_file(hf / "model.safetensors").values()} == {want}
    assert json.loads((hf / "config.json").read_text())["dtype"] == str(want).removeprefix("torch.")
    assert next(AutoModelForCausalLM.from_pretrained(hf).parameters()).dtype == want


def test_each_tensor_goes_out_in_the_dtype_that_it_came_in(path, tmp_path):
    """Norms in fp32 beside bf16 products, whatever the config says or does not say; untrained: the same bytes."""
    path = Path(shutil.copytree(path, tmp_path / "mixed"))
    weights = load_file(path / "model.safetensors")
    mixed = {name: t if "norm" in name else t.to(torch.bfloat16) for name, t in weights.items()}
    save_file(mixed, path / "model.safetensors", {"format": "pt"})
    for dtype in ("float16", None):
        settings = json.loads((path / "config.json").read_text())
        settings.pop("dtype", None)
        (path / "config.json").write_text(json.dumps(settings | ({"dtype": dtype} if dtype else {})))
        hf = trainer_on(str(path)).save(tmp_path / str(dtype)) / "hf"
        out = load_file(hf / "model.safetensors")
        assert {n: (t.dtype, t.tolist()) for n, t in out.items()} == {
            n: (t.dtype, t.tolist()) for n, t in mixed.items()
        }
        assert (hf / "config.json").read_bytes() == (path / "config.json").read_bytes()


def test_large_exports_are_cut_into_files_with_an_index(path, tmp_path, monkeypatch):
    plan = export.plan_files
    monkeypatch.setattr(export, "plan_files", lambda sizes: plan(sizes, limit=20_000))
    trainer = trainer_on(path, "float32")
    hf = trainer.save(tmp_path) / "hf"
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and not (hf / "model.safetensors").exists()
    lm, info = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(dict(lm.named_parameters())[n], p) for n, p in trainer.named_parameters_hf())


def test_random_number_generators_are_restored(path, tmp_path):
    """torchtune saves none."""
    trainer = trainer_on(path)
    torch.rand(3), np.random.rand(3), random.random()
    folder = trainer.save(tmp_path)
    want = torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()
    trainer.load(folder)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == want


def test_keeps_the_newest(path, tmp_path):
    trainer = trainer_on(path)
    for _ in range(4):
        trainer.step([])
        trainer.save(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    assert trainer_on(path).load_latest(tmp_path).name == "step_000004"


def test_saving_a_version_again_replaces_it(path, tmp_path):
    trainer = trainer_on(path)
    trainer.save(tmp_path)
    trainer.step([make_samples()])
    trainer.version = 0
    folder = trainer.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000000"]
    other = trainer_on(path)
    other.load(folder)
    assert torch.equal(weights(other), weights(trainer))


def full_disk(monkeypatch, where):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, fail)


PLACES = [
    "asyncrl.training.checkpoint.write_tensors",
    "asyncrl.training.export.write_tensors",
    "asyncrl.training.export.shutil.copyfile",
    "asyncrl.training.files.os.fsync",
    "asyncrl.training.checkpoint.fresh",
    "asyncrl.training.checkpoint.publish",
]


@pytest.mark.parametrize("where", PLACES)
def test_a_full_disk_leaves_the_previous_checkpoint_valid(path, tmp_path, monkeypatch, where):
    trainer = trainer_on(path)
    trainer.step([make_samples()])
    good = trainer.save(tmp_path, keep=1)
    want = weights(trainer)
    trainer.step([make_samples()])
    with monkeypatch.context() as m:
        full_disk(m, where)
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.save(tmp_path, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]
    other = trainer_on(path)
    other.load_latest(tmp_path)
    assert torch.equal(weights(other), want)
    assert trainer.save(tmp_path, keep=1).name == "step_000002"  # and the run goes on once there is room


def test_a_write_that_the_kernel_refuses(path, tmp_path):
    """A real failed write: the process may not write files above 20 kB."""
    trainer = trainer_on(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(CheckpointError):
            trainer.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_an_error(path, tmp_path, damage):
    """torchtune: a failed resume was a warning and a start from the base model."""
    folder = trainer_on(path).save(tmp_path)
    file = folder / ("manifest.json" if damage == "manifest" else "state/rank_00000.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "remove":
        os.remove(file)
    else:
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"damaged|not a complete"):
        trainer_on(path).load_latest(tmp_path)


def test_a_crashed_attempt_is_not_a_checkpoint(path, tmp_path):
    """prime-rl #2628, #2699: half-written checkpoints taken for whole ones."""
    trainer = trainer_on(path)
    trainer.save(tmp_path)
    (tmp_path / ".step_000007.tmp" / "state").mkdir(parents=True)
    (tmp_path / "step_notes").mkdir()
    assert checkpoint.latest(tmp_path).name == "step_000000"
    assert checkpoint.latest(tmp_path / "absent") is None
    assert trainer_on(path).load_latest(tmp_path / "absent") is None
    trainer.version = 7
    assert trainer.save(tmp_path).name == "step_000007"


def test_another_model_is_refused(path, tmp_path):
    folder = trainer_on(path).save(tmp_path)
    tied = "lm_head.weight" not in dict(trainer_on(path).named_parameters_hf())
    other = trainer_on(tiny_folder(tmp_path / "other", tied=not tied))
    with pytest.raises(CheckpointError, match=r"another model.*tie_word_embeddings"):
        other.load(folder)
    assert Path(folder).is_dir()
