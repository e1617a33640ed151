"""What is evaluated: keys that ask for more than a mode has are refused, and accepted once the remedy is followed."""

from __future__ import annotations

import pytest

from asyncrl.config.evaluation import best_by, check_best, check_evaluation, measured
from asyncrl.config.files import from_dict
from tests.config.folders import make_model_folder

FILE = {"data": [{"path": "a.jsonl"}]}
HELD = FILE | {"heldout": [{"path": "b.jsonl"}]}


def config(mode="sft", **sections):
    return from_dict({"mode": mode, "model": {"path": ""}, **sections})


def keys(cfg):
    return [problem.key for check in (check_evaluation, check_best) for problem in check(cfg)]


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"eval": {"generations": 4}}, []),
        ({"eval": {"patience": 2, "every": 5}}, []),
        ({"eval": {"patience": 2}}, ["eval.patience"]),
        ({"eval": {"generations": 4}, "sft": FILE}, ["eval.generations"]),
        ({"eval": {"generations": 4}, "sft": HELD}, []),
        ({"eval": {"patience": 2, "every": 5}, "sft": FILE}, ["eval.patience"]),
        ({"eval": {"generations": 4}, "env": {"heldout_size": 0}}, ["eval.generations"]),
        ({"mode": "grpo", "eval": {"generations": 4}}, ["eval.generations"]),
        ({"eval": {"generations": 4, "temperature": 0.7}}, []),
        ({"eval": {"temperature": 0.7}}, ["eval.temperature"]),
        ({"mode": "grpo", "eval": {"temperature": 0.7}}, ["eval.temperature"]),
        ({"mode": "grpo", "eval": {"patience": 4}}, ["eval.patience"]),
    ],
)
def test_evaluations_have_something_to_evaluate(sections, expected):
    assert keys(config(**sections)) == expected


@pytest.mark.parametrize(
    ("sections", "metrics"),
    [
        ({}, ["eval/loss"]),
        ({"eval": {"generations": 4}}, ["eval/loss", "eval/accuracy"]),
        ({"eval": {"generations": 4}, "sft": HELD}, ["eval/loss"]),
        ({"eval": {"generations": 4}, "sft": {"heldout": HELD["heldout"]}}, ["eval/loss"]),
        ({"sft": {"loss": "dpo"}}, ["eval/loss", "eval/accuracy"]),
        ({"mode": "grpo"}, ["eval/accuracy"]),
    ],
)
def test_only_what_is_measured_can_decide(sections, metrics):
    cfg = config(**sections)
    assert measured(cfg) == metrics and best_by(cfg) == metrics[0]
    for metric in ("eval/loss", "eval/accuracy"):
        cfg.checkpoint.best_by = metric
        assert best_by(cfg) == metric
        assert keys(cfg) == ([] if metric in metrics else ["checkpoint.best_by"])


def test_a_model_that_names_no_end_has_no_answers(tmp_path):
    cfg = config(eval={"generations": 4}, model={"path": str(make_model_folder(tmp_path / "a", eos_token_id=None))})
    [problem] = check_evaluation(cfg)
    assert problem.key == "eval.generations" and "has an eos_token_id" in problem.message
    cfg.model.path = str(make_model_folder(tmp_path / "b", eos_token_id=[3, 4]))
    assert not list(check_evaluation(cfg))
