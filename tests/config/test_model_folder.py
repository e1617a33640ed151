"""A model folder that cannot be trained or served is refused with the reason, before torch is imported."""

from __future__ import annotations

import json

import pytest

from asyncrl.config.model_folder import check_model_folder, knows_architecture, read_safetensors_header, weight_files
from tests.config.folders import make_model_folder, write_safetensors


@pytest.fixture
def folder(tmp_path):
    return make_model_folder(tmp_path / "model")


def found(folder, key="generator.max_model_len", tokens=128):
    problems = check_model_folder(folder, key, tokens)
    return [f"{problem.key}: {problem.message} -> {problem.remedy}" for problem in problems]


def test_a_good_folder_has_no_problem(folder):
    assert found(folder) == []


def test_sharded_weights_are_read_through_the_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    assert ["model-00002-of-00002.safetensors cannot be read" in text for text in found(folder)] == [True]
    write_safetensors(folder / "model-00002-of-00002.safetensors")
    assert found(folder) == []


def test_no_folder_but_a_hub_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text,) = found(tmp_path / "Qwen" / "Qwen3-0.6B")
    assert "is not a folder" in text and "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B" in text
    (text,) = found(tmp_path / "some" / "deep" / "folder")
    assert "is not a folder" in text and "hf download" not in text


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (text,) = found(folder)
    assert "has no tokenizer" in text


@pytest.mark.parametrize("text", ["", "[]", "{", "version https://git-lfs.github.com/spec/v1"])
def test_a_damaged_tokenizer(folder, text):
    (folder / "tokenizer.json").write_text(text)
    (found_text,) = found(folder)
    assert "tokenizer.json cannot be read" in found_text and "copy the tokenizer's files again" in found_text


def test_unknown_architecture(tmp_path):
    folder = make_model_folder(tmp_path / "model", architectures=["Qwen3ForCausalLLM"])
    texts = found(folder)
    assert len(texts) == 2, "one for transformers, one for vLLM"
    assert all("does not know the architecture Qwen3ForCausalLLM" in text for text in texts)


def test_the_registries_of_the_installed_libraries_are_found():
    """Guards the places that ``knows_architecture`` reads: if a release moves them, nothing would be checked."""
    for library in ("transformers", "vllm"):
        assert knows_architecture(library, "Qwen3ForCausalLM") and knows_architecture(library, "LlamaForCausalLM")
        assert not knows_architecture(library, "NoSuchForCausalLM")


def test_no_architecture(tmp_path):
    assert "names no architecture" in found(make_model_folder(tmp_path / "model", architectures=None))[0]


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_unreadable_settings(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json cannot be read" in found(folder)[0]


def test_wrong_dtype(folder):
    write_safetensors(folder / "model.safetensors", dtype="F8_E4M3")
    (text,) = found(folder)
    assert "weights of type F8_E4M3" in text and "BF16" in text


def test_quantised(tmp_path):
    folder = make_model_folder(tmp_path / "model", quantization_config={"bits": 4})
    assert "is quantised" in found(folder)[0]


@pytest.mark.parametrize("key", ["generator.max_model_len", "sft.max_length"])
def test_context_longer_than_the_model_has_positions(folder, key):
    assert found(folder, key, 1024) == []
    assert found(folder, key, 1025) == [
        f"{key}: 1025 is more than the 1024 positions of the model -> {key}=1024 or less"
    ]


def test_positions_of_the_text_part_of_a_model_count(tmp_path):
    text = {"text_config": {"max_position_embeddings": 64}}
    folder = make_model_folder(tmp_path / "model", max_position_embeddings=None, **text)
    assert found(folder, tokens=64) == [] and "64 positions" in found(folder, tokens=65)[0]


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in found(folder)[0]


def test_weights_that_lie_beside_the_model_are_not_the_model(folder):
    (folder / "consolidated.safetensors").write_text("of another program")
    assert weight_files(folder) == [folder / "model.safetensors"] and found(folder) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json cannot be read" in found(folder)[0]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"model_type": "qwen2_moe", "num_experts": 60}, "qwen2_moe has a mixture of experts"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "a mixture of experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": None}, "a mixture of experts"),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 64}, "a mixture of experts"),
        ({"model_type": "youtu", "kv_lora_rank": 512}, "youtu has multi-head latent attention"),
        ({"model_type": "gemma2"}, "capped scores"),
        ({"text_config": {"model_type": "some", "attn_logit_softcapping": 30.0}}, "some has attention with capped"),
        ({"model_type": "gpt_oss", "num_local_experts": 1}, "attention with sinks"),
    ],
)
def test_decoders_that_are_not_computed_here_are_refused_by_name(tmp_path, settings, part):
    (text,) = found(make_model_folder(tmp_path / "model", **settings))
    assert part in text and "not part of this version" in text


def test_plain_decoders_of_those_families_are_not(tmp_path):
    plain = {"model_type": "gemma2", "attn_logit_softcapping": None, "num_experts": None, "kv_lora_rank": None}
    assert found(make_model_folder(tmp_path / "model", **plain)) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "cut off, or not a safetensors file"),
    ],
)
def test_damaged_weights(folder, content, reason):
    (folder / "model.safetensors").write_bytes(content)
    (text,) = found(folder)
    assert reason in text


def test_cut_off_weights(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    assert read_safetensors_header(path)["model.norm.weight"]["shape"] == [1]
    path.write_bytes(whole[:-1])
    (text,) = found(folder)
    assert f"has {len(whole) - 1} bytes instead of {len(whole)}" in text


def test_embeddings_of_another_vocabulary(tmp_path):
    folder = make_model_folder(tmp_path / "model", vocab_size=5)
    write_safetensors(folder / "model.safetensors", names=("model.embed_tokens.weight", "model.norm.weight"))
    (text,) = found(folder)
    assert "has 1 embeddings (model.embed_tokens.weight), config.json says vocab_size=5" in text
