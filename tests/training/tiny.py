"""Tiny random models and synthetic samples for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import Config
from asyncrl.rollouts.types import TrainSample

VOCAB = 61


def tiny_config(tied: bool = True, **changes: object) -> Qwen3Config:
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3Config(**(sizes | changes))


def tiny_lm(tied: bool = True, seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(tiny_config(tied, **changes))


def tiny_folder(path: Path, tied: bool = True, seed: int = 0) -> str:
    """A complete Hugging Face folder of a tiny random model."""
    tiny_lm(tied, seed).save_pretrained(path)
    add_tokenizer(path)
    return str(path)


def spoil_weights(folder: Path, change: str) -> None:
    """Makes the weights of a tiny folder misfit its config: one ``missing``, one ``unexpected``, or one misshapen."""
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "unexpected":
        weights["model.layers.1.mlp.extra.weight"] = torch.zeros(2)
    else:
        weights[name] = weights[name][:5].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_tokenizer(path: Path) -> None:
    """A tokenizer with a chat template beside a tiny model's weights."""
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)


def make_samples(
    groups: int = 4, size: int = 4, seed: int = 0, prompt: tuple[int, int] = (3, 9), answer: tuple[int, int] = (1, 8)
) -> list[TrainSample]:
    """Groups of one prompt each, ragged prompts and answers, behaviour log-probs that move the ratio both ways."""
    rng = np.random.default_rng(seed)
    out = []
    for g in range(groups):
        prompt_ids = rng.integers(2, VOCAB, rng.integers(*prompt, endpoint=True)).astype(np.int32)
        for i in range(size):
            n = int(rng.integers(*answer, endpoint=True))
            out.append(
                TrainSample(
                    prompt_ids=prompt_ids,
                    token_ids=rng.integers(1, VOCAB, n).astype(np.int32),
                    logprobs=(-np.log(VOCAB) + 0.5 * rng.standard_normal(n)).astype(np.float32),
                    versions=np.zeros(n, dtype=np.int32),
                    advantages=np.full(n, rng.standard_normal(), dtype=np.float32),
                    ordinal=g,
                    index=i,
                )
            )
    return out


def tiny_run(path: str, dtype: str = "float64", **sections: dict[str, object]) -> Config:
    """A config on ``path`` with master and compute dtype ``dtype``; ``sections`` set further keys."""
    cfg = Config()
    cfg.model.path, cfg.model.compute_dtype, cfg.trainer.master_dtype = path, dtype, dtype
    cfg.trainer.threads = 1
    for section, values in sections.items():
        for key, value in values.items():
            assert hasattr(getattr(cfg, section), key), key
            setattr(getattr(cfg, section), key, value)
    return cfg
