"""The trainer's log-probs against transformers' own logits, for models that change them after the projection."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.training.errors import ModelError
from asyncrl.training.head import LogitRule
from asyncrl.training.model import load_policy, prepare
from asyncrl.training.packing import pack
from tests.training.tiny import VOCAB, make_samples, tiny_folder

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
FAMILIES = {
    "gemma2": dict(final_logit_softcapping=3.0, attn_logit_softcapping=None, head_dim=8, query_pre_attn_scalar=8),
    "cohere": dict(logit_scale=0.25),
    "granite": dict(logits_scaling=4.0),
    "phi": dict(partial_rotary_factor=1.0),  # its head has a bias
    "qwen3": dict(head_dim=8),
}


def model(family):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    bias = lm.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias)
    return lm


def changed(config):
    rule = LogitRule.of(config)
    return rule.softcap is not None or rule.scale != 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_models_own_logits(family, temperature):
    lm, samples = model(family), make_samples(groups=3, size=1)
    assert changed(lm.config) == (family in ("gemma2", "cohere", "granite"))
    assert (lm.get_output_embeddings().bias is not None) == (family == "phi")
    for s in samples:
        ids = torch.as_tensor(np.concatenate([s.prompt_ids, s.token_ids]), dtype=torch.int64)
        with torch.no_grad():
            logp = (lm(ids[None]).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        s.logprobs[:] = logp[len(s.prompt_ids) - 1 :].numpy()
    policy = prepare(lm, torch.float32)
    batch = pack(samples, 0, torch.device("cpu"))
    got, _ = policy(batch, temperature)
    assert (got - batch.behaviour_M).abs().max() < 1e-5
    got.sum().backward()
    assert all(p.grad is not None for p in lm.get_output_embeddings().parameters())


def test_scales_of_unknown_meaning_are_refused(tmp_path):
    """The same key multiplies in one family and divides in another."""
    folder = Path(tiny_folder(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"logits_scaling": 8.0}))
    with pytest.raises(ModelError, match=r"qwen3 sets logits_scaling=8\.0"):
        load_policy(folder)
