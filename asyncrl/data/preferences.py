"""Preference pairs of an environment's items: the reference answer against a wrong one that looks like it.

The wrong answer is the right one with two neighbouring characters exchanged, at a place that the item's number decides;
where the task's own scorer finds no such answer worse, it is the reference answer of another item. So one has to look
closely to tell them apart, and any task with reference answers has pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from asyncrl.data.corpus import EnvCorpus, reference_answer
from asyncrl.data.errors import DataError
from asyncrl.data.example import Example

OTHERS = 20  # items whose answers are tried


class EnvPairs(EnvCorpus):
    """Items of one split, each with its reference answer and a wrong one."""

    def __str__(self) -> str:
        return f"{self.name}: {len(self)} items with a right and a wrong answer each"

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "rejected": "neighbours exchanged"}

    def example(self, index: int) -> Example:
        right = super().example(index)
        assert right.messages is not None, "items of an environment are conversations"
        *prompt, answer = right.messages
        wrong = {"role": "assistant", "content": self._wrong(index, answer["content"], right.place)}
        return Example(right.place, right.messages, rejected=[*prompt, wrong])

    def _wrong(self, index: int, answer: str, place: str) -> str:
        item = self._env.item(index)
        for candidate in (*exchanged(answer, item.item_id), *self._others(index)):
            if candidate != answer and self._score(candidate, item) < 1.0:
                return candidate
        raise DataError(
            place,
            f"no wrong answer was found: the scorer takes everything that is like {answer!r:.60}",
            "choose another task, or write the pairs to a file and name it in sft.data",
            "answer",
        )

    def _others(self, index: int) -> Iterator[str]:
        for step in range(1, min(OTHERS, len(self) - 1) + 1):
            other = reference_answer(self._env.item((index + step) % len(self)).entry)
            if isinstance(other, str):
                yield other


def exchanged(answer: str, name: str) -> Iterator[str]:
    """``answer`` with two neighbouring characters exchanged that differ, from a place on that ``name`` decides."""
    places = [i for i in range(len(answer) - 1) if answer[i] != answer[i + 1]]
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % max(1, len(places))
    for i in (*places[first:], *places[:first]):
        yield answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
