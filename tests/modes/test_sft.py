"""The sft mode from a configuration to a checkpoint that transformers loads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.context import Place, RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config, EnvConfig, NewModelConfig
from asyncrl.modes import sft
from asyncrl.report.metrics import read_metrics
from asyncrl.report.summary import read_summary

ONE = Place(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0, attempt=0)


def settings(**sft_keys) -> Config:
    cfg = Config(mode="sft", env=EnvConfig(task="spell_backward", task_config={"max_word_len": 3}, heldout_size=8))
    cfg.model.path = ""
    cfg.model.new = NewModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=32, mlp_size=32)
    cfg.sft.batch_size = 16
    cfg.trainer.steps, cfg.trainer.threads, cfg.checkpoint.every = 6, 1, 3
    cfg.optim.lr = 1e-2
    cfg.report.wandb.enabled, cfg.report.console = False, "none"
    for key, value in sft_keys.items():
        setattr(cfg.sft, key, value)
    return cfg


def run(cfg: Config, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    context = RunContext(ONE, folder)
    try:
        sft.run(cfg, context)
    finally:
        context.close()
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_a_new_model_learns_and_the_same_seed_writes_the_same_bytes(tmp_path):
    first = run(settings(export=str(tmp_path / "shipped")), tmp_path / "a")
    second = run(settings(), tmp_path / "b")
    exported = digests(tmp_path / "shipped")
    assert exported == digests(second / "checkpoints" / "step_000006" / "hf")
    other = settings()
    other.seed = 1
    assert digests(run(other, tmp_path / "c") / "checkpoints" / "step_000006" / "hf") != exported

    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    heldout = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert len(heldout) == 2 and heldout[1] < heldout[0]
    assert [record.get("train/samples") for record in read_metrics(first / "metrics.jsonl")] == [None] + [16] * 6
    summary = read_summary(first / "summary.json")
    assert (summary.mode, summary.ended, summary.steps) == ("sft", "finished", 6)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "shipped")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shipped", dtype=torch.float32)
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_a_resumed_run_ends_at_the_same_weights(tmp_path):
    whole = run(settings(), tmp_path / "whole")
    half = settings()
    half.trainer.steps = 3
    part = run(half, tmp_path / "part")
    rest = settings()
    rest.resume = str(part)
    run(rest, part)
    assert digests(part / "checkpoints" / "step_000006" / "hf") == digests(whole / "checkpoints" / "step_000006" / "hf")


def test_data_that_the_template_cannot_render_ends_the_run_with_its_reason(tmp_path):
    data = tmp_path / "talk.jsonl"
    good = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "b"}]
    bad = [{"role": "tool", "content": "c"}, *good]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [good] * 5 + [bad]))
    cfg = settings(source="jsonl", path=str(data))
    with pytest.raises(RunFailed, match=r"talk\.jsonl conversation 6: the chat template cannot render it"):
        run(cfg, tmp_path / "run")
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.ended == "failed" and "conversation 6" in summary.reason


def test_the_command_on_two_ranks_learns_what_one_rank_learns(tmp_path):
    root = Path(__file__).resolve().parents[2]
    losses = []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(root / "launch" / "train.py"), "+experiment=sft", f"run.dir={tmp_path / str(ranks)}"]
        command += ["trainer.steps=3", "trainer.threads=1", "report.wandb.enabled=false", "model.new.layers=1"]
        environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert "finished after 3 steps" in done.stdout
        records = read_metrics(tmp_path / str(ranks) / "metrics.jsonl")
        losses.append([record["train/loss"] for record in records if "train/loss" in record])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)
