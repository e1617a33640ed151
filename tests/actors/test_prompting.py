"""Prompts that do not fit the engine are passed over and counted, in both splits."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.actors.prompting import PromptSource
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config

MODEL = Path(__file__).resolve().parents[2] / "asyncrl" / "assets" / "qwen3-tiny"
TASK = """
def task(split, index, completion=None):
    if completion is None:
        return {"prompt": "abc " * (60 if index % 3 == 0 else 2)}
    return 0.0
"""


def source(tmp_path, **generator) -> PromptSource:
    (tmp_path / "task.py").write_text(TASK)
    cfg = Config()
    cfg.env.kind, cfg.env.function = "function", f"{tmp_path}/task.py:task"
    cfg.env.size, cfg.env.heldout_size = 9, 7
    cfg.sampling.max_tokens, cfg.generator.max_model_len = 8, 64
    for key, value in generator.items():
        setattr(cfg.generator, key, value)
    return PromptSource(cfg, AutoTokenizer.from_pretrained(MODEL))


def test_long_prompts_are_passed_over_and_counted(tmp_path):
    prompts = source(tmp_path)
    seen = [prompts.next()[0].index for _ in range(6)]
    assert sorted(seen) == [1, 2, 4, 5, 7, 8] and prompts.cursor.too_long <= 3
    prompts.next()
    assert prompts.cursor.too_long >= 3
    fitting, too_long = prompts.heldout()
    assert [p.index for p in fitting] == [1, 2, 4, 5] and too_long == 3


def test_no_prompt_fits(tmp_path):
    prompts = source(tmp_path, max_model_len=9)
    with pytest.raises(RunFailed, match=r"all 9 prompts have more than 1 tokens .*raise the first or lower the second"):
        prompts.next()
    with pytest.raises(RunFailed, match="no held-out prompt fits 1 tokens"):
        prompts.heldout()


def test_a_tokenizer_without_a_chat_template(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = None
    with pytest.raises(RunFailed, match="has no chat template; put one there"):
        PromptSource(Config(), tokenizer)
