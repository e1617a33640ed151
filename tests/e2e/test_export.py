"""What a trainer exports is served by vLLM as it lies, tied and untied, and says what transformers says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.load import REPOSITORY
from asyncrl.training.opening import build_trainer
from tests.e2e.serve_folders import MAX_TOKENS
from tests.training.tiny import make_samples, tiny_run

SHIPPED = REPOSITORY / "asyncrl" / "assets" / "qwen3-tiny"
QUESTIONS = [f"Spell this word backward (example: sun -> nus): {w}" for w in ("cat", "zebra", "house")] + [
    "Hello",
    "1+1",
]


def source(folder, tied: bool) -> str:
    """The shipped model; untied, its head is another matrix than its embedding."""
    shutil.copytree(SHIPPED, folder)
    if not tied:
        lm = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
        head = lm.get_input_embeddings().weight.detach().clone()
        lm.config.tie_word_embeddings = False
        lm.lm_head.weight = torch.nn.Parameter(head.roll(1, 0))  # every answer is another one
        lm.save_pretrained(folder)
    return str(folder)


def export(path: str, root) -> str:
    """Trained for one step, then saved."""
    trainer = build_trainer(tiny_run(path, "float32"), 0, 1, torch.device("cpu"))
    before = {name: p.detach().clone() for name, p in trainer.named_parameters_hf()}
    assert trainer.step([make_samples()]).skipped is None
    assert all(not torch.equal(p, before[name]) for name, p in trainer.named_parameters_hf())
    return str(trainer.save(root) / "hf")


def greedy(folder: str) -> list[list[int]]:
    """transformers' answers to the questions, without the end token's successors."""
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        made = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
        answers.append(made[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.timeout(600)
def test_vllm_serves_an_exported_checkpoint_as_it_is(tmp_path):
    """PipelineRL 7ae377c, torchtune #2237: a head lost or doubled on the way, on tied or untied models."""
    folders = [export(source(tmp_path / f"from_{tied}", tied), tmp_path / f"to_{tied}") for tied in (True, False)]
    command = [sys.executable, "-m", "tests.e2e.serve_folders", str(tmp_path / "answers.json"), *folders]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate("\n".join(QUESTIONS), timeout=500)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    served = json.loads((tmp_path / "answers.json").read_text())
    assert served == [greedy(folder) for folder in folders]
    assert served[0] != served[1] and len({tuple(ids) for ids in served[0]}) > 1
