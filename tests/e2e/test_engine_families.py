"""Models with what the tests' usual one lacks: an untied head, biases, sampling defaults of their own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asyncrl.actors.engine import engine_config
from asyncrl.config.schema import GeneratorConfig
from asyncrl.weights.digest import combined, tensor_digests
from tests.e2e.rig import EOS, VOCABULARY, Rig, prompt_of, reference_logprobs
from tests.e2e.scoring import check_scores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=EOS, pad_token_id=0,
    initializer_range=0.15,
)  # fmt: skip


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))


def qwen2() -> PreTrainedModel:
    """Biases are zero in a new model and not in a trained one; Qwen2's folders come with these sampling defaults."""
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 3 * SIZES["num_hidden_layers"], "of queries, keys and values"
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.5)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1, eos_token_id=EOS
    )
    return model


@pytest.fixture(scope="module", params=[llama, qwen2], ids=lambda make: make.__name__)
def family(request, tmp_path_factory):
    """One engine at a time; it serves weights that were pushed to it, not those of its folder."""
    torch.manual_seed(0)
    with Rig(tmp_path_factory.mktemp(request.param.__name__), request.param().float().eval()) as rig:
        rig.push()
        rig.change()
        rig.push()
        yield rig


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer(family, temperature):
    """TRL #6789, PR #7269: with a support that a model's sampling defaults truncate they would not be."""
    check_scores(family, temperature)


def test_a_push_changes_what_is_served_and_its_digest_is_the_trainers(family):
    prompt, before = prompt_of(30), copy.deepcopy(family.model)
    family.change(seed=2)
    report = family.push()
    assert report.engines == ["generator/0"] and report.dropped == {} and family.dropped == []
    trainers = combined(tensor_digests(p.detach() for p in family.model.parameters()))
    assert family.served[-1] == ("generator/0", family.version, trainers)
    samples = family.generate(10, 8, prompt)
    for model, low, high in ((family.model, 0, 1e-4), (before, 0.1, np.inf)):
        errors = [np.abs(s.logprobs - reference_logprobs(model, prompt, s.token_ids, 1.0)).max() for s in samples]
        assert low <= max(errors) < high


def test_a_bf16_engine_has_an_fp32_head(tmp_path):
    """Log-probs of a trained policy suffer when logits are rounded to bf16 first (MiniMax-M1, arXiv 2506.13585)."""
    llama().save_pretrained(tmp_path)
    found = engine_config(GeneratorConfig(dtype="bfloat16"), str(tmp_path)).model_config
    assert (found.dtype, found.head_dtype) == (torch.bfloat16, torch.float32)
