"""What templates get to see of a conversation. Which conversations are refused: test_forms.py."""

from __future__ import annotations

import pytest

from asyncrl.data.errors import DataError
from asyncrl.data.messages import for_template

USER, TOOL = {"role": "user", "content": "a"}, {"role": "tool", "content": "3"}


def calling(function):
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [("{'a': 1}", "Expecting property"), ("[1]", "are a JSON object"), ([1], "are a JSON object"), ("[" * 100_000, "")],
)
def test_arguments_that_are_no_object_are_refused(arguments, reason):
    with pytest.raises(DataError, match=f"(?s)talk: message 1 calls add with .*{reason}") as bad:
        for_template([USER, calling({"name": "add", "arguments": arguments})], "talk")
    assert bad.value.reason == "arguments"


def test_what_templates_see():
    """As an engine's chat endpoint shows it: texts joined, arguments as objects, no keys that say nothing."""
    given = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {**calling({"name": "add", "arguments": '{"a": 1}'}), "weight": 0},
        TOOL | {"tool_call_id": "x"},
        {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": []},
    ]
    seen = for_template(given, "talk")
    assert seen[1] == {"role": "user", "content": "ab"}
    assert seen[2] == calling({"name": "add", "arguments": {"a": 1}}) | {"content": ""}
    assert seen[3] == TOOL | {"tool_call_id": "x"}
    assert seen[4] == {"role": "assistant", "content": "c", "reasoning_content": "r"}
    assert for_template([USER, calling({"name": "now"})], "talk")[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert given[2]["weight"] == 0 and given[2]["content"] is None, "what was given stays as it was"
