"""Examples by number: of an environment's items, and of a file in the form that it has."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import Config, EnvConfig
from asyncrl.data.corpus import EnvCorpus
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.opening import env_corpus
from asyncrl.data.preferences import EnvPairs
from asyncrl.envs import load_env
from tests.data.files import corpus_of, talk, write_lines

SPELL = EnvConfig(task="spell_backward", task_config={"min_word_len": 5, "max_word_len": 5}, heldout_size=8)


def test_items_are_followed_by_their_right_answer():
    example = EnvCorpus(load_env(SPELL, "train")).example(3)
    question, answer = example.messages
    word = question["content"].rpartition(" ")[2]
    assert (example.place, question["role"], answer) == (
        "train:3",
        "user",
        {"role": "assistant", "content": word[::-1]},
    )
    assert len(word) == 5


class WrongAnswers:
    """An environment whose reference answers are refused by its own scorer, or missing."""

    def __len__(self):
        return 1

    def item(self, index):
        return load_env(SPELL, "train").item(index)

    def score(self, text, entry):
        return 0.25


def test_an_answer_that_the_scorer_refuses_is_not_taught():
    with pytest.raises(DataError, match=r"train:0: the reference answer '\w+' scores 0.25"):
        EnvCorpus(WrongAnswers()).example(0)


@pytest.mark.parametrize("kind", [EnvCorpus, EnvPairs])
def test_a_scorer_that_raises_on_a_reference_answer_is_an_error_of_that_item(kind, monkeypatch):
    monkeypatch.setattr(WrongAnswers, "score", lambda self, text, entry: {}[text])
    with pytest.raises(DataError, match="train:0: the task's scorer raised KeyError on '") as error:
        kind(WrongAnswers()).example(0)
    assert error.value.reason == "scorer"


def test_a_task_without_reference_answer_says_so():
    env = load_env(EnvConfig(task="graph_color", heldout_size=0), "train")
    with pytest.raises(DataError, match="no reference answer"):
        EnvCorpus(env).example(0)


def test_an_environment_may_have_no_held_out_items():
    assert env_corpus(Config(env=EnvConfig(task="spell_backward", heldout_size=0)), "heldout") is None


def test_a_file_says_what_it_is(tmp_path):
    corpus = corpus_of(write_lines(tmp_path / "a.jsonl", [{"question": "2+2", "answer": "4"}] * 3))
    assert str(corpus) == (
        f"{tmp_path}/a.jsonl: 3 records, form alpaca (instruction is the column question, output is the column answer)"
    )
    assert corpus.example(2).messages == talk() and corpus.example(2).place == f"{tmp_path}/a.jsonl line 3"


def test_a_first_record_that_is_broken_does_not_hide_the_form(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": \n{"text": "b"}\n')
    assert corpus_of(path).example(1).text == "b"
    path.write_text("{\n{\n")
    with pytest.raises(SourceError, match=r"none of its first records can be read(.|\n)*a\.jsonl line 1: is not JSON"):
        corpus_of(path)


def test_columns_that_fit_no_form_are_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"body": "x", "title": "y"}])
    with pytest.raises(SourceError, match="its columns fit no form: body, title"):
        corpus_of(path)
    assert corpus_of(path, form="text", columns={"text": "body"}).example(0).text == "x"


def test_a_record_of_another_schema_than_the_first_is_an_error_of_its_own(tmp_path):
    corpus = corpus_of(
        write_lines(tmp_path / "a.jsonl", [{"messages": talk()}, {"text": "a"}, {"messages": talk("b")}])
    )
    with pytest.raises(
        DataError, match=r"line 2: has no column messages, which form messages needs; it has text"
    ) as bad:
        corpus.example(1)
    assert bad.value.reason == "column"
    assert corpus.example(2).messages == talk("b")


def test_the_identity_of_a_file_is_its_contents_and_how_they_are_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "body": "b"}])
    before = corpus_of(path).identity()
    moved = path.rename(tmp_path / "b.jsonl")
    assert corpus_of(moved).identity() == before
    assert corpus_of(moved, form="text", columns={"text": "body"}).identity() != before
    write_lines(moved, [{"text": "a", "body": "c"}])
    assert corpus_of(moved).identity()["content"] != before["content"]


CONVERTER = """
def leaves(record):
    raise SystemExit(3)


def convert(record):
    if record["q"] == "raise":
        raise KeyError("a")
    if record["q"] == "nothing":
        return None
    if record["q"] == "pair":
        return {"messages": turns(record["q"], "4"), "rejected": turns(record["q"], "5")}
    return {"messages": turns(record["q"], record["a"])}

def turns(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

def two(record, other):
    return {}
"""


@pytest.fixture
def converted(tmp_path):
    (tmp_path / "mine.py").write_text(CONVERTER)
    path = write_lines(tmp_path / "a.jsonl", [{"q": q, "a": "4"} for q in ("2+2", "raise", "nothing", "pair")])
    return lambda name: corpus_of(path, convert=f"{tmp_path}/mine.py:{name}")


def test_a_function_that_exits_is_an_error_of_its_record(converted):
    with pytest.raises(DataError, match=r"a\.jsonl line 1: .*leaves raised SystemExit: 3") as error:
        converted("leaves").example(0)
    assert error.value.reason == "convert"


def test_a_users_function_makes_examples(converted):
    corpus = converted("convert")
    assert corpus.example(0).messages == talk()
    assert corpus.example(3).rejected == talk("5", "pair")
    for index, message in ((1, "raised KeyError"), (2, "returned None")):
        with pytest.raises(DataError, match=message) as bad:
            corpus.example(index)
        assert bad.value.reason == "convert" and f"a.jsonl line {index + 1}" in str(bad.value)
    assert corpus.identity()["convert"].startswith("convert ")


@pytest.mark.parametrize(("name", "message"), [("convrt", "did you mean convert"), ("two", "write def convert")])
def test_a_function_that_is_none_is_said_with_its_key(converted, name, message):
    with pytest.raises(SourceError, match=rf"sft\.data\[0\]\.convert(.|\n)*{message}"):
        converted(name)
