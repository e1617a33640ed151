"""Sources of training data that are refused before anything is read."""

from __future__ import annotations

import importlib.util

import pytest

from asyncrl.config.data import check_data, has_heldout, uses_env
from asyncrl.config.schema import Config, DataConfig


@pytest.fixture
def found(tmp_path):
    """The keys and texts of the problems of one source, whose path is relative to a folder with files."""
    for name in ("a.jsonl", "b.jsonl", "a.txt", "a.parquet"):
        (tmp_path / name).write_text("x")
    (tmp_path / "saved").mkdir()

    def problems(data=None, heldout=None):
        cfg = Config(mode="sft")
        for name, source in (("data", data), ("heldout", heldout)):
            if source is not None:
                source = DataConfig(**{"path": "a.jsonl", **source})
                source.path = str(tmp_path / source.path) if source.path else ""
                setattr(cfg.sft, name, [source])
        return {problem.key: str(problem) for problem in check_data(cfg)}

    return problems


@pytest.mark.parametrize(
    ("source", "key", "text"),
    [
        ({"path": ""}, "path", "does not exist"),
        ({"path": "c.jsonl"}, "path", "c.jsonl' does not exist"),
        ({"path": "a.txt"}, "path", "the ending '.txt' is none of .jsonl, .ndjson"),
        ({"split": "train"}, "split", "is a file, it has no splits"),
        ({"columns": {"text": "body"}}, "columns", "choose sft.data[0].form"),
        ({"form": "text", "columns": {"body": "text"}}, "columns", "form text has no column body"),
        ({"form": "text", "convert": "a:b"}, "convert", "give one of them"),
    ],
)
def test_one_source(found, source, key, text):
    problems = found(data=source)
    assert list(problems) == [f"sft.data[0].{key}"] and text in problems[f"sft.data[0].{key}"]


def test_good_sources(found):
    assert not found(data={}, heldout={"path": "b.jsonl"})
    assert not found(data={"form": "alpaca", "columns": {"input": "context"}})


@pytest.mark.parametrize(("path", "library"), [("a.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_library_that_is_not_there_is_named(found, monkeypatch, path, library):
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else spec(name))
    assert "pip install asyncrl[data]" in found(data={"path": path})["sft.data[0].path"]


def test_held_out_examples_are_others_and_unweighted(found):
    assert "is learnt too" in found(data={}, heldout={})["sft.heldout[0].path"]
    assert "all of the held-out" in found(data={}, heldout={"path": "b.jsonl", "weight": 2.0})["sft.heldout[0].weight"]


def test_files_have_no_held_out_items_of_the_environment():
    cfg = Config(mode="sft")
    assert has_heldout(cfg) and uses_env(cfg)
    cfg.sft.data = [DataConfig(path="a")]
    assert not has_heldout(cfg) and not uses_env(cfg)
    cfg.sft.heldout = [DataConfig(path="b")]
    cfg.env.heldout_size = 0
    assert has_heldout(cfg)
