"""torchtune's dataset builders: the source that we would open, read by our own loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.data.from_torchtune import load
from asyncrl.data.torchtune.builders import BUILDERS
from asyncrl.data.torchtune.leaves import RecipeError
from asyncrl.data.torchtune.reading import read
from asyncrl.data.torchtune.recipes import launch_of
from tests.data.files import corpus_of, talk, write_lines
from tests.data.torchtune.test_reading import HERE, told

LOCAL = {"source": "json", "data_files": "a.jsonl"}
SHAREGPT = [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]
PAIR = (talk("4"), talk("5"))
PREFERRED = {"chosen": PAIR[0], "rejected": PAIR[1]}


def reading_of(dataset, recipe="full_single", **options):
    config, text = load(HERE / f"{recipe}.yaml", [])
    config["dataset"] = dataset
    return read(config, launch_of(config, text), **options)


def named(builder, **more):
    return {"_component_": f"torchtune.datasets.{builder}", **more}


@pytest.mark.parametrize(
    ("builder", "more", "record", "expected"),
    [
        ("alpaca_dataset", {}, {"instruction": "Add", "input": "2+2", "output": "4"}, talk(question="Add\n\n2+2")),
        ("alpaca_dataset", {"column_map": {"instruction": "q", "output": "a"}}, {"q": "2+2", "a": "4"}, talk()),
        ("alpaca_cleaned_dataset", {}, {"instruction": "2+2", "input": "", "output": "4"}, talk()),
        ("instruct_dataset", {}, {"input": "2+2", "output": "4"}, talk()),
        ("instruct_dataset", {"column_map": {"input": "q", "output": "a"}}, {"q": "2+2", "a": "4"}, talk()),
        ("chat_dataset", {"conversation_column": "c", "conversation_style": "openai"}, {"c": talk()}, talk()),
        ("chat_dataset", {"conversation_column": "c", "conversation_style": "sharegpt"}, {"c": SHAREGPT}, talk()),
        ("slimorca_dataset", {}, {"conversations": SHAREGPT}, talk()),
        ("samsum_dataset", {}, {"dialogue": "2+2", "summary": "4", "id": "1"}, talk()),
        ("grammar_dataset", {}, {"input": "2+2", "output": "4"}, talk()),
        ("text_completion_dataset", {}, {"text": "all"}, "all"),
        ("text_completion_dataset", {"column": "body"}, {"body": "all", "text": "no"}, "all"),
        ("cnn_dailymail_articles_dataset", {}, {"article": "all", "highlights": "no"}, "all"),
        ("wikitext_dataset", {}, {"page": "all"}, "all"),
        ("preference_dataset", {}, PREFERRED, PAIR),
        ("preference_dataset", {"column_map": {"chosen": "y", "rejected": "n"}}, {"y": PAIR[0], "n": PAIR[1]}, PAIR),
        ("hh_rlhf_helpful_dataset", {}, PREFERRED, PAIR),
        ("stack_exchange_paired_dataset", {}, {"question": "2+2", "response_j": "4", "response_k": "5"}, PAIR),
    ],
)  # fmt: skip
def test_a_record_of_each_builder_is_read_as_what_it_is(tmp_path, builder, more, record, expected):
    """The entry that is printed, opened by the loader of a run."""
    recipe = "dpo_distributed" if isinstance(expected, tuple) else "full_single"
    [entry] = reading_of(named(builder, **LOCAL, **more), recipe).keys["sft.data"]
    path = write_lines(tmp_path / "a.jsonl", [record])
    example = corpus_of(path, **{key: value for key, value in entry.items() if key != "path"}).example(0)
    found = (example.messages, example.rejected) if example.rejected else example.messages or example.text
    assert found == expected


def test_every_builder_is_in_that_list():
    [cases] = [
        mark.args[1]
        for mark in test_a_record_of_each_builder_is_read_as_what_it_is.pytestmark
        if mark.name == "parametrize"
    ]
    assert {case[0] for case in cases} == {*BUILDERS, "chat_dataset"}


@pytest.mark.parametrize(
    ("dataset", "train_on"),
    [
        (named("alpaca_dataset"), "all"),
        (named("alpaca_dataset", train_on_input=False), "assistant"),
        (named("alpaca_dataset", masking_strategy="train_on_last"), "last"),
        (named("instruct_dataset", **LOCAL), "assistant"),
        (named("instruct_dataset", train_on_input=True, **LOCAL), "all"),
        (named("instruct_dataset", train_on_input=None, masking_strategy="train_on_all", **LOCAL), "all"),
    ],
)
def test_what_is_learnt(dataset, train_on):
    assert reading_of(dataset).keys["sft.train_on"] == train_on


@pytest.mark.parametrize(
    ("dataset", "path", "command"),
    [
        (named("instruct_dataset", **LOCAL), "a.jsonl", ""),
        (named("instruct_dataset", source="csv", data_files=["a.csv"], split="train"), "a.csv", ""),
        (
            named("instruct_dataset", **LOCAL, split="train[:5%]"),
            "data/json-train-5",
            "load_dataset('json', split='train[:5%]', data_files='a.jsonl')",
        ),
        (
            named("instruct_dataset", source="json", data_files="s3://b/a.jsonl"),
            "data/json-train",
            "data_files='s3://b/a.jsonl'",
        ),
        (
            named("instruct_dataset", source="me/qa", revision="v1"),
            "data/me-qa-train",
            "load_dataset('me/qa', split='train', revision='v1')",
        ),
        (
            named("wikitext_dataset", subset="wikitext-2-v1"),
            "data/EleutherAI-wikitext-document-level-wikitext-2-v1-train",
            "name='wikitext-2-v1'",
        ),
        (named("stack_exchange_paired_dataset"), "data/lvwerra-stack-exchange-paired-train", "data_dir='data/rl'"),
    ],
)  # fmt: skip
def test_where_the_records_are(dataset, path, command):
    reading = reading_of(dataset)
    assert [entry["path"] for entry in reading.keys["sft.data"]] == [path]
    saved = [line for line in reading.todo if "save_to_disk" in line]
    assert (command in saved[0] and f"save_to_disk('{path}')" in saved[0]) if command else not saved
    assert set(told(reading)[f"dataset.{key}"] for key in dataset) <= {"translated"}


def test_the_command_that_saves_a_dataset_makes_a_source_that_is_counted(tmp_path, monkeypatch):
    """The printed program itself, on a file; then the number of records is no longer asked for."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write_lines(Path("a.jsonl"), [{"input": f"{k}+0", "output": str(k)} for k in range(20)])
    dataset = named("instruct_dataset", **LOCAL, split="train[:50%]")
    before = reading_of(dataset)
    [line, _] = before.todo
    program = line.removeprefix('python -c "').removesuffix('"')
    exec(program, {})  # what the user is told to run
    after = reading_of(dataset)
    assert (before.keys["trainer.steps"], after.keys["trainer.steps"]) == ("???", 3 * 10 // 2) and not after.todo
    [entry] = after.keys["sft.data"]
    corpus = corpus_of(Path(entry.pop("path")), **entry)
    assert len(corpus) == 10 and corpus.example(1).messages == talk("1", "1+0")


def test_several_datasets_are_mixed_by_their_sizes(tmp_path, monkeypatch):
    """torchtune puts them one behind the other: each record is learnt once an epoch."""
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a.jsonl"), [{"input": "q", "output": "a"}] * 30)
    write_lines(Path("b.jsonl"), [{"c": SHAREGPT}] * 10)
    several = [
        named("instruct_dataset", **LOCAL),
        named(
            "chat_dataset", source="json", data_files="b.jsonl", conversation_column="c", conversation_style="sharegpt"
        ),
    ]
    reading = reading_of(several)
    assert [entry["weight"] for entry in reading.keys["sft.data"]] == [30, 10]
    assert reading.keys["trainer.steps"] == 3 * 40 // 2 and not reading.todo
    Path("b.jsonl").unlink()
    reading = reading_of(several)
    assert [entry["weight"] for entry in reading.keys["sft.data"]] == [30, "???"]
    assert any("weight" in line for line in reading.todo)


def test_sources_that_learn_differently_are_said():
    reading = reading_of([named("alpaca_dataset"), named("instruct_dataset", **LOCAL)])
    assert reading.keys["sft.train_on"] == "all" and any("not assistant" in line for line in reading.assumed)
    reading = reading_of([named("alpaca_dataset"), named("instruct_dataset", train_on_input=False, **LOCAL)])
    assert told(reading)["dataset[1].train_on_input"] == "none"


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({"new_system_prompt": "be brief"}, ["new_system_prompt"]),
        ({"new_system_prompt": None}, []),
        ({"filter_fn": {"_component_": "mine.keep"}}, ["filter_fn._component_"]),
        ({"template": "torchtune.data.SummarizeTemplate"}, ["template"]),
        ({"column_map": {"input": "q", "output": "a", "image": "i"}}, ["column_map.image"]),
    ],
)
def test_what_a_source_cannot_do_is_listed(more, lost):
    outcomes = told(reading_of(named("instruct_dataset", **LOCAL, **more)))
    assert [leaf for leaf, how in outcomes.items() if leaf.startswith("dataset.") and how == "none"] == [
        f"dataset.{leaf}" for leaf in lost
    ]


def test_a_builder_of_the_users_own_is_asked_for():
    reading = reading_of({"_component_": "mine.dataset", "level": 3})
    assert reading.keys["sft.data"] == [{"path": "???"}]
    outcomes = told(reading)
    assert outcomes["dataset._component_"] == outcomes["dataset.level"] == "none"
    with pytest.raises(RecipeError, match="column_map is 3"):
        reading_of(named("alpaca_dataset", column_map=3))


def test_held_out_data_that_is_never_evaluated_means_nothing(tmp_path):
    config, text = load(HERE / "lora_distributed.yaml", ["run_val_every_n_steps=null"])
    reading = read(config, launch_of(config, text))
    outcomes = {how for leaf, how in told(reading).items() if "val" in leaf}
    assert outcomes == {"meaningless"} and "sft.heldout" not in reading.keys and "eval.every" not in reading.keys
    assert json.dumps(reading.keys)  # plain values
