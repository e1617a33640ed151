"""Examples as tokens, with the tokens that are learnt: the assistant's answers, their ends of turn included.

The tokens are those of the tokenizer's own chat template; :mod:`asyncrl.data.answers` says how answers are found. So a
model learns exactly what it is later asked to continue, and nothing that the user, a tool or the template wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncrl.config.schema import SftConfig
from asyncrl.data.answers import find_answers
from asyncrl.data.errors import DataError
from asyncrl.data.example import Example
from asyncrl.data.lengths import Encoded, fit, fit_pair, nothing_learnt
from asyncrl.data.messages import Message, for_template, learnable
from asyncrl.data.template import Template, Tokenizer
from asyncrl.data.tokens import Conversation, Pair

__all__ = ["Conversation", "Encoded", "Pair", "Tokenizer", "encode", "encode_pair"]


def encode(tokenizer: Tokenizer, example: Example, settings: SftConfig) -> Encoded[Conversation]:
    """The tokens of a conversation or a text, and which are learnt (``train_on``); what is too long, see ``too_long``.

    Raises:
        TemplateError: the template refuses the messages, rewrites earlier turns, or gives an answer no end-of-turn
            token.
        DataError: another form is wrong, nothing is learnt, or it is longer than ``max_length`` and that is an error.
    """
    if example.rejected is not None:
        raise DataError(
            example.place,
            "is a preference pair",
            "sft.loss=dpo learns it; another needs messages or text",
            "pair",
        )
    if example.text is not None:
        return fit(_text(tokenizer, example.text, example.place), settings, example.place)
    sample = _conversation(tokenizer, example, example.messages or [], settings.train_on)
    return fit(sample, settings, example.place)


def encode_pair(tokenizer: Tokenizer, example: Example, settings: SftConfig) -> Encoded[Pair]:
    """Both sides of a preference, learnt from where they differ; their prompt is the messages they have in common.

    ``train_on=all`` is ``assistant`` here: a prompt is not preferred to itself.

    Raises ``TemplateError`` and ``DataError`` as :func:`encode` does, and for sides without a prompt in common, sides
    that are equal, or a template by which the tokens of the two do not begin alike.
    """
    chosen, rejected, place = example.messages or [], example.rejected or [], example.place
    if not chosen or not rejected:
        raise DataError(place, "is no preference pair", "sft.loss=dpo needs a chosen and a rejected answer", "pair")
    common = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if not common or {chosen[common].get("role"), rejected[common].get("role")} != {"assistant"}:
        raise DataError(
            place,
            "chosen and rejected are not two answers to one prompt",
            "begin both with the same messages, then give each an answer of the assistant, not the same one",
            "pair",
        )
    train_on = "last" if settings.train_on == "last" else "assistant"
    prompt = for_template(chosen[:common], place)
    template = Template(tokenizer, example.tools, place)
    [ids] = template.tokens([template.render(prompt, prompt=True)])
    sides = []
    for messages in (chosen, rejected):
        side = _conversation(tokenizer, example, messages, train_on, common)
        if side.ids[: len(ids)].tolist() != ids:
            raise DataError(
                place,
                "the tokens of chosen and rejected do not both begin with those of their prompt",
                "the chat template changes the prompt with what follows; use another template",
                "template",
            )
        side.learnt[: len(ids)] = False
        sides.append(side)
    return fit_pair(Pair(sides[0], sides[1], len(ids)), settings, place)


def _conversation(
    tokenizer: Tokenizer, example: Example, messages: Sequence[Message], train_on: str, first: int = 0
) -> Conversation:
    """``messages`` as tokens, whatever their number. Answers before message ``first`` are not learnt."""
    clean = for_template(messages, example.place)
    answers = [number for number, message in enumerate(clean) if message["role"] == "assistant"]
    weighted = [number for number in learnable(messages, example.place) if number >= first]
    if train_on == "last":
        weighted = [number for number in weighted if number == answers[-1]]
    if train_on != "all" and not weighted:
        raise nothing_learnt(example.place)
    everything = train_on == "all"
    told_apart = [number for number in answers if number not in weighted] if everything else weighted
    ids, places = find_answers(Template(tokenizer, example.tools, example.place), clean, told_apart)
    learnt = np.full(len(ids), everything)
    for place in places:
        learnt[place] = not everything
    learnt[:1] = False
    return Conversation(np.asarray(ids, dtype=np.int32), learnt)


def _text(tokenizer: Tokenizer, text: str, place: str) -> Conversation:
    """``text`` between the tokens that the tokenizer puts around a text, and its eos token at the end."""
    if tokenizer.eos_token_id is None:
        raise DataError(place, "the tokenizer has no eos token, so no text would ever end", "set eos_token", "no_eos")
    ids = list(tokenizer(text)["input_ids"]) if text else []
    if ids and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    learnt = np.ones(len(ids), dtype=np.bool_)
    learnt[:1] = False
    return Conversation(np.asarray(ids, dtype=np.int32), learnt)
