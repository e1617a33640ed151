"""Adapters that do not fit the model or the other settings, refused before torch is imported."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.lora import ALL_LINEAR, check_lora, chosen, held_dtype, linear_shapes, lora_of
from asyncrl.config.schema import Config

SHAPES = {
    "model.embed_tokens.weight": [50, 8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.self_attn.q_norm.weight": [4],
    "model.layers.0.mlp.down_proj.weight": [8, 16],
    "lm_head.weight": [50, 8],
}
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
ADAPTER = {f"{PREFIX}A.weight": [2, 8], f"{PREFIX}B.weight": [8, 2]}


def write(path, shapes):
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model.safetensors", SHAPES)
    return str(tmp_path)


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    write(folder / "adapter_model.safetensors", ADAPTER)
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "use_rslora": True}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def config(model, **values):
    found = Config()
    found.model.path, found.lora.rank = model, 2
    for key, value in values.items():
        section, name = key.split("__") if "__" in key else ("", key)
        assert hasattr(getattr(found, section) if section else found, name)
        setattr(getattr(found, section) if section else found, name, value)
    return found


def test_the_layers_are_the_matrices_of_the_decoder(model):
    assert list(linear_shapes(Path(model))) == [
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj",
    ]  # fmt: skip
    assert linear_shapes(Path(model) / "no") == {}
    assert list(check_lora(config(model))) == [] == list(check_lora(config(model, lora__rank=4)))


@pytest.mark.parametrize(
    ("values", "key", "says", "remedy"),
    [
        ({"lora__targets": ["q_proj", "c_attn"]}, "lora.targets", "c_attn", "down_proj, k_proj, q_proj"),
        ({"lora__targets": ["lm_head"]}, "lora.targets", "lm_head", "choose all-linear"),
        ({"lora__targets": ["embed_tokens"]}, "lora.targets", "embed_tokens", "choose all-linear"),
        ({"lora__targets": []}, "lora.targets", "no target", "all-linear"),
        ({"lora__rank": 5}, "lora.rank", "self_attn.k_proj, a matrix of 4 x 8", "lora.rank=4 or less"),
        ({"parallel__tp": 2}, "parallel.tp", "split", "parallel.dp_shard"),
        ({"trainer__master_dtype": "bfloat16"}, "trainer.master_dtype", "lose digits", "float32"),
        ({"lora__dropout": 0.1}, "lora.dropout", "without dropout", "lora.dropout=0"),
        ({"model__adapter": "/no/such"}, "model.adapter", "cannot be read", "PEFT folder"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_remedy(model, values, key, says, remedy):
    (problem,) = check_lora(config(model, **values))
    assert problem.key == key and says in problem.message and remedy in problem.remedy


def test_what_works_is_accepted(model, adapter):
    assert not list(check_lora(config(model, lora__rank=0, lora__targets=["nothing"], parallel__tp=2)))
    assert not list(check_lora(config(model, lora__dropout=0.1, mode="sft")))
    assert not list(check_lora(config("", mode="sft", lora__rank=1000)))  # a new model; the trainer looks at it
    assert not list(check_lora(config(model, lora__dora=True, model__compute_dtype="bfloat16")))
    assert not list(check_lora(config(model, lora__rank=0, model__adapter=str(adapter))))


def test_an_adapter_to_go_on_from_says_what_it_is(model, adapter):
    found = lora_of(config(model, lora__rank=0, lora__dropout=0.5, model__adapter=str(adapter)))
    assert (found.rank, found.alpha, found.rslora, found.dora, found.dropout) == (2, 4.0, True, False, 0.5)
    assert found.targets == ["model.layers.0.self_attn.q_proj"]
    assert lora_of(config(model, lora__rank=0)) is None


def test_other_settings_than_the_adapter_s_are_refused(model, adapter):
    (problem,) = check_lora(config(model, lora__rank=2, model__adapter=str(adapter)))
    assert problem.key == "model.adapter" and "lora.alpha=16.0 (the folder has 4.0)" in problem.message
    same = config(model, lora__rank=2, lora__alpha=4.0, lora__rslora=True, model__adapter=str(adapter))
    assert not list(check_lora(same))


def test_an_adapter_for_another_model_is_refused(model, adapter):
    write(adapter / "adapter_model.safetensors", {k.replace("q_proj", "c_attn"): v for k, v in ADAPTER.items()})
    (problem,) = check_lora(config(model, lora__rank=0, model__adapter=str(adapter)))
    assert problem.key == "model.adapter" and "c_attn" in problem.message
    problems = list(check_lora(config("", lora__rank=0, mode="sft", model__adapter=str(adapter))))
    assert [p.remedy for p in problems] == ["set model.path to it"]


def test_a_target_is_a_name_or_its_end():
    names = ["a.0.mlp.up_proj", "a.0.mlp.xup_proj"]
    assert chosen(["up_proj", "mlp.up_proj", "proj", ALL_LINEAR], names) == {
        "up_proj": names[:1], "mlp.up_proj": names[:1], "proj": [], ALL_LINEAR: names
    }  # fmt: skip


def test_frozen_weights_are_held_as_they_are_computed_with(model):
    half = {"model__compute_dtype": "bfloat16"}
    assert (
        held_dtype(config(model, **half)) == "bfloat16" and held_dtype(config(model, lora__rank=0, **half)) == "float32"
    )


def test_torch_is_not_imported():
    code = "import sys, asyncrl.config.lora; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
