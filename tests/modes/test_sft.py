"""The sft mode from a configuration to a checkpoint that transformers loads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.context import Place, RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config, DataConfig, EnvConfig, NewModelConfig
from asyncrl.data.corpus import EnvCorpus
from asyncrl.modes import sft
from asyncrl.report.metrics import read_metrics
from asyncrl.report.summary import read_summary
from asyncrl.training import checkpoint
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import verify
from asyncrl.training.sft import SftTrainer

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
    counts = [[r["tokens/trained"] for r in read_metrics(done / "metrics.jsonl")[1:]] for done in (whole, part)]
    assert counts[0] == counts[1] and len(counts[0]) == 6 == len(set(counts[0]))
    assert read_summary(part / "summary.json").tokens_trained == counts[0][-1]
    assert digests(part / "checkpoints" / "step_000006" / "hf") == digests(whole / "checkpoints" / "step_000006" / "hf")


def folders(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def saved_at_every_step(tmp_path_factory):
    """A run of 6 steps, three epochs, and the same one of 8 steps."""
    runs = []
    for steps in (6, 8):
        cfg = every_step(steps)
        runs.append(run(cfg, tmp_path_factory.mktemp("runs") / str(steps)))
    return runs


def every_step(steps: int) -> Config:
    cfg = settings()
    cfg.env.size = 32  # an epoch is two steps
    cfg.trainer.steps, cfg.checkpoint.every, cfg.checkpoint.keep = steps, 1, 10
    return cfg


@pytest.mark.parametrize("saved", [1, 2, 6], ids=["middle of an epoch", "end of an epoch", "last step"])
def test_row_8_resumed_at_any_step(saved_at_every_step, tmp_path, monkeypatch, saved):
    """torchtune #2490, #2439: the next batch is the same, found without walking through the data; all bytes agree."""
    shorter, longer = saved_at_every_step
    folder = tmp_path / "run"
    shutil.copytree(shorter, folder)
    for name in folders(folder):
        if int(name[5:]) > saved:
            shutil.rmtree(folder / "checkpoints" / name)
    position = json.loads((folder / "checkpoints" / f"step_{saved:06d}" / "manifest.json").read_text())["data"]
    learnt = [16 * saved]
    assert position["position"] == {"batches": saved, "drawn": learnt, "given": learnt, "skipped": {}}
    asked, example = [], EnvCorpus.example
    monkeypatch.setattr(EnvCorpus, "example", lambda self, i: asked.append(i) or example(self, i))
    cfg = every_step(8)
    cfg.resume = str(folder)
    run(cfg, folder)
    assert len(asked) == 16 * (8 - saved) + 8, "the steps that are left, and the held-out conversations"
    last = "checkpoints/step_000008"
    for part in ("hf", "state"):
        assert digests(folder / last / part) == digests(longer / last / part)


def test_a_finished_run_that_is_resumed_trains_nothing(saved_at_every_step, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved_at_every_step[0], folder)
    before = digests(folder / "checkpoints/step_000006/state")
    cfg = every_step(6)
    cfg.resume = str(folder)
    run(cfg, folder)
    assert digests(folder / "checkpoints/step_000006/state") == before
    assert read_summary(folder / "summary.json").ended == "finished"


def test_other_data_is_no_continuation(saved_at_every_step, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved_at_every_step[0], folder)
    cfg = every_step(8)
    cfg.resume, cfg.sft.batch_size = str(folder), 8
    with pytest.raises(RunFailed, match=r"other data: it had sft\.batch_size=16, now 8"):
        run(cfg, folder)
    assert "sft.batch_size=16" in read_summary(folder / "summary.json").reason


def test_a_truncated_shard_ends_a_resume_with_one_error_that_names_it(saved_at_every_step, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved_at_every_step[0], folder)
    shard = max(folder.glob("checkpoints/step_*/state/rank_00000.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    cfg = every_step(8)
    cfg.resume = str(folder)
    with pytest.raises(RunFailed, match=r"rank_00000\.safetensors is truncated") as failed:
        run(cfg, folder)
    assert failed.value.__suppress_context__ and failed.value.__cause__ is None  # Python would print each of a chain
    assert read_summary(folder / "summary.json").reason == str(failed.value)


def test_the_best_checkpoint_by_the_held_out_loss_stays(tmp_path, monkeypatch):
    losses = [7.0, 5.0, 1.0, 4.0, 3.0, 2.0, 6.0]
    monkeypatch.setattr(SftTrainer, "evaluation", lambda self, batch: {"eval/loss": losses[self.version]})
    cfg = settings()
    cfg.checkpoint.every = cfg.eval.every = cfg.checkpoint.keep = cfg.checkpoint.keep_best = 1
    done = run(cfg, tmp_path / "run")
    assert folders(done) == ["step_000002", "step_000006"]
    assert (done / "checkpoints/best").resolve().name == "step_000002"
    held = [r["time/checkpoint_hold_s"] for r in read_metrics(done / "metrics.jsonl") if r["step"] > 1]
    assert len(held) == 5 and min(held) > 0


def test_a_full_disk_ends_the_run_with_the_reason_and_the_checkpoint_before_is_good(tmp_path, monkeypatch):
    real, calls = checkpoint.write_tensors, []

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        run(settings(export=str(tmp_path / "shipped")), tmp_path / "run")
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.ended == "failed" and "could not write checkpoint" in summary.reason
    assert folders(tmp_path / "run") == ["step_000003"] and not (tmp_path / "shipped").exists()
    verify(tmp_path / "run" / "checkpoints" / "step_000003")


def test_data_that_the_template_cannot_render_ends_the_run_with_its_reason(tmp_path):
    data = tmp_path / "talk.jsonl"
    good = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "b"}]
    bad = [{"role": "developer", "content": "c"}, *good]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in [good] * 5 + [bad]))
    cfg = settings(data=[DataConfig(path=str(data))])
    with pytest.raises(RunFailed, match=r"talk\.jsonl line 6: the chat template cannot render it"):
        run(cfg, tmp_path / "run")
    summary = read_summary(tmp_path / "run" / "summary.json")
    assert summary.ended == "failed" and "line 6" in summary.reason


def test_what_was_cut_is_counted_in_its_step(tmp_path):
    data = tmp_path / "talk.jsonl"
    talks = [
        [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "b" * n}] for n in (2, 3, 30, 40)
    ]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sources = [DataConfig(path=str(data))]
    done = run(settings(data=sources, max_length=20, too_long="cut", batch_size=4), tmp_path / "run")
    for record in read_metrics(done / "metrics.jsonl"):
        assert [record[f"sample/{fate}"] for fate in ("cut", "split", "skipped")] == [2, 0, 0]
        assert record["train/samples"] == 4 and record["train/micro_batches"] == 1
        assert 0 < record["train/packing_efficiency"] < 4 * 20 / 16384 and 0 <= record["train/padding_share"] < 0.15


def test_the_command_on_two_ranks_learns_what_one_rank_learns(tmp_path):
    """Answers and the early stop too: no word is spelt backward yet, so the accuracy does not rise for two steps."""
    root = Path(__file__).resolve().parents[2]
    losses, asked = [], []
    for ranks in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(root / "launch" / "train.py"), "+experiment=sft", f"run.dir={tmp_path / str(ranks)}"]
        command += ["trainer.steps=3", "trainer.threads=1", "report.wandb.enabled=false", "model.new.layers=1"]
        command += ["eval.every=1", "eval.patience=2", "eval.generations=9", "checkpoint.best_by=eval/accuracy"]
        environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        assert "stopped early: eval/accuracy was best at step 0, 0 (eval.patience=2) after 2 steps" in done.stdout
        records = read_metrics(tmp_path / str(ranks) / "metrics.jsonl")
        losses.append([record["train/loss"] for record in records if "train/loss" in record])
        rows = (tmp_path / str(ranks) / "generations.jsonl").read_text().splitlines()
        asked.append([json.loads(row)["prompt"] for row in rows])
        assert folders(tmp_path / str(ranks)) == ["step_000002"]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(asked[0]) == 3 * 9 and asked[0] == asked[1]
