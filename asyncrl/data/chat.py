"""A conversation as tokens, with the tokens that are learnt: those of the assistant, its end of turn included.

Where an answer begins and ends is found by rendering the conversation up to there, the way an engine is prompted, so
that the model learns exactly what it is later asked to continue. A template that renders the same turns differently
once more follow (one that drops earlier reasoning, say) has no such places: that is a :class:`TemplateError`, never a
wrong mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.errors import DataError, TemplateError

Messages = Sequence[dict[str, str]]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any: ...


@dataclass(frozen=True)
class Conversation:
    """``learnt[t]`` says whether token t is a target. Token 0 never is: nothing predicts it."""

    ids: NDArray[np.int32]  # (T,)
    learnt: NDArray[np.bool_]  # (T,)

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Tokenizer, messages: Messages, max_length: int, place: str) -> Conversation:
    """The tokens of ``messages``; ``place`` names them in errors.

    Raises:
        TemplateError: the template refuses them, rewrites earlier turns, or gives an answer no end-of-turn token.
        DataError: no message is the assistant's, or there are more than ``max_length`` tokens. Nothing is ever cut.
    """
    if not any(message.get("role") == "assistant" for message in messages):
        raise DataError(place, "no message is the assistant's: nothing to learn", "give it an answer or leave it out")
    ids = render(tokenizer, messages, place)
    if len(ids) > max_length:
        raise DataError(
            place,
            f"{len(ids)} tokens are more than sft.max_length={max_length}",
            "raise sft.max_length or leave the conversation out; an answer that is cut teaches the model to stop short",
        )
    learnt = np.zeros(len(ids), dtype=np.bool_)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            learnt[_answer(tokenizer, messages, number, ids, place)] = True
    learnt[:1] = False
    return Conversation(np.asarray(ids, dtype=np.int32), learnt)


def render(tokenizer: Tokenizer, messages: Messages, place: str, prompt: bool = False) -> list[int]:
    """Token ids of ``messages``; with ``prompt`` followed by the opening of the assistant's turn.

    Raises:
        TemplateError: the template fails on them, for example for a role that it does not know.
    """
    try:
        found = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of its author's: it may raise anything
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise TemplateError(
            place,
            f"the chat template cannot render it: {type(error).__name__}: {error}",
            f"its roles are: {roles}; correct them, or choose a model whose template takes them",
        ) from error
    return list(found)


def _answer(tokenizer: Tokenizer, messages: Messages, number: int, ids: list[int], place: str) -> slice:
    """Where the answer ``messages[number]`` lies in ``ids``, through its last end-of-turn token."""
    before = render(tokenizer, messages[:number], place, prompt=True)
    through = render(tokenizer, messages[: number + 1], place)
    if ids[: len(through)] != through or through[: len(before)] != before:
        raise TemplateError(
            place,
            f"the chat template renders message {number} differently with more messages after it",
            "split the conversation so that each ends with one answer, or use a template that keeps earlier turns",
        )
    # Templates may put a line break after the end of turn. The engine has stopped by then: it is not learnt.
    ends = [t for t in range(len(before), len(through)) if through[t] == tokenizer.eos_token_id]
    if not ends:
        raise TemplateError(
            place,
            f"the chat template does not end message {number} with the tokenizer's eos token",
            "set eos_token in tokenizer_config.json to the token that ends a turn; a model that does not learn it "
            "never stops",
        )
    return slice(len(before), ends[-1] + 1)
