from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.training.errors import ModelError
from asyncrl.training.model import load_policy, prepare
from asyncrl.training.packing import pack
from tests.training.tiny import make_samples, spoil_weights, tiny_folder, tiny_lm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_folder(tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_loads_in_the_master_dtype(folder):
    policy = load_policy(folder, torch.float64)
    assert {p.dtype for p in policy.parameters()} == {torch.float64}
    assert policy.lm.get_output_embeddings().weight is policy.lm.get_input_embeddings().weight


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="not a folder"):
        load_policy(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "what"), [("tokenizer.json", "tokenizer"), ("model.safetensors", "weights"), ("config.json", "config")]
)
def test_missing_file(folder, name, what):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=f"no {what}"):
        load_policy(folder)


def test_unknown_architecture(folder):
    edit_config(folder, model_type="quantum_llm")
    with pytest.raises(ModelError, match="unknown architecture"):
        load_policy(folder)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_must_fit_the_config_exactly(folder, change):
    """torchtune #2237: leftover or missing keys must fail, not be initialised at random."""
    spoil_weights(folder, change)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp"):
        load_policy(folder)


def test_wrong_master_dtype_is_refused():
    with pytest.raises(ModelError, match="master weights"):
        prepare(tiny_lm().to(torch.bfloat16), torch.float32)


def test_rotary_frequencies_are_not_cast_with_the_weights(folder):
    """SkyRL #1725: inv_freq rounded to bf16 shifts every position."""
    wide, narrow = (
        load_policy(folder, dtype).lm.model.rotary_emb.inv_freq for dtype in (torch.float64, torch.bfloat16)
    )
    assert narrow.dtype == torch.float32
    assert torch.equal(wide.float(), narrow)


def test_tying_is_read_from_the_config(tmp_path):
    """torchtune #2237: an untied head dropped because tying was hard-coded."""
    policy = load_policy(tiny_folder(tmp_path / "untied", tied=False))
    names = [n for n, _ in policy.lm.named_parameters()]
    assert "lm_head.weight" in names
    assert policy.lm.lm_head.weight is not policy.lm.model.embed_tokens.weight


def test_dropout_in_the_config_does_not_touch_log_probs():
    batch = pack(make_samples(), 0, torch.device("cpu"))
    plain, dropping = (prepare(tiny_lm(attention_dropout=p).train(), torch.float32)(batch, 1.0)[0] for p in (0.0, 0.5))
    assert torch.equal(plain, dropping)
