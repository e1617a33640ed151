"""Completions against transformers' generate, token by token, and draws against the softmax, however ranks lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from asyncrl.data.tokens import Conversation
from asyncrl.training.exact import exact
from asyncrl.training.generation import Sampling, complete
from asyncrl.training.opening import build_trainer
from asyncrl.training.sft import SftTrainer
from tests.training.ranks import run_ranks
from tests.training.tiny import VOCAB, add_tokenizer, tiny_folder, tiny_run

ROOM = 12
STOP = (1, 7, 20, 33)  # several, so that some completions end early


def prompts(count=9, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, int(rng.integers(1, 14))).astype(np.int32) for _ in range(count)]


def oracle(lm, ids):
    """By transformers, one prompt a call, with its own attention and cache."""
    with exact(lm.dtype):
        out = lm.generate(
            input_ids=torch.from_numpy(ids).long()[None],
            do_sample=False,
            max_new_tokens=ROOM,
            eos_token_id=list(STOP),
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


def wanted(folder):
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return [oracle(lm, ids) for ids in prompts()]


def completed(trainer, sampling=None):
    return [ids.tolist() for ids in complete(trainer, prompts(), ROOM, STOP, sampling)]


DRAW = Sampling(temperature=0.8, seed=3, step=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def build(path, rank=0, world=1, dtype="float64", **sections):
    return build_trainer(tiny_run(path, dtype, **sections), rank, world, torch.device("cpu"), SftTrainer)


def test_completions_end_early_and_at_the_limit(folder):
    lengths = [len(ids) for ids in wanted(folder)]
    assert min(lengths) < ROOM and max(lengths) == ROOM and len(set(lengths)) > 2


@pytest.mark.parametrize("budget", [1000, 50, 1])
def test_every_token_is_the_one_that_transformers_generates(folder, budget):
    trainer = build(folder, trainer={"token_budget": budget})
    found = completed(trainer)
    assert found == wanted(folder)
    assert complete(trainer, [], ROOM, STOP) == []


def test_sliding_windows_and_large_embeddings(tmp_path):
    """A window of 2 in two of three layers, scaled embeddings and two norms more: Gemma 3."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=VOCAB, intermediate_size=48, sliding_window=2, layer_types=kinds, initializer_range=0.3, **sizes
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    assert completed(build(str(tmp_path))) == wanted(tmp_path)


WAYS = {
    "sharded": {},
    "whole": {"trainer": {"shard": False, "token_budget": 60}},
    "split": {"parallel": {"tp": 2}},
    "recomputed": {"trainer": {"activation_checkpointing": "full", "token_budget": 60}},
    "mixed": {"model": {"compute_dtype": "float32"}},  # FSDP2 casts what goes into each layer
    "lora": {"lora": {"rank": 2}},
    "dora": {"lora": {"rank": 2, "dora": True}},
}
TALK = Conversation(np.arange(2, 9, dtype=np.int32), np.arange(7) > 2)


def adapted(trainer):
    """Gives the adapters values that change what is generated, the same however they are sharded."""
    for layer in trainer.policy.adapters.layers.values() if trainer.policy.adapters else ():
        b = layer.lora_B.weight
        values = torch.arange(b.numel(), dtype=torch.float64).sin().view(b.shape) * 0.3
        if isinstance(b, DTensor):
            values = distribute_tensor(values, b.device_mesh, b.placements)
        with torch.no_grad():
            b.copy_(values)
    return trainer


def job(rank, world, path):
    """By way: all completions, those of a single prompt, and whether the loss is what it was before."""
    found = {}
    for way, sections in WAYS.items():
        trainer = adapted(build(path, rank, world, **sections))
        before = trainer.loss([TALK])
        alone = [ids.tolist() for ids in complete(trainer, prompts()[:1], ROOM, STOP)]
        found[way] = completed(trainer), alone, before == trainer.loss([TALK]), completed(trainer, DRAW)
    return found


def test_two_ranks_generate_the_same_however_the_policy_lies_on_them(folder):
    plain = wanted(folder)
    by_way = {way: plain for way in WAYS} | {
        way: completed(adapted(build(folder, **WAYS[way]))) for way in ("lora", "dora")
    }
    assert plain != by_way["lora"] != by_way["dora"] != plain
    drawn = completed(build(folder), DRAW)
    assert drawn != plain
    for found in run_ranks(2, job, folder):
        for way, (completions, alone, unchanged, sampled) in found.items():
            assert completions == by_way[way], way
            assert alone == completions[:1] and unchanged, way
            assert sampled == drawn or way in ("lora", "dora", "mixed"), "equal draws of equal logits"


def test_draws_change_with_seed_step_and_prompt_and_with_nothing_else(folder):
    trainer = build(folder)
    first = completed(trainer, DRAW)
    assert completed(trainer, DRAW) == first == completed(build(folder, trainer={"token_budget": 50}), DRAW)
    others = [completed(trainer, Sampling(0.8, *others)) for others in ((4, 5), (3, 6))]
    assert first != others[0] != others[1] != first
    same = complete(trainer, [prompts()[0]] * 20, ROOM, STOP, DRAW)
    assert len({tuple(ids) for ids in same}) > 10
    assert completed(trainer, Sampling(1e-6, 3, 5)) == wanted(folder), "hardly any temperature is greedy"
