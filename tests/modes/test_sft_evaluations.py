"""Evaluations of the sft mode: what the model answers, the early stop, and the best checkpoint."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import DataConfig, EnvConfig
from asyncrl.envs import load_env
from asyncrl.envs.rewards import RewardResult
from asyncrl.envs.scoring import Scoring
from asyncrl.report.metrics import read_lines
from asyncrl.report.summary import read_summary
from asyncrl.training import answering
from asyncrl.training.sft import SftTrainer
from tests.data.files import talk, write_lines
from tests.modes.test_sft import digests, folders, run, settings


def generations(run_dir):
    return [json.loads(line) for line in (run_dir / "generations.jsonl").read_text().splitlines()]


def evaluations(run_dir):
    return {line["step"]: line for line in read_lines(run_dir / "metrics.jsonl") if "eval/loss" in line}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """(configuration, its run of 6 steps with 5 answers before the first, after every second)."""
    cfg = settings()
    cfg.eval.every, cfg.eval.generations, cfg.eval.max_tokens = 2, 5, 6
    return cfg, run(cfg, tmp_path_factory.mktemp("answers") / "run")


@pytest.mark.parametrize(("step", "model"), [(0, "untrained"), (6, "checkpoints/step_000006/hf")])
def test_answers_are_those_of_transformers_to_the_prompts_that_an_engine_gets(answered, step, model):
    cfg, done = answered
    rows = [row for row in generations(done) if row["step"] == step]
    hf = done / model
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32), AutoTokenizer.from_pretrained(hf)
    env = load_env(cfg.env, "heldout")
    assert len(rows) == 5
    for index, row in enumerate(rows):
        item = env.item(index)
        ids = tokenizer.apply_chat_template(
            item.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = lm.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :].tolist()
        assert row["answer"] == tokenizer.decode(out, skip_special_tokens=True)
        assert row["ended"] == (out[-1] == tokenizer.eos_token_id)
        assert row["prompt"] == tokenizer.decode(ids[0]) and row["reference"] == item.entry["answer"]
        assert row["score"] == env.score(row["answer"], item.entry)


def test_some_answers_end_and_some_do_not(answered):
    assert {row["ended"] for row in generations(answered[1])} == {True, False}


def test_answers_are_measured_at_each_evaluation(answered):
    _, done = answered
    found, rows = evaluations(done), generations(done)
    assert list(found) == [0, 2, 4, 6] and [row["step"] for row in rows] == [s for s in found for _ in range(5)]
    for step, line in found.items():
        mine = [row for row in rows if row["step"] == step]
        assert line["eval/accuracy"] == sum(row["score"] == 1 for row in mine) / 5
        assert line["eval/ended_share"] == sum(row["ended"] for row in mine) / 5
        assert (line["eval/answers"], line["eval/items"], line["eval/failed"]) == (5, 8, 0)
    assert "step 6 answers" in (done / "events.jsonl").read_text()
    assert read_summary(done / "summary.json").accuracy_final == found[6]["eval/accuracy"]


def test_answers_change_nothing_that_is_learnt(answered, tmp_path):
    plain = run(settings(), tmp_path / "plain")
    last = "checkpoints/step_000006/state"
    assert digests(answered[1] / last) == digests(plain / last)


BAD_SCORER = """
import os, time

def task(split, index, completion=None):
    if completion is None:
        return {"prompt": f"{index}+0", "answer": str(index)}
    if completion == str(index):
        return 1.0
    if index == 0:
        raise KeyError("no such entry")
    if index == 1:
        time.sleep(3600)
    if index == 2:
        os._exit(7)
    return float("nan") if index == 3 else 0.0
"""


def test_a_scorer_that_raises_hangs_or_dies_fails_its_answer_alone_and_is_counted(tmp_path):
    (tmp_path / "bad.py").write_text(BAD_SCORER)
    cfg = settings()
    cfg.env = EnvConfig(kind="function", function=f"{tmp_path}/bad.py:task", size=40, heldout_size=6)
    cfg.eval.generations, cfg.eval.max_tokens, cfg.reward.deadline_s, cfg.trainer.steps = 6, 3, 0.5, 1
    done = run(cfg, tmp_path / "run")
    for line in evaluations(done).values():
        kinds = {key[12:]: value for key, value in line.items() if key.startswith("eval/failed/")}
        assert kinds == {"raised": 1, "timeout": 1, "died": 1, "not_finite": 1} and line["eval/failed"] == 4
    for row in generations(done):
        assert (row["score"] is None) == (row["failure"] is not None)
    failures = [row["failure"] or "" for row in generations(done)][:6]
    assert [failure.partition(":")[0] for failure in failures] == ["raised", "timeout", "died", "not_finite", "", ""]
    assert "no such entry" in failures[0] and read_summary(done / "summary.json").ended == "finished"


def test_files_are_asked_in_turns_and_texts_ask_nothing(tmp_path):
    write_lines(tmp_path / "learnt.jsonl", [{"messages": talk(str(k), f"{k}+0")} for k in range(8)])
    more = [*talk("1", "0+1"), *talk("2", "0+2")]
    write_lines(tmp_path / "a.jsonl", [{"messages": more}, {"messages": talk("3", "0+3")}, {"messages": talk("5")}])
    write_lines(tmp_path / "b.jsonl", [{"messages": talk("4", "0+4")}])
    write_lines(tmp_path / "c.jsonl", [{"text": "0+9"}])
    data = [DataConfig(path=str(tmp_path / "learnt.jsonl"))]
    cfg = settings(data=data, heldout=[DataConfig(path=str(tmp_path / f"{name}.jsonl")) for name in "abc"])
    cfg.eval.generations = 3
    rows = generations(run(cfg, tmp_path / "run"))
    assert [(row["reference"], row["score"]) for row in rows[:3]] == [("2", None), ("4", None), ("3", None)]
    assert "0+1" in rows[0]["prompt"] and "0+2" in rows[0]["prompt"]

    cfg.sft.heldout = [DataConfig(path=str(tmp_path / "c.jsonl"))]
    with pytest.raises(RunFailed, match="none of the held-out examples can be answered: they are texts"):
        run(cfg, tmp_path / "texts")
    assert "can be answered" in read_summary(tmp_path / "texts/summary.json").reason


def test_prompts_without_room_for_an_answer_are_counted(tmp_path):
    write_lines(tmp_path / "learnt.jsonl", [{"messages": talk(str(k), f"{k}+0")} for k in range(8)])
    held = [{"messages": talk("1", "0+" * n + "1")} for n in (1, 40, 2)]
    write_lines(tmp_path / "a.jsonl", held)
    cfg = settings(
        data=[DataConfig(path=str(tmp_path / "learnt.jsonl"))], heldout=[DataConfig(path=str(tmp_path / "a.jsonl"))]
    )
    cfg.eval.generations, cfg.eval.max_tokens, cfg.model.new.max_positions = 3, 20, 80
    done = run(cfg, tmp_path / "run")
    assert [line["eval/too_long"] for line in evaluations(done).values()] == [1, 1]
    assert len(generations(done)) == 4


# By version: 2 is no better than 1, the best is at 3, and 4, 5 and 6 are no better.
LOSSES = [7.0, 5.0, 6.0, 1.0, 4.0, math.nan, 1.0, 0.5, 0.4]


def stopping(patience=3):
    cfg = settings()
    cfg.eval.every = cfg.checkpoint.every = 1
    cfg.checkpoint.keep, cfg.eval.patience, cfg.trainer.steps = 10, patience, 8
    return cfg


@pytest.fixture
def losses(monkeypatch):
    monkeypatch.setattr(SftTrainer, "evaluation", lambda self, batch: {"eval/loss": LOSSES[self.version]})


def test_a_run_stops_when_the_held_out_loss_is_no_better(tmp_path, losses):
    cfg = stopping()
    cfg.checkpoint.every = 2  # the step at which it stops is saved all the same
    done = run(cfg, tmp_path / "run")
    assert folders(done) == ["step_000002", "step_000004", "step_000006"]
    summary = read_summary(done / "summary.json")
    assert (summary.ended, summary.steps) == ("finished", 6)
    assert summary.reason == "stopped early: eval/loss was best at step 3, 1 (eval.patience=3)"


@pytest.mark.parametrize("saved", range(1, 7))
def test_a_resumed_run_stops_at_the_same_step(tmp_path, losses, saved):
    done = run(stopping(), tmp_path / "run")
    for name in folders(done):
        if int(name[5:]) > saved:
            shutil.rmtree(done / "checkpoints" / name)
    (done / "metrics.jsonl").unlink()  # what counts is in the checkpoint
    cfg = stopping()
    cfg.resume = str(done)
    run(cfg, done)
    assert folders(done)[-1] == "step_000006"
    summary = read_summary(done / "summary.json")
    assert summary.ended == "finished" and "was best at step 3, 1 " in summary.reason


def test_more_patience_goes_on_from_where_it_stopped(tmp_path, losses):
    done = run(stopping(), tmp_path / "run")
    cfg = stopping(4)
    cfg.resume = str(done)
    run(cfg, done)
    assert folders(done)[-1] == "step_000008" and read_summary(done / "summary.json").reason == ""


def test_accuracy_can_decide_and_more_of_it_is_better(tmp_path, monkeypatch):
    right, version, complete = [0, 1, 3, 2, 2, 2, 2], [], answering.complete

    def score(self, split, items):
        return [RewardResult(float(index < right[version[-1]]), None) for index in range(len(items))]

    monkeypatch.setattr(Scoring, "score", score)
    monkeypatch.setattr(
        answering, "complete", lambda trainer, *rest: version.append(trainer.version) or complete(trainer, *rest)
    )
    cfg = stopping(2)
    cfg.eval.generations, cfg.checkpoint.best_by, cfg.checkpoint.keep_best = 4, "eval/accuracy", 1
    cfg.checkpoint.keep, cfg.sft.export = 1, str(tmp_path / "shipped")
    done = run(cfg, tmp_path / "run")
    assert [line["eval/accuracy"] for line in evaluations(done).values()] == [0, 0.25, 0.75, 0.5, 0.5]
    assert "eval/accuracy was best at step 2, 0.75" in read_summary(done / "summary.json").reason
    assert folders(done) == ["step_000002", "step_000004"]
    assert digests(tmp_path / "shipped") == digests(done / "checkpoints/step_000002/hf")
    assert "step_000002 is exported" in (done / "events.jsonl").read_text()


def test_without_a_best_checkpoint_the_last_one_is_exported(tmp_path, losses):
    cfg = stopping()
    cfg.sft.export = str(tmp_path / "shipped")
    done = run(cfg, tmp_path / "run")
    assert digests(tmp_path / "shipped") == digests(done / "checkpoints/step_000006/hf")


def test_the_best_of_a_run_that_really_learns_is_kept_and_exported(tmp_path):
    """A learning rate that spoils the model in the end: the best of seven evaluations is neither first nor last."""
    cfg = stopping(0)
    cfg.trainer.steps, cfg.checkpoint.keep, cfg.checkpoint.keep_best = 12, 1, 1
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.sft.export = 1e-1, 12, str(tmp_path / "shipped")
    done = run(cfg, tmp_path / "run")
    found = {step: line["eval/loss"] for step, line in evaluations(done).items() if step}
    best = min(found, key=found.get)
    assert 0 < best < 12 and folders(done) == [f"step_{best:06d}", "step_000012"]
    assert (done / "checkpoints/best").resolve().name == f"step_{best:06d}"
    assert digests(tmp_path / "shipped") == digests(done / f"checkpoints/step_{best:06d}/hf")
