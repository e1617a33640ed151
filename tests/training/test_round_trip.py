"""A Hugging Face folder, loaded and saved: the same tensors, bytes and config keys, for each family of models."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from asyncrl.training.errors import CheckpointError, ModelError
from asyncrl.training.opening import build_trainer
from asyncrl.training.tensor_files import write_tensors
from tests.training.tiny import VOCAB, make_samples, tiny_folder, tiny_run

FAMILIES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma": GemmaConfig,
    "gemma3": Gemma3TextConfig,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """A folder whose tokenizer every family takes."""
    return Path(tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


def family_folder(tokenizer: Path, path: Path, family: str, tied: bool, dtype: torch.dtype) -> str:
    shutil.copytree(tokenizer, path, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(1)
    config = FAMILIES[family](
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(path)
    return str(path)


def files(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_not_trained_comes_out_as_it_went_in(tokenizer, tmp_path, family, tied):
    """Every file is the same to the last byte, in bf16, as models are stored."""
    source = family_folder(tokenizer, tmp_path / "source", family, tied, torch.bfloat16)
    trainer = build_trainer(tiny_run(source, "float32"), 0, 1)
    hf = trainer.save(tmp_path / "checkpoints") / "hf"
    assert files(hf) == files(Path(source))
    assert (
        json.loads((hf / "config.json").read_text()).keys()
        == json.loads(Path(source, "config.json").read_text()).keys()
    )
    assert ("lm_head.weight" in load_file(hf / "model.safetensors")) is not tied


def test_row_6_the_head_of_an_untied_model_is_its_own(tokenizer, tmp_path):
    """torchtune #2237: an untied head was dropped, because tying was hard-coded."""
    source = family_folder(tokenizer, tmp_path / "source", "llama", False, torch.float32)
    trainer = build_trainer(tiny_run(source, "float32"), 0, 1)
    trainer.step([make_samples()])
    stored = load_file(trainer.save(tmp_path / "checkpoints") / "hf" / "model.safetensors")
    live = dict(trainer.named_parameters_hf())
    assert stored.keys() == live.keys() and all(torch.equal(stored[n], live[n]) for n in live)
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_weight_that_is_stored_twice_comes_out_twice(tokenizer, tmp_path):
    source = Path(family_folder(tokenizer, tmp_path / "source", "qwen2", True, torch.float32))
    change_weights(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    trainer = build_trainer(tiny_run(str(source), "float32"), 0, 1)
    trainer.step([make_samples()])
    stored = load_file(trainer.save(tmp_path / "checkpoints") / "hf" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert stored.keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update(leftover=torch.zeros(2)), r"unexpected keys in the weights: \['leftover'\]"),
        (lambda t: t.pop("model.norm.weight"), r"missing keys in the weights: \['model\.norm\.weight'\]"),
    ],
)
def test_row_6_leftover_and_missing_keys_are_errors(tokenizer, tmp_path, change, match):
    source = Path(family_folder(tokenizer, tmp_path / "source", "llama", True, torch.float32))
    change_weights(source, change)
    with pytest.raises(ModelError, match=match):
        build_trainer(tiny_run(str(source), "float32"), 0, 1)


def test_a_folder_that_has_changed_under_the_run_is_noticed_at_the_save(tokenizer, tmp_path):
    source = Path(family_folder(tokenizer, tmp_path / "source", "llama", True, torch.float32))
    trainer = build_trainer(tiny_run(str(source), "float32"), 0, 1)
    change_weights(source, lambda t: t.update(leftover=torch.zeros(2)))
    with pytest.raises(
        CheckpointError, match=r"prepare .* stores, and the model does not hold, 1 weights, e\.g\. leftover"
    ):
        trainer.save(tmp_path / "checkpoints")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_the_writer_writes_what_safetensors_writes(tmp_path, dtype):
    tensors = {f"{n}é": (100 * torch.randn(3, i + 1)).to(dtype) for i, n in enumerate("bac")}
    tensors |= {"scalar": torch.tensor(3).to(dtype), "empty": torch.zeros(0, 4, dtype=dtype)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    told = write_tensors(tmp_path / "ours", specs, tensors.__getitem__, {"format": "pt"})
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert told == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_the_writer_takes_mixed_dtypes_and_transposed_tensors(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.zeros(0)}
    specs = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    write_tensors(tmp_path / "mixed", specs, tensors.__getitem__)
    found = load_file(tmp_path / "mixed")
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], tensors[n]) for n in found)
    write_tensors(tmp_path / "nothing", {}, tensors.__getitem__)
    with safe_open(tmp_path / "nothing", "pt") as file:
        assert list(file.keys()) == []
    with pytest.raises(ValueError, match=r"a is torch\.float32"):
        write_tensors(tmp_path / "other", {"a": (torch.float32, (6,))}, tensors.__getitem__)
