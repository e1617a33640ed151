"""reasoning-gym tasks: the library's own questions and scores, a held-out split that is held out, clear errors."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from asyncrl.config.schema import EnvConfig
from asyncrl.envs import EnvError, load_env
from asyncrl.envs.types import Unreadable

# Tasks whose metadata JSON alone would change (tuples, integer keys, numpy strings), and plain ones.
SOME = ["arc_agi", "rearc", "graph_color", "knights_knaves", "chain_sum", "spell_backward", "rubiks_cube"]


def env(split="train", **keys):
    return load_env(EnvConfig(**{"task": "spell_backward", "size": 1000, "heldout_size": 20, **keys}), split)


def check_task(task):
    """Items and scores equal the library's, also after the entry has been through JSON."""
    dataset = reasoning_gym.create_dataset(task, seed=1, size=1000)
    ours = env(task=task, heldout_size=0)
    item, entry = ours.item(3), dataset[3]
    assert item.messages == [{"role": "user", "content": entry["question"]}]
    stored = json.loads(json.dumps(item.entry))
    for text in (str(entry["answer"]), "", "a b", "42", entry["question"]):
        try:
            expected = dataset.score_answer(text.strip(), entry)
        except (ValueError, TypeError) as error:  # boxnet and prime_factorization
            with pytest.raises(Unreadable, match=f"^{type(error).__name__}: "):
                ours.score(f"  {text}\n", stored)
            continue
        assert ours.score(f"  {text}\n", stored) == pytest.approx(expected)


@pytest.mark.parametrize("task", SOME)
def test_equals_the_library(task):
    check_task(task)


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(SOME) - {"composite"}))
def test_every_task_equals_the_library(task):
    check_task(task)


def test_an_unreadable_answer_says_so_and_a_broken_entry_is_an_error():
    ours = env(task="prime_factorization")
    entry = ours.item(0).entry
    with pytest.raises(Unreadable, match="ValueError: invalid literal"):
        ours.score("two times three", entry)
    assert ours.score(entry["answer"], entry) == 1.0
    with pytest.raises(ValueError, match="'x'"):
        ours.score("two times three", {**entry, "answer": "x"})


def test_composite_mixes_tasks():
    specs = [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "spell_backward")]
    mixed = env(task="composite", task_config={"datasets": specs})
    items = [mixed.item(i) for i in range(20)]
    assert {item.entry["metadata"]["source_dataset"] for item in items} == {"chain_sum", "spell_backward"}
    assert all(mixed.score(item.entry["answer"], item.entry) == 1.0 for item in items)


def test_items_do_not_depend_on_order_or_process():
    ours = env()
    forwards = [ours.item(i) for i in range(30)]
    assert [ours.item(i) for i in reversed(range(30))] == forwards[::-1]
    assert [item.item_id for item in forwards[:2]] == ["train:0", "train:1"]
    assert [item.index for item in forwards] == list(range(30))
    code = "from tests.envs.test_reasoning_gym import env; print([env().item(i).messages for i in range(30)])"
    assert in_process(code, hash_seed="5") == str([item.messages for item in forwards])


def test_items_do_not_depend_on_the_global_generator():
    """list_functions draws from it."""
    ours, made = env(task="list_functions", heldout_size=0), []
    for seed in (1, 2):
        random.seed(seed)
        made.append([ours.item(i) for i in range(20)])
        assert random.random() == random.Random(seed).random(), "and it is left as it was"
    assert made[0] == made[1]


def in_process(code, hash_seed):
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def questions(ours):
    return [ours.item(i).messages[0]["content"] for i in range(len(ours))]


@pytest.mark.parametrize("task_config", [{"max_word_len": 6}, {"max_word_len": 3}])
def test_no_training_item_asks_a_heldout_question(task_config):
    """Three-letter words are so few that most of them are held out by chance of any seed."""
    keys = {"task_config": task_config, "size": 5000, "heldout_size": 256}
    plain = reasoning_gym.create_dataset("spell_backward", seed=1, size=5000, **task_config)
    heldout = set(questions(env("heldout", **keys)))
    unguarded = [plain[i]["question"] in heldout for i in range(5000)]
    assert any(unguarded), "otherwise this test shows nothing"
    training = questions(env(**keys))
    assert not heldout & set(training)
    kept = [i for i in range(5000) if not unguarded[i]]
    assert [training[i] for i in kept] == [plain[i]["question"] for i in kept]


def test_too_few_questions_for_a_heldout_split():
    keys = {"task": "coin_flip", "size": 5, "heldout_size": 5000, "task_config": {"min_trials": 3, "max_trials": 3}}
    with pytest.raises(EnvError, match="too few different questions"):
        env(**keys).item(0)


def test_empty_heldout_split_still_scores():
    ours, item = env("heldout", heldout_size=0), env().item(0)
    assert len(ours) == 0 and ours.score(item.entry["answer"], item.entry) == 1.0
    with pytest.raises(IndexError):
        ours.item(0)


@pytest.mark.parametrize("index", [-1, 1000])
def test_index_outside(index):
    with pytest.raises(IndexError, match="1000 items"):
        env().item(index)


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        ({"task": "spel_backward"}, "env.task", "did you mean spell_backward"),
        ({"task": ""}, "env.task", "choose one of: ab, acre"),
        ({"task_config": {"max_word_length": 5}}, "env.task_config.max_word_length", "did you mean max_word_len"),
        ({"task_config": {"max_word_len": 1}}, "env.task_config", "max_word_len"),
        ({"task_config": {"max_word_len": "six"}}, "env.task_config", "TypeError"),
        ({"task_config": {"seed": 3}}, "env.task_config.seed", "env.train_seed"),
        ({"task_config": {"size": 3}}, "env.task_config.size", "env.size"),
        ({"size": 0}, "env.size", "at least 1"),
        ({"train_seed": 1, "heldout_seed": 1000}, "env.heldout_seed", "set env.heldout_seed=1001"),
        ({"task": "composite", "task_config": {"datasets": [{"nam": "ab"}]}}, "env.task_config.datasets", "nam"),
    ],
)
def test_errors_name_the_key_and_the_remedy(keys, key, text):
    with pytest.raises(ValueError, match=text) as caught:
        env(**keys)
    assert caught.value.problem.key == key


def test_adjoining_seed_ranges_are_accepted():
    assert len(env(train_seed=1, size=1000, heldout_seed=1001)) == 1000
    assert len(env(train_seed=1, heldout_seed=1, heldout_size=0)) == 1000


def test_fingerprint_changes_with_what_decides_the_items():
    base = {}
    changed = [
        {"task": "chain_sum"},
        {"task_config": {"max_word_len": 6}},
        {"size": 999},
        {"train_seed": 2},
        {"heldout_seed": 2_000_000},
        {"heldout_size": 19},
    ]
    prints = [env(**keys).fingerprint() for keys in [base, *changed]] + [env("heldout").fingerprint()]
    assert len(set(prints)) == len(prints)
    assert env().fingerprint() == prints[0]


def test_fingerprint_sees_the_hash_seed_where_items_depend_on_it():
    loop = "for task in ('ransom_note', 'ab'): print(env(task=task).fingerprint())"
    code = f"from tests.envs.test_reasoning_gym import env\n{loop}"
    (ransom, plain), (ransom_again, plain_again) = (in_process(code, seed).split() for seed in "12")
    assert ransom != ransom_again
    assert plain == plain_again == env(task="ab").fingerprint()


def test_importing_envs_imports_neither_the_library_nor_torch():
    code = "import sys, asyncrl.envs, asyncrl.envs.rewards; print({'reasoning_gym', 'torch'} & set(sys.modules))"
    assert in_process(code, "0") == "set()"
