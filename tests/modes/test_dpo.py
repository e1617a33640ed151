"""Preference learning from a configuration to a checkpoint; killed anywhere it ends at the same bits."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import DataConfig
from asyncrl.report.metrics import read_metrics
from asyncrl.report.summary import read_summary
from asyncrl.training import reference
from asyncrl.training.dpo import DpoTrainer
from asyncrl.training.errors import CheckpointError
from tests.data.files import write_lines
from tests.modes.test_sft import digests, folders, run, settings

SCORED = [8, 16, 16, 14]  # held-out pairs, then those of the first epoch, in which two words come twice


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A small model that knows a little of the task."""
    folder = tmp_path_factory.mktemp("start") / "model"
    run(settings(export=str(folder)), folder.parent / "run")
    return folder


def preferences(start, steps=6, **sft_keys):
    """Two epochs of 48 pairs, in 6 steps of 16; saved after each."""
    cfg = settings(**sft_keys)
    cfg.model.path, cfg.sft.loss, cfg.env.size = str(start), "dpo", 48
    cfg.trainer.steps, cfg.checkpoint.every, cfg.checkpoint.keep, cfg.dpo.beta = steps, 1, 20, 0.5
    return cfg


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """(the run of 6 steps, numbers of pairs that the reference was asked for)."""
    with pytest.MonkeyPatch.context() as patch:
        asked = watched(patch)
        return run(preferences(start), tmp_path_factory.mktemp("runs") / "whole"), asked


def watched(patch, stop_at=math.inf):
    """Fills with the numbers of pairs of each scoring; the one numbered ``stop_at`` ends the run."""
    asked, scores = [], DpoTrainer.scores

    def noted(self, batch):
        if len(asked) == stop_at:
            raise KeyboardInterrupt("by the test")
        asked.append(len(batch))
        return scores(self, batch)

    patch.setattr(DpoTrainer, "scores", noted)
    return asked


def same_end(one, other, step="step_000006"):
    for kind in ("hf", "state"):
        assert digests(one / "checkpoints" / step / kind) == digests(other / "checkpoints" / step / kind)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_pair_is_scored_once_and_the_first_step_is_at_the_reference(whole):
    folder, asked = whole
    assert asked == SCORED
    first = read_metrics(folder / "metrics.jsonl")[1]
    assert first["dpo/margin"] == 0.0 and first["dpo/accuracy"] == 0.5
    assert first["train/loss"] == pytest.approx(math.log(2), abs=1e-15) and first["train/samples"] == 16
    before, after = [line for line in lines(folder) if "eval/loss" in line]
    assert before["eval/loss"] == pytest.approx(math.log(2), abs=1e-15) and before["eval/margin"] == 0.0
    assert before["eval/accuracy"] == 0.5 and before["eval/items"] == 8
    assert after["eval/loss"] < before["eval/loss"] and after["eval/margin"] > 0
    summary = read_summary(folder / "summary.json")
    assert (summary.ended, summary.accuracy_initial) == ("finished", 0.5) and summary.accuracy_final > 0.5
    events = (folder / "events.jsonl").read_text()
    assert "8 items with a right and a wrong answer each" in events
    assert "scoring the pairs of steps 1 to 6" in events and "reference: 3 of 6 steps scored" in events


@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_killed_while_the_reference_is_computed_it_goes_on(start, whole, tmp_path, monkeypatch, stop_at):
    monkeypatch.setattr(reference, "COMMIT_EVERY", 1)
    with pytest.MonkeyPatch.context() as patch:
        watched(patch, stop_at)
        with pytest.raises(KeyboardInterrupt):
            run(preferences(start), tmp_path / "run")
    assert folders(tmp_path / "run") == []
    asked = watched(monkeypatch)
    cfg = preferences(start)
    cfg.resume = str(tmp_path / "run")
    run(cfg, tmp_path / "run")
    kept = 0 if stop_at == 1 else stop_at  # the held-out pairs are committed with the first step
    assert asked == SCORED[kept:]
    same_end(tmp_path / "run", whole[0])


@pytest.mark.parametrize("saved", [1, 3, 5])
def test_killed_in_training_it_reads_what_was_computed(start, whole, tmp_path, monkeypatch, saved):
    part = tmp_path / "run"
    shutil.copytree(whole[0], part)
    for name in folders(part):
        if int(name[5:]) > saved:
            shutil.rmtree(part / "checkpoints" / name)
    asked = watched(monkeypatch)
    cfg = preferences(start)
    cfg.resume = str(part)
    run(cfg, part)
    assert not asked
    same_end(part, whole[0])


def test_more_steps_score_what_is_new_by_the_starting_weights(start, tmp_path, monkeypatch):
    longer = run(preferences(start, steps=3), tmp_path / "longer")
    run(preferences(start, steps=1), tmp_path / "run")
    asked = watched(monkeypatch)
    cfg = preferences(start, steps=3)
    cfg.resume = str(tmp_path / "run")
    run(cfg, tmp_path / "run")
    assert asked == SCORED[2:]
    same_end(tmp_path / "run", longer, "step_000003")
    shutil.rmtree(tmp_path / "run/reference")
    shutil.rmtree(tmp_path / "run/checkpoints/step_000003")
    run(cfg, tmp_path / "run")
    same_end(tmp_path / "run", longer, "step_000003"), "computed again, though the weights have moved on"


def test_adapters_need_no_pass(start, tmp_path, monkeypatch):
    asked = watched(monkeypatch)
    cfg = preferences(start, steps=4)
    cfg.lora.rank = 4
    done = run(cfg, tmp_path / "run")
    assert not asked and not (done / "reference").exists()
    records = read_metrics(done / "metrics.jsonl")
    assert records[1]["dpo/margin"] == 0.0 and records[4]["dpo/margin"] > 0.0
    on = preferences(start, steps=3)
    on.model.adapter = str(done / "checkpoints/step_000004/adapter")
    later = run(on, tmp_path / "later")
    assert asked == SCORED, "an adapter that goes on is part of the reference"
    assert read_metrics(later / "metrics.jsonl")[1]["dpo/margin"] == 0.0


def test_other_starting_weights_are_no_continuation(start, whole, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(whole[0] / "checkpoints/step_000006/hf", other)
    part = tmp_path / "run"
    shutil.copytree(whole[0], part)
    cfg = preferences(other, steps=8)
    cfg.resume = str(part)
    with pytest.raises(CheckpointError, match=r"log-probs of other weights(.|\n)*model.path \(and model.adapter\)"):
        run(cfg, part)
    shutil.rmtree(part / "reference")
    with pytest.raises(RunFailed, match=r"other data: it had reference\.model="):
        run(cfg, part)


def test_files_of_pairs_are_learnt_and_other_forms_are_refused(start, tmp_path):
    pair = {"prompt": "ab", "chosen": "ba", "rejected": "ab"}
    path = write_lines(tmp_path / "pairs.jsonl", [pair, {**pair, "prompt": "cd", "chosen": "dc"}])
    data = [DataConfig(path=str(path))]
    done = run(preferences(start, 2, data=data, batch_size=4), tmp_path / "run")
    assert read_metrics(done / "metrics.jsonl")[-1]["train/samples"] == 4
    cfg = preferences(start, 2, data=data)
    cfg.sft.loss = "likelihood"
    with pytest.raises(RunFailed, match=r"pairs\.jsonl line \d: is a preference pair\n.*sft.loss=dpo learns it"):
        run(cfg, tmp_path / "a")
    talk = write_lines(tmp_path / "talk.jsonl", [{"question": "ab", "answer": "ba"}])
    with pytest.raises(RunFailed, match=r"talk\.jsonl line 1: is no preference pair"):
        run(preferences(start, 2, data=[DataConfig(path=str(talk))]), tmp_path / "b")
