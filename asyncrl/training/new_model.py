"""A model made from nothing: random weights of the size in ``model.new``, and a tokenizer built from the data."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from pathlib import Path

import torch

from asyncrl.config.context import RunContext
from asyncrl.config.schema import Config
from asyncrl.data.corpus import Corpus
from asyncrl.data.errors import DataError
from asyncrl.data.tokenizer import build_tokenizer

TOKENIZER_TEXTS = 512  # training conversations that a new tokenizer is built from


def with_new_model(cfg: Config, context: RunContext, corpus: Corpus) -> Config:
    """``cfg`` with the path of an untrained model, which rank 0 writes to ``<run>/untrained`` unless it is there."""
    folder = context.run_dir / "untrained"
    if context.rank == 0:
        if not folder.exists():
            write_new_model(cfg, corpus, folder)
        context.publish("new_model", str(folder))
    path = context.await_published("new_model", cfg.deadline.start_s)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, path=path))


def write_new_model(cfg: Config, corpus: Corpus, folder: Path) -> None:
    """A Hugging Face folder with random weights and a tokenizer of its own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer(first_texts(corpus))
    new = cfg.model.new
    torch.manual_seed(cfg.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=new.hidden_size,
            num_hidden_layers=new.layers,
            num_attention_heads=new.heads,
            num_key_value_heads=new.kv_heads,
            head_dim=new.head_dim,
            intermediate_size=new.mlp_size,
            max_position_embeddings=new.max_positions,
            initializer_range=0.5 / math.sqrt(new.hidden_size),  # the usual 0.02 is for widths of about 1000
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    disable_progress_bar()
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.rename(folder)


def first_texts(corpus: Corpus) -> list[str]:
    """What the first ``TOKENIZER_TEXTS`` examples begin with; bad ones are left to their turn in the data."""
    texts = []
    for index in range(min(TOKENIZER_TEXTS, len(corpus))):
        with contextlib.suppress(DataError):
            example = corpus.example(index)
            texts.append(example.messages[0]["content"] if example.messages else example.text or "")
    return texts
