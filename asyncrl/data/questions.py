"""Held-out examples as questions: the conversation up to its last answer, and that answer for comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.corpus import Corpus
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.messages import for_template
from asyncrl.data.template import Template, Tokenizer


@dataclass(frozen=True)
class Question:
    """Example ``index`` of ``corpus``; ``prompt`` is the text that ``ids`` stand for, ``reference`` the answer."""

    corpus: Corpus
    index: int
    prompt: str
    ids: NDArray[np.int32]  # (T,)
    reference: str


def questions(
    corpora: Sequence[Corpus], count: int, tokenizer: Tokenizer, room: int, skip: bool
) -> tuple[list[Question], int]:
    """(the first ``count`` of all ``corpora`` in turns, how many were passed over for more than ``room`` tokens).

    The prompt is what an engine would be asked: rendered with the opening of the assistant's turn. Plain text asks
    nothing and is passed over. Raises ``SourceError`` if there is no question at all, and ``DataError`` for a record
    that cannot be used, unless ``skip``.
    """
    found: list[Question] = []
    too_long = 0
    for corpus, index in _in_turns(corpora):
        if len(found) == count:
            break
        try:
            asked = _question(corpus, index, tokenizer)
        except SourceError:
            raise
        except DataError:
            if not skip:
                raise
            continue
        if asked is not None and len(asked.ids) > room:
            too_long += 1
        elif asked is not None:
            found.append(asked)
    if count and not found:
        why = f"the prompts are longer than {room} tokens" if too_long else "they are texts, which ask nothing"
        names = ", ".join(corpus.name for corpus in corpora)
        raise SourceError(names, f"none of the held-out examples can be answered: {why}", "set eval.generations=0")
    return found, too_long


def _in_turns(corpora: Sequence[Corpus]) -> Iterator[tuple[Corpus, int]]:
    for numbers in zip_longest(*(range(len(corpus)) for corpus in corpora)):
        for corpus, index in zip(corpora, numbers, strict=True):
            if index is not None:
                yield corpus, index


def _question(corpus: Corpus, index: int, tokenizer: Tokenizer) -> Question | None:
    example: Example = corpus.example(index)
    if example.messages is None:
        return None
    messages = for_template(example.messages, example.place)
    last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    if not last:
        return None
    template = Template(tokenizer, example.tools, example.place)
    prompt = template.render(messages[:last], prompt=True)
    [ids] = template.tokens([prompt])
    return Question(corpus, index, prompt, np.asarray(ids, dtype=np.int32), _text(messages[last]))


def _text(answer: dict[str, object]) -> str:
    calls = answer.get("tool_calls")
    return f"{answer['content']}{json.dumps(calls)}" if calls else str(answer["content"])
