"""Which tokens of a conversation are learnt, under templates of every kind, and which data is refused."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.data.chat import encode
from asyncrl.data.errors import DataError, TemplateError
from asyncrl.data.tokenizer import TEMPLATE, build_tokenizer

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "ef"},
    {"role": "assistant", "content": "g"},
]
# As TEMPLATE, but with a line break after each end of turn (ChatML does that).
BREAKS = TEMPLATE.replace("'<|end|>' }}", "'<|end|>\n' }}")
# Forgets what earlier answers said (templates of reasoning models drop earlier reasoning).
FORGETFUL = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer(template=TEMPLATE):
    made = build_tokenizer(["first question", "second question"])
    made.chat_template = template
    return made


def learnt(conversation, made):
    """The learnt tokens as text, one string for each run of them."""
    runs, previous = [], -2
    for t in np.flatnonzero(conversation.learnt):
        if t != previous + 1:
            runs.append([])
        runs[-1].append(conversation.ids[t])
        previous = t
    return [made.decode(run) for run in runs]


@pytest.mark.parametrize("template", [TEMPLATE, BREAKS])
def test_every_answer_is_learnt_through_its_end_of_turn(template):
    made = tokenizer(template)
    conversation = encode(made, TALK, 100, "talk")
    assert learnt(conversation, made) == ["cd<|end|>", "g<|end|>"]
    assert made.decode(conversation.ids) == made.apply_chat_template(TALK, tokenize=False)


def test_an_answer_with_text_of_special_tokens_ends_where_the_turn_ends():
    made = tokenizer()
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|end|>c"}]
    assert learnt(encode(made, talk, 100, "talk"), made) == ["b<|end|>c<|end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(TemplateError, match="talk: the chat template renders message 2 differently"):
        encode(tokenizer(FORGETFUL), TALK, 100, "talk")


def test_a_template_without_end_of_turn_is_refused():
    with pytest.raises(TemplateError, match="does not end message 2 with the tokenizer's eos token"):
        encode(tokenizer(TEMPLATE.replace("+ '<|end|>'", "")), TALK, 100, "talk")


def test_a_role_that_the_template_does_not_know_is_refused():
    with pytest.raises(TemplateError, match=r"cannot render it: .*not tool\n.*roles are: user, tool, assistant"):
        encode(tokenizer(), [TALK[1], {"role": "tool", "content": "42"}, TALK[2]], 100, "talk")


def test_a_tokenizer_without_template_is_refused():
    with pytest.raises(TemplateError, match="chat_template"):
        encode(tokenizer(None), TALK, 100, "talk")


def test_nothing_to_learn_and_too_long_are_refused():
    with pytest.raises(DataError, match="no message is the assistant's"):
        encode(tokenizer(), TALK[:2], 100, "talk")
    with pytest.raises(DataError, match=r"more than sft\.max_length=10"):
        encode(tokenizer(), TALK, 10, "talk")
