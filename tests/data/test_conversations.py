"""Random conversations under templates of every family: what is learnt, what is not, and where one is cut or split."""

from __future__ import annotations

import functools
import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from asyncrl.config.schema import SftConfig
from asyncrl.data.chat import encode
from asyncrl.data.conversation import checked_messages
from asyncrl.data.errors import DataError, TemplateError
from asyncrl.data.example import Example
from tests.data.families import FAMILIES, learnt

AGAIN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
# What the sides say shares no letter, so that a learnt token shows whose it is; special tokens cannot be written.
THEIRS = st.text(st.sampled_from("yzñ语🦊\u0301 \n"), max_size=8)
OURS = st.text(st.sampled_from("qwkü答🦉\u0302 "), max_size=8)
ARGUMENTS = st.dictionaries(st.sampled_from("qwk"), st.integers(0, 9) | OURS, max_size=2)


@functools.cache
def tokenizer_of(name):
    return FAMILIES[name][0]()


def called(arguments):
    """A call with ``arguments``, as an object whatever they are."""
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", "id": "1", "function": {"name": "qq", "arguments": arguments}}


def call(arguments, as_text):
    made = called(arguments)
    return made | {"function": made["function"] | {"arguments": json.dumps(arguments)}} if as_text else made


@st.composite
def conversations(draw, tools=False, system=False):
    """Turns of user and assistant; with ``tools`` some are calls and results. Some answers have weight 0, not all."""
    messages = [{"role": "system", "content": draw(THEIRS)}] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(THEIRS)})
        if tools and draw(st.booleans()):
            calls = [call(draw(ARGUMENTS), draw(st.booleans())) for _ in range(draw(st.integers(1, 2)))]
            content = draw(st.none() | OURS)
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [{"role": "tool", "content": draw(THEIRS), "tool_call_id": "1"} for _ in calls]
        messages.append({"role": "assistant", "content": draw(OURS)})
        if draw(st.integers(0, 3)) == 0:
            messages[-1]["weight"] = 0
    assume(any(m["role"] == "assistant" and m.get("weight") != 0 for m in messages))
    return messages


@st.composite
def cases(draw):
    """(family, messages, tools)"""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    tools = name == "tools"
    return name, draw(conversations(tools, name not in ("mistral", "gemma"))), TOOLS if tools else None


def sample_of(tokenizer, messages, tools=None, **keys):
    [sample] = encode(tokenizer, Example("talk", messages=messages, tools=tools), SftConfig(**keys)).samples
    return sample


def rendered(tokenizer, messages, tools):
    """Its own template's tokens, of messages as an engine's chat endpoint would show them to it."""
    shown = []
    for message in messages:
        seen = {key: value for key, value in message.items() if key != "weight"} | {"content": message["content"] or ""}
        if "tool_calls" in seen:
            seen["tool_calls"] = [called(c["function"]["arguments"]) for c in seen["tool_calls"]]
        shown.append(seen)
    return tokenizer.apply_chat_template(shown, tools=tools, return_dict=False)


def whole(tokenizer, case, **keys):
    """The sample, unless it is refused: an answer begins within a token, or the template writes an empty one apart."""
    name, messages, tools = case
    try:
        return sample_of(tokenizer, messages, tools, **keys)
    except TemplateError as error:
        answers = [m["content"] or "" for m in messages if m["role"] == "assistant" and not m.get("tool_calls")]
        odd = any(not answer for answer in answers) and name == "tools" and "differently when an engine" in str(error)
        assert odd or ("half prompt" in str(error) and any(answer[:1].isspace() for answer in answers))
        reject()


@given(case=cases())
@AGAIN
def test_answers_are_learnt_with_their_ends_and_nothing_that_others_wrote(case):
    name, messages, tools = case
    tokenizer = tokenizer_of(name)
    sample = whole(tokenizer, case)
    assert sample.ids.tolist() == rendered(tokenizer, messages, tools) and not sample.learnt[0]
    runs = learnt(sample, tokenizer)
    answers = [m for m in messages if m["role"] == "assistant" and m.get("weight") != 0]
    assert not set("".join(runs)) & set("yzñ语🦊\u0301")
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        ending = FAMILIES[name][1]
        assert ending in run and (answer["content"] or "").strip() in run
        assert run.count('"name": "qq"') == len(answer.get("tool_calls", []))
        assert run.endswith((ending, "<|endoftext|>")), "the answer ends with its end of turn"


@given(case=cases())
@AGAIN
def test_masks_are_subsets_of_each_other(case):
    tokenizer = tokenizer_of(case[0])
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in case[1]]
    case = (case[0], messages, case[2])
    last, assistant, everything = (whole(tokenizer, case, train_on=kind) for kind in ("last", "assistant", "all"))
    assert last.ids.tolist() == assistant.ids.tolist() == everything.ids.tolist()
    assert (last.learnt <= assistant.learnt).all() and (assistant.learnt <= everything.learnt).all()
    assert everything.learnt[1:].all() and last.learnt.any()
    assert np.flatnonzero(assistant.learnt)[-last.learnt.sum() :].tolist() == np.flatnonzero(last.learnt).tolist()


@given(case=cases(), data=st.data())
@AGAIN
def test_a_cut_is_a_prefix_and_pieces_are_the_whole(case, data):
    name, messages, tools = case
    tokenizer = tokenizer_of(name)
    sample = whole(tokenizer, case)
    limit = data.draw(st.integers(2, len(sample)))
    example = Example("talk", messages=messages, tools=tools)
    cut = encode(tokenizer, example, SftConfig(max_length=limit, too_long="cut")).samples
    for piece in cut:
        assert piece.ids.tolist() == sample.ids[:limit].tolist()
        assert piece.learnt.tolist() == sample.learnt[:limit].tolist()
    assert bool(cut) == bool(sample.learnt[:limit].any())
    pieces = encode(tokenizer, example, SftConfig(max_length=limit, too_long="split")).samples
    assert all(len(piece) <= limit for piece in pieces)
    targets = [token for piece in pieces for token in piece.ids[piece.learnt].tolist()]
    assert targets == sample.ids[sample.learnt].tolist(), "every target once, in order"
    starts = range(0, max(1, len(sample) - 1), limit - 1)
    kept = [sample.ids[a : a + limit].tolist() for a in starts if sample.learnt[a + 1 : a + limit].any()]
    assert [piece.ids.tolist() for piece in pieces] == kept, "each begins with the last token of the one before"


ROLES = ("system", "user", "assistant", "call", "tool")


def in_order(roles):
    """Whether they are a conversation, as a regular language: a system, then users and answers, calls and results."""
    letters = "".join({"system": "s", "user": "u", "assistant": "a", "call": "c", "tool": "t"}[role] for role in roles)
    return re.fullmatch(r"s?(u(ct+)*a)*(u(ct+)*c?)?", letters) is not None


@pytest.mark.parametrize("length", range(1, 6))
def test_roles_in_every_order_are_a_conversation_or_refused_by_name(length):
    """All 5**length orders."""
    for roles in itertools.product(ROLES, repeat=length):
        messages = [
            {"role": "assistant", "content": None, "tool_calls": [call({}, False)]}
            if role == "call"
            else {"role": role, "content": "x"}
            for role in roles
        ]
        try:
            assert checked_messages(messages, "talk") == messages and in_order(roles)
        except DataError as error:
            assert error.reason == "roles" and not in_order(roles)
