"""Which checkpoints stay: the newest, the best, and those whose score may still come."""

from __future__ import annotations

import json
import os

import pytest

from asyncrl.config.schema import Config
from asyncrl.training.keeping import Keep, keep_of, tidy

ACCURACY, LOSS = "eval/accuracy", "eval/loss"


@pytest.fixture
def run(tmp_path):
    """``save(versions)``, ``say(lines)`` and ``left(keep)`` on a run folder."""

    class Run:
        root, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"

        def save(self, *versions):
            for version in versions:
                (self.root / f"step_{version:06d}").mkdir(parents=True)

        def say(self, *lines):
            with self.metrics.open("a") as file:
                file.writelines(json.dumps({"attempt": 0, **line}) + "\n" for line in lines)

        def left(self, newest=1, best=0, metric=ACCURACY):
            tidy(self.root, "step_", Keep(newest, best, metric, self.metrics))
            return sorted(int(p.name[5:]) for p in self.root.glob("step_*"))

    return Run()


def evaluated(step, value, key=ACCURACY, **more):
    return {"step": step, key: value, **more}


def stepped(step, **more):
    return {"step": step, "step_s": 1.0, **more}


@pytest.mark.parametrize(("newest", "left"), [(0, [2, 4, 6]), (1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_newest_stay(run, newest, left):
    run.save(6, 2, 4)
    assert run.left(newest) == left


@pytest.mark.parametrize(("metric", "left"), [(ACCURACY, [4, 8, 10]), (LOSS, [2, 6, 10])])
def test_the_best_stay_beside_the_newest(run, metric, left):
    run.save(2, 4, 6, 8, 10)
    run.say(*(evaluated(s, v, metric) for s, v in ((2, 0.1), (4, 0.9), (6, 0.2), (8, 0.8), (10, 0.5))))
    assert run.left(1, 2, metric) == left
    assert os.readlink(run.root / "best") == f"step_{4 if metric == ACCURACY else 2:06d}"


def test_the_link_goes_with_what_it_points_at(run):
    """A run that goes on without ``keep_best`` drops the best one some time."""
    run.save(2, 4)
    run.say(evaluated(2, 0.9), evaluated(4, 0.5))
    assert run.left(1, 1) == [2, 4] and os.readlink(run.root / "best") == "step_000002"
    assert run.left(1, 0) == [4] and not (run.root / "best").is_symlink()


def test_of_equal_ones_the_newer_is_the_better(run):
    run.save(2, 4, 6)
    run.say(evaluated(2, 0.5), evaluated(4, 0.5), evaluated(6, 0.1))
    assert run.left(1, 1) == [4, 6]


def test_one_whose_score_may_still_come_stays(run):
    """Engines evaluate version 4 while 6 and 8 are saved; 2 was passed over."""
    run.save(2, 4, 6, 8)
    assert run.left(1, 1) == [2, 4, 6, 8]
    run.say(evaluated(0, 0.9), evaluated(4, 0.3))
    assert run.left(1, 1) == [4, 6, 8]
    run.say(evaluated(8, 0.2))
    assert run.left(1, 1) == [4, 8]
    assert run.left(1, 0) == [8]


def test_a_step_done_again_after_a_resume_counts_with_its_new_score(run):
    run.save(2, 4, 6)
    run.say(stepped(2), evaluated(2, 0.5), stepped(4), evaluated(4, 0.9), stepped(6), evaluated(6, 0.8))
    run.say({**stepped(3), "attempt": 1})  # resumed from 2: 4 and 6 are other weights now
    assert run.left(1, 1) == [2, 4, 6]
    run.say({**evaluated(4, 0.1), "attempt": 1}, {**evaluated(6, 0.2), "attempt": 1})
    assert run.left(1, 1) == [2, 6]
    assert os.readlink(run.root / "best") == "step_000002"


def test_a_score_that_is_no_number_is_none(run):
    run.save(2, 4)
    run.say(evaluated(2, None), evaluated(4, 0.1))
    assert run.left(1, 1) == [4]


@pytest.mark.parametrize(("mode", "metric"), [("grpo", ACCURACY), ("sft", LOSS)])
def test_the_metric_is_the_modes(tmp_path, mode, metric):
    cfg = Config(mode=mode)
    cfg.checkpoint.keep, cfg.checkpoint.keep_best = 3, 2
    assert keep_of(cfg, tmp_path) == Keep(3, 2, metric, tmp_path / "metrics.jsonl")
