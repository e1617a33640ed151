"""Pairs of an environment's items: the chosen answer is right, the rejected one is wrong and looks like it."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import Config, EnvConfig
from asyncrl.data.corpus import EnvCorpus
from asyncrl.data.errors import DataError
from asyncrl.data.opening import env_corpus
from asyncrl.data.preferences import EnvPairs, exchanged
from asyncrl.envs import load_env
from asyncrl.envs.types import Item

SPELL = EnvConfig(task="spell_backward", task_config={"min_word_len": 5, "max_word_len": 5}, size=40, heldout_size=4)


class Scored:
    """An environment for tests: item i has the answer ``answers[i]``, and ``right`` says which answers score 1."""

    def __init__(self, answers, right):
        self.answers, self.right = answers, right

    def __len__(self):
        return len(self.answers)

    def item(self, index):
        messages = [{"role": "user", "content": "?"}]
        return Item(f"train:{index}", index, messages, {"answer": self.answers[index]})

    def score(self, text, entry):
        return 1.0 if self.right(text, entry["answer"]) else 0.5

    def fingerprint(self):
        return "f"


def sides(example):
    assert example.messages[:-1] == example.rejected[:-1] and len(example.messages) == 2
    assert example.rejected[-1]["role"] == "assistant"
    return example.messages[-1]["content"], example.rejected[-1]["content"]


def test_a_real_task_has_a_right_and_a_wrong_answer_for_each_item():
    env = load_env(SPELL, "train")
    pairs, plain = EnvPairs(env), EnvCorpus(env)
    places = set()
    for index in range(40):
        right, wrong = sides(pairs.example(index))
        entry = env.item(index).entry
        assert pairs.example(index) == pairs.example(index)
        assert pairs.example(index).messages == plain.example(index).messages
        assert env.score(right, entry) == 1.0 > env.score(wrong, entry)
        odd = [i for i in range(5) if right[i] != wrong[i]]
        assert len(odd) == 2 and odd[1] == odd[0] + 1 and sorted(right) == sorted(wrong)
        places.add(odd[0])
    assert places == {0, 1, 2, 3}, "not always the same place"


def test_where_an_exchange_is_right_too_another_is_made():
    pairs = EnvPairs(Scored(["abc"], lambda text, answer: text == answer or text.startswith("b")))
    assert sides(pairs.example(0)) == ("abc", "acb")


def test_where_no_exchange_is_wrong_another_items_answer_is():
    for answers in (["7", "7", "8"], ["aa", "aa", "b"]):
        assert sides(EnvPairs(Scored(answers, str.__eq__)).example(0)) == (answers[0], answers[2])
    sorted_too = EnvPairs(Scored(["ab", "ba", "cd"], lambda text, answer: sorted(text) == sorted(answer)))
    assert sides(sorted_too.example(1)) == ("ba", "cd")


def test_a_task_without_wrong_answers_says_so():
    with pytest.raises(DataError, match="train:0: no wrong answer was found"):
        EnvPairs(Scored(["ab", "cd"], lambda text, answer: True)).example(0)
    with pytest.raises(DataError, match="no wrong answer"):
        EnvPairs(Scored(["7"], str.__eq__)).example(0)


def test_exchanges_are_each_place_once_where_characters_differ():
    assert sorted(exchanged("aabc", "x")) == ["aacb", "abac"]
    assert {next(exchanged("abcd", str(i))) for i in range(20)} == {"bacd", "acbd", "abdc"}
    assert list(exchanged("a", "x")) == list(exchanged("", "x")) == []


def test_the_loss_decides_what_an_item_is():
    for loss, kind in (("likelihood", EnvCorpus), ("dpo", EnvPairs)):
        cfg = Config(env=SPELL)
        cfg.sft.loss = loss
        assert type(env_corpus(cfg, "train")) is kind
    pairs, plain = EnvPairs(load_env(SPELL, "train")), EnvCorpus(load_env(SPELL, "train"))
    assert pairs.identity() != plain.identity()
    assert str(pairs) == "env: 40 items with a right and a wrong answer each"
