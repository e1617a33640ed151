"""A user's function as a task: both ways to name it, and what is said when something about it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.schema import EnvConfig
from asyncrl.envs import EnvError, load_env
from asyncrl.envs.types import BadScore

ADDITION = str(Path(__file__).parents[2] / "docs" / "examples" / "addition.py")


def env(function, split="train", **keys):
    return load_env(EnvConfig(kind="function", function=function, **{"size": 10, "heldout_size": 4, **keys}), split)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file with the given source and returns the function's name by path."""
    numbers = iter(range(100))

    def write(source):
        file = tmp_path / f"task{next(numbers)}.py"
        file.write_text(source)
        return f"{file}:task"

    return write


def test_by_module_and_by_file():
    for name in ("tests.envs.user_task:task", f"{Path(__file__).parent / 'user_task.py'}:task"):
        ours = env(name)
        item = ours.item(7)
        assert (item.item_id, item.index, len(ours)) == ("train:7", 7, 10)
        assert item.messages == [{"role": "user", "content": "train question 7"}]
        assert item.entry == {"index": 7, "data": {"answer": "7"}}
        assert ours.score(" 7\n", json.loads(json.dumps(item.entry))) == 8.0


def test_relative_file_with_a_module_beside_it(tmp_path, monkeypatch):
    (tmp_path / "helper_beside.py").write_text("HIGH = 3")
    (tmp_path / "mine.py").write_text(
        "import helper_beside\ndef task(s, i, c=None): return {'prompt': 'x'} if c is None else 3"
    )
    monkeypatch.chdir(tmp_path)
    assert env("mine.py:task").score("", {"index": 0}) == 3.0


def test_the_documented_example():
    ours, heldout = env(f"{ADDITION}:task", size=7500), env(f"{ADDITION}:task", "heldout", heldout_size=2500)
    training = {ours.item(i).messages[0]["content"] for i in range(7500)}
    assert len(training) == 7500
    assert not training & {heldout.item(i).messages[0]["content"] for i in range(2500)}
    item = heldout.item(11)
    assert heldout.score(str(item.entry["data"]["sum"]), item.entry) == 1.0
    assert heldout.score("no", item.entry) == 0.0


def test_messages_are_taken_as_they_are(written):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    assert (
        env(written(f"def task(split, index, completion=None): return {{'messages': {messages}}}")).item(0).messages
        == messages
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "is empty, but env.kind is function"),
        ("tests.envs.user_task", "names no function"),
        ("tests.envs.user_tasks:task", "no module tests.envs.user_tasks"),
        ("missing/file.py:task", r"no file .*missing/file.py"),
        ("tests.envs.user_task:tasks", "did you mean task"),
        ("tests.envs.user_task:__name__", "is a str, not a function"),
    ],
)
def test_a_name_that_leads_nowhere(name, text):
    with pytest.raises(EnvError, match=text) as caught:
        env(name)
    assert caught.value.problem.key == "env.function" and caught.value.problem.remedy


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def task(:", "SyntaxError"),
        ("def task(split, index): return {}", "cannot be called with 3 arguments"),
        ("def task(split, index, completion): return {}", "cannot be called with 2 arguments"),
    ],
)
def test_a_module_or_signature_that_is_wrong(written, source, text):
    with pytest.raises(EnvError, match=text):
        env(written(source))


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("None", "returned NoneType None"),
        ("'2+2?'", "returned str '2"),
        ("{}", 'one of "prompt" and "messages", not nothing'),
        ("{'prompt': 'a', 'messages': []}", "not 'prompt', 'messages'"),
        ("{'prompt': 3}", "prompt is int 3"),
        ("{'prompt': ''}", "prompt is str ''"),
        ("{'messages': []}", r"messages is list \[\]"),
        ("{'messages': [{'role': 'user'}]}", r"messages\[0\] is"),
        ("{'messages': [{'role': 'robot', 'content': ''}]}", r"role is one of system, user, assistant"),
        ("{'prompt': 'a', 'data': {1, 2}}", "data that JSON cannot hold"),
        ("1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_a_bad_item(written, expression, text):
    name = written(f"def task(split, index, completion=None): return {expression}")
    with pytest.raises(EnvError, match=text) as caught:
        env(name).item(0)
    assert name in str(caught.value), "the function is named"


@pytest.mark.parametrize("value", ["None", "'1.0'", "[1]", "1j", "10 ** 400", "__import__('numpy').zeros(2)"])
def test_a_reward_that_is_no_number(written, value):
    with pytest.raises(BadScore, match=r"task\d*.py:task with a completion returned"):
        env(written(f"def task(split, index, completion=None): return {value}")).score("", {"index": 0})


@pytest.mark.parametrize(
    "value", ["True", "1", "1.0", "__import__('numpy').float32(1)", "__import__('fractions').Fraction(1)"]
)
def test_numbers_of_all_kinds(written, value):
    assert env(written(f"def task(split, index, completion=None): return {value}")).score("", {"index": 0}) == 1.0


def test_fingerprint_follows_the_source(written, tmp_path):
    source = "def task(split, index, completion=None): return {'prompt': 'a'}"
    name = written(source)
    assert env(name).fingerprint() == env(name).fingerprint() == env(written(source)).fingerprint()
    others = [env(name, "heldout"), env(name, size=9), env(written(source + "  # changed"))]
    assert len({env(name).fingerprint(), *(other.fingerprint() for other in others)}) == 4
