"""Records of the usual forms as examples, and every way in which a conversation is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.conversation import checked_messages
from asyncrl.data.errors import DataError
from asyncrl.data.forms import detect, shape_of
from tests.data.files import talk

SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def made(record, form="auto", **columns):
    shape = detect(record, "x") if form == "auto" else shape_of(form, columns)
    return shape.example(record, "x")


@pytest.mark.parametrize(
    ("record", "form", "messages"),
    [
        ({"messages": talk()}, "messages", talk()),
        ({"messages": json.dumps(talk())}, "messages", talk()),  # as CSV holds it
        ({"conversations": talk()}, "messages", talk()),
        ({"conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]}, "sharegpt", talk()),
        ({"messages": [{"from": "user", "value": "2+2"}, {"from": "assistant", "value": "4"}]}, "sharegpt", talk()),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "2+2"}, {"from": "gpt", "value": "4"}]},
            "sharegpt",
            [SYSTEM, *talk()],
        ),
        ({"instruction": "2+2", "input": "", "output": "4"}, "alpaca", talk()),
        ({"instruction": "Add", "input": "2+2", "output": "4"}, "alpaca", talk(question="Add\n\n2+2")),
        ({"instruction": "2+2", "output": "4", "system": "s", "text": "2+2 4"}, "alpaca", [SYSTEM, *talk()]),
        ({"instruction": "Add", "context": "2+2", "response": "4"}, "alpaca", talk(question="Add\n\n2+2")),
        ({"prompt": "2+2", "completion": "4"}, "alpaca", talk()),
        ({"prompt": talk()[:1], "completion": talk()[1:]}, "alpaca", talk()),
        ({"question": "2+2", "answer": "4"}, "alpaca", talk()),
        ({"input": "2+2", "output": "4"}, "alpaca", talk()),
    ],
)
def test_columns_tell_the_form(record, form, messages):
    assert detect(record, "x").form == form
    example = made(record)
    assert (example.messages, example.text, example.rejected, example.tools) == (messages, None, None, None)


def test_text():
    assert made({"text": "all of it", "id": 3}).text == "all of it"


def test_columns_by_other_names():
    record = {"frage": "2+2", "antwort": "4", "text": "not this"}
    assert made(record, "alpaca", instruction="frage", output="antwort").messages == talk()


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": talk("4"), "rejected": talk("5")},
        {"chosen": talk("4"), "rejected": talk("5"), "prompt": "2+2"},
        {"chosen": talk("4")[1:], "rejected": talk("5")[1:], "prompt": talk()[:1]},
        {"chosen": "4", "rejected": "5", "prompt": "2+2"},
        {"chosen": json.dumps(talk("4")), "rejected": json.dumps(talk("5"))},
    ],
)
def test_preference_pairs(record):
    example = made(record)
    assert (example.messages, example.rejected) == (talk("4"), talk("5"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": talk("4"), "rejected": talk("4")}, "same answer chosen and rejected"),
        ({"chosen": talk("4"), "rejected": talk("4", "1+3")}, "different prompts"),
        ({"chosen": talk()[:1], "rejected": talk()}, "does not end with an answer"),
        ({"chosen": "4", "rejected": "5"}, "chosen is text and there is no prompt"),
    ],
)
def test_pairs_that_are_none(record, message):
    with pytest.raises(DataError, match=message) as bad:
        made(record)
    assert bad.value.reason == "pair"


def test_an_answer_that_looks_like_messages_stays_an_answer():
    assert made({"prompt": "p", "chosen": '[{"a": 1}]', "rejected": "b"}).messages[1]["content"] == '[{"a": 1}]'


def test_tool_calls_and_tools():
    turns = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": None},
        {"role": "assistant", "content": "4", "tool_calls": None},
    ]
    example = made({"messages": turns, "tools": json.dumps([{"type": "function"}])})
    assert example.tools == [{"type": "function"}]
    assert example.messages[1] == {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert example.messages[2] == {"role": "tool", "content": "4", "tool_call_id": "1"}
    assert example.messages[3] == {"role": "assistant", "content": "4"}


def test_tool_calls_of_sharegpt():
    speakers = [
        {"from": "human", "value": "2+2"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    messages = made({"conversations": speakers}).messages
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [CALL]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "2"}, {"type": "text", "text": "+2"}]
    assert checked_messages([{"role": "user", "content": parts}, talk()[1]], "x") == talk()


U, A, T = ({"role": role, "content": "c"} for role in ("user", "assistant", "tool"))
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "t"}]}


@pytest.mark.parametrize(
    ("messages", "reason", "message"),
    [
        ([], "messages", "messages is"),
        ("{", "json", "not JSON"),
        ([3], "messages", "message 0 is 3"),
        ([{"role": "user"}, A], "messages", r"the content of message 0 \(user\) is NoneType"),
        ([U, {"role": "assistant", "content": 4}], "messages", r"message 1 \(assistant\) is int 4, not text"),
        ([{"role": "human", "content": "c"}, A], "roles", "message 0 is of role 'human'"),
        ([IMAGE, A], "image", r"message 0 \(user\) has a part of type image_url; only text"),
        ([U, {"role": "assistant", "content": ["c"]}], "image", "a part of type str"),
        ([A, U], "roles", "message 0 is of role assistant at the beginning; expected user"),
        ([U, U, A], "roles", "message 1 is of role user after user; expected assistant"),
        ([U, A, A], "roles", "message 2 is of role assistant after assistant"),
        ([U, SYSTEM, A], "roles", "message 1 is of role system after user"),
        ([U, T, A], "roles", "message 1 is of role tool after user"),
        ([U, CALLS, A], "roles", "message 2 is of role assistant after a tool call; expected tool"),
        ([U, {**U, "tool_calls": [CALL]}], "messages", r"message 1 \(user\) has tool_calls"),
        ([U, {**CALLS, "tool_calls": [{"name": "add"}]}], "messages", "has tool_calls"),
        ([{"role": "user", "content": "\ud800"}, A], "unicode", "surrogate"),
    ],
)
def test_what_is_no_conversation(messages, reason, message):
    with pytest.raises(DataError, match=message) as bad:
        checked_messages(messages, "a.jsonl line 7")
    assert bad.value.reason == reason and str(bad.value).startswith("a.jsonl line 7: ")


@given(system=st.booleans(), turns=st.lists(st.tuples(st.text(), st.integers(0, 3), st.text()), min_size=1))
def test_every_conversation_in_order_is_taken_as_it_is(system, turns):
    messages = [SYSTEM] if system else []
    for question, tools, answer in turns:
        messages.append({"role": "user", "content": question})
        if tools:
            messages.append(CALLS)
            messages += [{"role": "tool", "content": "r"}] * tools
        messages.append({"role": "assistant", "content": answer})
    assert checked_messages(messages, "x") == messages


def test_unknown_speakers_are_named():
    with pytest.raises(DataError, match="turn 0 is from 'bard'"):
        made({"conversations": [{"from": "bard", "value": "x"}]})
