"""Sources of conversations and the order in which they are learnt."""

from __future__ import annotations

import json

import pytest

from asyncrl.config.schema import Config, EnvConfig
from asyncrl.data.corpus import EnvCorpus, JsonlCorpus, batch_indices, open_corpus
from asyncrl.data.errors import DataError
from asyncrl.envs import load_env

SPELL = EnvConfig(task="spell_backward", task_config={"min_word_len": 5, "max_word_len": 5}, heldout_size=8)


def test_items_are_followed_by_their_right_answer():
    corpus = EnvCorpus(load_env(SPELL, "train"))
    place, (question, answer) = corpus.conversation(3)
    word = question["content"].rpartition(" ")[2]
    assert (place, question["role"], answer) == ("train:3", "user", {"role": "assistant", "content": word[::-1]})
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
        EnvCorpus(WrongAnswers()).conversation(0)


def test_a_task_without_reference_answer_says_so():
    env = load_env(EnvConfig(task="graph_color", heldout_size=0), "train")
    with pytest.raises(DataError, match="no reference answer"):
        EnvCorpus(env).conversation(0)


def test_a_file_of_conversations(tmp_path):
    path = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "a\u2028b"}, {"role": "assistant", "content": "c"}]
    lines = [
        json.dumps({"messages": talk}, ensure_ascii=False),
        "",
        "not json",
        '{"messages": [{"role": "user"}]}',
        "3",
    ]
    path.write_text("\n".join(lines))
    corpus = JsonlCorpus(str(path))
    assert len(corpus) == 4
    assert corpus.conversation(0) == (f"{path} conversation 1", talk)
    for index in (1, 2, 3):
        with pytest.raises(DataError, match=f"conversation {index + 1}"):
            corpus.conversation(index)


@pytest.mark.parametrize("text", [None, "", "\n\n"])
def test_no_file_or_an_empty_one(tmp_path, text):
    path = tmp_path / "talk.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError):
        JsonlCorpus(str(path))


def test_a_file_has_no_held_out_part_and_an_environment_may_have_none(tmp_path):
    cfg = Config(env=EnvConfig(task="spell_backward", heldout_size=0))
    assert open_corpus(cfg, "heldout") is None
    cfg.sft.source = "jsonl"
    assert open_corpus(cfg, "heldout") is None


def test_each_epoch_is_a_permutation_and_the_seed_decides():
    seen = [i for step in range(5) for i in batch_indices(10, step, 4, seed=1)]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert batch_indices(10, 3, 4, seed=1) == seen[12:16]
    assert batch_indices(10, 3, 4, seed=2) != seen[12:16]
