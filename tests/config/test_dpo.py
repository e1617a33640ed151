"""Which settings learn from preferences; what is refused is accepted once the remedy is followed."""

from __future__ import annotations

import pytest

from asyncrl.config.dpo import check_dpo
from asyncrl.config.errors import ConfigError
from asyncrl.config.evaluation import check_best
from asyncrl.config.files import from_dict


def problems(**groups):
    config = from_dict({"mode": "sft", "sft": {"loss": "dpo", **groups.pop("sft", {})}, **groups})
    return {problem.key: problem.remedy for problem in check_dpo(config)}


@pytest.mark.parametrize(
    ("groups", "key", "remedy"),
    [
        ({"model": {"path": ""}}, "model.path", "sft.loss=likelihood"),
        ({"sft": {"too_long": "split"}}, "sft.too_long", "skip, cut or error"),
        ({"sft": {"max_length": 9000}}, "sft.max_length", "token_budget=18000, or sft.max_length=8192"),
        ({"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "dpo.label_smoothing", "dpo.loss=sigmoid"),
    ],
)
def test_contradictions(groups, key, remedy):
    found = problems(**groups)
    assert list(found) == [key] and remedy in found[key]
    groups = dict(groups)
    assert not problems(**groups | {"sft": {**groups.get("sft", {}), "loss": "likelihood"}}), "of no concern otherwise"


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"sft": {"max_length": 8192, "too_long": "cut"}},
        {"dpo": {"label_smoothing": 0.1}},
        {"dpo": {"loss": "hinge", "length_normalised": True, "sft_weight": 1.0}},
    ],
)
def test_accepted(groups):
    assert not problems(**groups)


@pytest.mark.parametrize("values", [{"beta": 0}, {"label_smoothing": 0.5}, {"sft_weight": -1}, {"loss": "dpo"}])
def test_values_out_of_range(values):
    with pytest.raises(ConfigError, match=f"dpo.{next(iter(values))}"):
        from_dict({"dpo": values})


def test_both_held_out_figures_can_choose_the_best_checkpoint():
    for metric in ("eval/loss", "eval/accuracy"):
        keep = {"checkpoint": {"keep_best": 1, "best_by": metric}, "eval": {"every": 20}}
        assert not list(check_best(from_dict({"mode": "sft", "sft": {"loss": "dpo"}, **keep})))
        refused = list(check_best(from_dict({"mode": "sft", **keep})))
        assert bool(refused) == (metric == "eval/accuracy")
