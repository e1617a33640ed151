"""Checkpoints that do not fit or are damaged: named in the error, and the trainer is as it was."""

from __future__ import annotations

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import digest, own_checksum
from asyncrl.training.opening import build_trainer
from asyncrl.training.sft import SftTrainer
from asyncrl.training.step import Trainer
from asyncrl.training.stored import StoredState
from tests.training.tiny import make_samples, tiny_config, tiny_folder, tiny_run

SHARD = "state/rank_00000.safetensors"
TABLE = "state/rank_00000.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    """A checkpoint after one step."""
    trainer = build_trainer(tiny_run(model, "float32"), 0, 1)
    trainer.step([make_samples()])
    return trainer.save(tmp_path_factory.mktemp("good"))


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / good.name)


def state(trainer):
    """Everything that loading changes."""
    tensors = [p.detach().clone() for p in trainer.parameters]
    tensors += [t.clone() for p in trainer.parameters for t in trainer.optimizer.state[p].values()]
    numbers = [trainer.version, dict(trainer.skipped), random.getstate(), np.random.get_state()[1].tolist()]
    return tensors, [*numbers, torch.get_rng_state().tolist()]


def refused(trainer, folder, match):
    trainer.step([make_samples(seed=9)])
    trainer.skipped["no_tokens"] = 2
    before = state(trainer)
    with pytest.raises(CheckpointError, match=match):
        trainer.load(folder)
    after = state(trainer)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)) and before[1] == after[1]


def rewrite(folder, name, change):
    """Changes a JSON file as an honest writer would have: with its checksum."""
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    if name == "manifest.json":
        content["sha256"] = own_checksum(content)
    path.write_text(json.dumps(content))
    if name != "manifest.json":
        rewrite(folder, "manifest.json", lambda m: m["files"].update({name: digest(path)}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def raise_version(path):
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))


@pytest.mark.parametrize(
    ("damage", "name", "match"),
    [
        (cut, SHARD, r"rank_00000\.safetensors is truncated: \d+ bytes, \d+ were written"),
        (flip, SHARD, r"rank_00000\.safetensors differs from its checksum"),
        (os.remove, SHARD, r"rank_00000\.safetensors is missing"),
        (flip, TABLE, r"rank_00000\.json differs from its checksum"),
        (flip, "hf/model.safetensors", r"hf/model\.safetensors differs from its checksum"),
        (cut, "manifest.json", r"not a complete checkpoint: manifest\.json"),
        (raise_version, "manifest.json", r"damaged: manifest\.json differs from its own checksum"),
        (os.remove, "manifest.json", r"not a complete checkpoint: manifest\.json"),
    ],
)
def test_damage_is_named(model, folder, damage, name, match):
    damage(folder / name)
    refused(build_trainer(tiny_run(model, "float32"), 0, 1), folder, match)


def test_row_16_a_checkpoint_of_another_mode_is_refused(model, folder):
    """torchtune #877, #935: whatever lies there is loaded. Ours says what it is, and what can be done with it."""
    cfg = tiny_run(model, "float32")
    cfg.mode = "sft"
    trainer = build_trainer(cfg, 0, 1, kind=SftTrainer)
    refused(trainer, folder, rf"is a checkpoint of mode grpo, this run's is sft.*model\.path={folder}/hf")


def test_an_older_format_is_named(model, folder):
    rewrite(folder, "manifest.json", lambda m: m.update(format=1))
    older = json.loads((folder / "manifest.json").read_text())
    del older["sha256"]  # format 1 had none
    (folder / "manifest.json").write_text(json.dumps(older))
    refused(build_trainer(tiny_run(model, "float32"), 0, 1), folder, r"has checkpoint format 1, this .* reads 2")


def test_another_model_is_named_by_its_config(tmp_path, folder):
    path = tiny_folder(tmp_path / "other")
    Qwen3ForCausalLM(tiny_config(intermediate_size=64)).save_pretrained(path)
    trainer = build_trainer(tiny_run(path, "float32"), 0, 1)
    refused(trainer, folder, r"another model.*its config\.json had intermediate_size=48, now 64")


def test_tensors_that_differ_are_named(model, folder):
    trainer = build_trainer(tiny_run(model, "float32"), 0, 1)
    kept = (folder / "manifest.json").read_bytes()
    first = "weight/model.norm.weight"
    rewrite(folder, "manifest.json", lambda m: m["tensors"][first].update(shape=[31]))
    refused(trainer, folder, r"weight/model\.norm\.weight has shape \[31\], the model's is \[32\]")
    (folder / "manifest.json").write_bytes(kept)
    rewrite(folder, "manifest.json", lambda m: [m["tensors"].pop(k) for k in list(m["tensors"]) if "norm" in k])
    refused(trainer, folder, r"holds another model: \['model\.layers\.0\.input_layernorm")


def test_another_master_dtype_is_named(model, folder):
    refused(
        build_trainer(tiny_run(model, "float64"), 0, 1), folder, r"master_dtype differs: .* is F32, the trainer's F64"
    )


def test_another_optimizer_is_named(model, folder, monkeypatch):
    monkeypatch.setattr(Trainer, "moments", ("momentum",))
    trainer = build_trainer(tiny_run(model, "float32"), 0, 1)
    refused(
        trainer, folder, r"state of another optimizer: \['exp_avg', 'exp_avg_sq'\] of .*; this run's keeps momentum"
    )


def test_what_the_update_keeps_comes_back(model, tmp_path, monkeypatch):
    """Such as the norm that clips the next step."""
    seen = []
    monkeypatch.setattr(Trainer, "update_state", lambda self: {"clip": {"norm": 0.1 + 0.2}})
    monkeypatch.setattr(Trainer, "load_update_state", lambda self, state: seen.append(state))
    trainer = build_trainer(tiny_run(model, "float32"), 0, 1)
    trainer.load(trainer.save(tmp_path))
    assert seen == [{"clip": {"norm": 0.1 + 0.2}}]


def test_row_8_a_position_in_other_data_is_refused(model, folder):
    rewrite(folder, "manifest.json", lambda m: m["data"].update(source={"seed": 0, "sft.batch_size": 16}))
    trainer = build_trainer(tiny_run(model, "float32"), 0, 1)
    trainer.data = {"seed": 0, "sft.batch_size": 8}
    refused(trainer, folder, r"counts its position in other data: it had sft\.batch_size=16, now 8")


def test_shards_that_do_not_make_the_tensor_are_refused_before_anything_is_copied(model, folder):
    """Every checksum is right; the last tensor of the model lacks rows."""
    key = "exp_avg_sq/model.norm.weight"
    rewrite(folder, TABLE, lambda t: t["blocks"][key].update(size=[31]))
    refused(build_trainer(tiny_run(model, "float32"), 0, 1), folder, rf"{key}: shards hold 31 of 32 elements")
    rewrite(folder, TABLE, lambda t: t["blocks"].pop(key))
    refused(build_trainer(tiny_run(model, "float32"), 0, 1), folder, f"do not list the same tensors, e.g. {key}")


def test_a_read_that_fails_at_the_last_tensor_changes_nothing(model, folder, monkeypatch):
    """A disk that fails after the checksums were right."""
    real = StoredState.read
    last = "exp_avg_sq/model.norm.weight"

    def read(self, key, dtype, block):
        if key == last:
            raise OSError(5, "Input/output error")
        return real(self, key, dtype, block)

    monkeypatch.setattr(StoredState, "read", read)
    refused(build_trainer(tiny_run(model, "float32"), 0, 1), folder, r"could not load checkpoint .*Input/output error")


def test_row_9_the_manifest_says_what_it_is_and_nothing_is_pickled(model, good):
    """torchtune #1142, #2911: own state that cannot be loaded, an index off by one."""
    manifest = json.loads((good / "manifest.json").read_text())
    assert (manifest["version"], manifest["mode"], manifest["ranks"], good.name) == (1, "grpo", 1, "step_000001")
    assert manifest["config"]["model"]["path"] == model and manifest["model"]["hidden_size"] == 32
    assert manifest["data"]["position"] == {"batches": 1}
    assert manifest["git"] is None or set(manifest["git"]) == {"revision", "changed"}
    files = {str(p.relative_to(good)) for p in good.rglob("*") if p.is_file()}
    assert files == {*manifest["files"], "manifest.json"}
    assert {name.rpartition(".")[2] for name in files} <= {"json", "safetensors", "jinja"}
    assert not any(b"\x80\x04" in (good / n).read_bytes()[:8] for n in files)
    table = json.loads((good / TABLE).read_text())
    assert set(table["generators"]) >= {"python", "numpy", "torch"}


def test_the_git_revision_is_that_of_the_checkout(tmp_path):
    from asyncrl.config.revision import git_revision

    assert git_revision(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert git_revision.__wrapped__(tmp_path) is None  # not a repository that git knows
