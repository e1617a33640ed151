"""Plain values to the typed schema: every mistake is found, named and answered with a remedy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncrl.config.errors import ConfigError
from asyncrl.config.files import from_dict, load_config, save_config, to_dict
from asyncrl.config.schema import Config
from asyncrl.config.typed import build, known_keys


def problems(values):
    with pytest.raises(ConfigError) as caught:
        build(Config, values)
    return {problem.key: problem for problem in caught.value.problems}


def test_no_values_give_the_schema_defaults():
    assert build(Config, {}) == Config()


def test_values_reach_nested_keys():
    config = build(Config, {"optim": {"lr": 1e-4}, "report": {"wandb": {"project": "p"}}})
    assert config.optim.lr == 1e-4 and config.report.wandb.project == "p"
    assert config.optim.beta1 == Config().optim.beta1


@pytest.mark.parametrize(
    ("values", "key", "remedy"),
    [
        ({"optim": {"leraning_rate": 1}}, "optim.leraning_rate", "keys here: optim.lr"),
        ({"optim": {"warmup_step": 1}}, "optim.warmup_step", "did you mean optim.warmup_steps?"),
        ({"sft": {"data": [{}, {"pth": "a"}]}}, "sft.data[1].pth", "did you mean sft.data[1].path?"),
        ({"lr": 1}, "lr", "did you mean optim.lr?"),  # the right name in the wrong place
        ({"trainer": {"threads_": 1}}, "trainer.threads_", "did you mean trainer.threads"),
        ({"samplng": {}}, "samplng", "did you mean sampling"),
        ({"report": {"wandb": {"projekt": ""}}}, "report.wandb.projekt", "did you mean report.wandb.project?"),
    ],
)
def test_unknown_key_names_the_nearest(values, key, remedy):
    found = problems(values)
    assert list(found) == [key]
    assert found[key].message == "no such key"
    assert remedy in found[key].remedy


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"batch": {"groups": "many"}}, "batch.groups", "'many' is not a whole number"),
        ({"batch": {"groups": 1.5}}, "batch.groups", "1.5 is not a whole number"),
        ({"batch": {"groups": True}}, "batch.groups", "True is not a whole number"),
        ({"batch": {"groups": None}}, "batch.groups", "None is not a whole number"),
        ({"batch": 3}, "batch", "is a group of keys, not 3"),
        ({"batch": {"groups": 0}}, "batch.groups", "0 is out of range"),
        ({"sft": {"data": ["a.jsonl"]}}, "sft.data[0]", "is a group of keys, not 'a.jsonl'"),
        ({"sft": {"data": [{"weight": 0}]}}, "sft.data[0].weight", "0.0 is out of range"),
        ({"sft": {"data": [{"form": "chatml"}]}}, "sft.data[0].form", "'chatml' is not a choice"),
        ({"optim": {"lr": "fast"}}, "optim.lr", "'fast' is not a number"),
        ({"optim": {"lr": float("nan")}}, "optim.lr", "nan is out of range"),
        ({"optim": {"beta1": 1.0}}, "optim.beta1", "1.0 is out of range"),
        ({"trainer": {"shard": "yes"}}, "trainer.shard", "'yes' is not true or false"),
        ({"run": {"name": True}}, "run.name", "True is not text"),
        ({"env": {"task_config": 3}}, "env.task_config", "3 is not a group of keys"),
        ({"model": {"compute_dtype": "bf16"}}, "model.compute_dtype", "'bf16' is not a choice"),
        ({"mode": "gpro"}, "mode", "'gpro' is not a choice"),
    ],
)
def test_wrong_value_is_named(values, key, message):
    found = problems(values)
    assert list(found) == [key]
    assert found[key].message == message
    assert found[key].remedy


def test_a_near_choice_is_suggested():
    assert problems({"mode": "gpro"})["mode"].remedy.startswith("did you mean grpo?")


def test_all_problems_are_reported_at_once():
    values = {"optim": {"lrr": 1, "beta2": 2.0}, "batch": {"groups": "x"}, "nothing": 1}
    assert set(problems(values)) == {"optim.lrr", "optim.beta2", "batch.groups", "nothing"}


def test_lossless_conversions():
    config = build(Config, {"env": {"size": 1e3}, "optim": {"lr": 1}, "run": {"name": 17}})
    assert (config.env.size, config.optim.lr, config.run.name) == (1000, 1.0, "17")
    assert type(config.env.size) is int and type(config.optim.lr) is float


def test_every_default_is_valid_and_known():
    values = to_dict(Config())
    assert build(Config, values) == Config()
    assert {"optim", "optim.lr", "report.wandb.project", "resume"} <= set(known_keys(Config))


def test_json_round_trip(tmp_path):
    config = build(Config, {"env": {"task_config": {"sizes": [1, 2], "name": "x"}}, "optim": {"lr": 3e-7}})
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    path = save_config(config, tmp_path)
    assert path == tmp_path / "config.json" and load_config(tmp_path) == load_config(path) == config
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"], "no temporary file stays"


def test_saving_replaces_the_whole_file(tmp_path):
    save_config(build(Config, {"run": {"name": "a" * 1000}}), tmp_path)
    save_config(Config(), tmp_path)
    assert load_config(tmp_path) == Config()


def test_config_imports_without_torch():
    code = (
        "import pkgutil, importlib, sys, asyncrl.config as package\n"
        "for module in pkgutil.iter_modules(package.__path__):\n"
        "    importlib.import_module(f'asyncrl.config.{module.name}')\n"
        "heavy = {'torch', 'vllm', 'transformers', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_infinity_is_no_value_but_of_clip_norm():
    found = problems({"optim": {"lr": float("inf"), "clip_norm": float("inf")}, "deadline": {"batch_s": float("inf")}})
    assert sorted(found) == ["deadline.batch_s", "optim.lr"]
    assert build(Config, {"optim": {"clip_norm": float("inf")}}).optim.clip_norm == float("inf")
