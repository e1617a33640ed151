"""Training conversations by number, in an order that depends on the seed alone.

Two sources: the training items of an environment with their reference answers, and a JSONL file with one
``{"messages": [{"role": ..., "content": ...}, ...]}`` a line.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.data.errors import DataError
from asyncrl.envs import Env, load_env


class Corpus(Protocol):
    """Conversations; ``conversation(i)`` is the same whenever it is asked for."""

    def __len__(self) -> int: ...

    def conversation(self, index: int) -> tuple[str, list[dict[str, str]]]:
        """(its place for errors, its messages). Raises ``DataError`` when it cannot be used."""
        ...


class EnvCorpus:
    """Items of one split, each followed by its reference answer, if the task's own scorer gives that full marks."""

    def __init__(self, env: Env) -> None:
        self._env = env

    def __len__(self) -> int:
        return len(self._env)

    def conversation(self, index: int) -> tuple[str, list[dict[str, str]]]:
        item = self._env.item(index)
        answer = reference_answer(item.entry)
        if not isinstance(answer, str):
            raise DataError(
                item.item_id,
                f"the task gives no reference answer (found {answer!r:.60})",
                "choose a task that has one, or write the conversations to a file and use sft.source=jsonl",
            )
        score = self._env.score(answer, item.entry)
        if score < 1.0:
            raise DataError(
                item.item_id,
                f"the reference answer {answer!r:.60} scores {score:g}",
                "only right answers are taught: choose another task, or use sft.source=jsonl",
            )
        return item.item_id, [*item.messages, {"role": "assistant", "content": answer}]


def reference_answer(entry: dict[str, Any]) -> Any:
    """``answer`` of a reasoning-gym entry, or of the data that a user's function returned; None if there is none."""
    return entry["answer"] if "answer" in entry else entry.get("data", {}).get("answer")


class JsonlCorpus:
    """A file of conversations, read once and checked line by line."""

    def __init__(self, path: str) -> None:
        """Raises ``DataError`` for a missing or empty file."""
        self._name = path
        if not path or not Path(path).is_file():
            raise DataError("sft.path", f"{path!r} is not a file", "give a file with one JSON object a line")
        self._lines = [line for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
        if not self._lines:
            raise DataError(path, "holds no conversation", 'write one {"messages": [...]} a line')

    def __len__(self) -> int:
        return len(self._lines)

    def conversation(self, index: int) -> tuple[str, list[dict[str, str]]]:
        place = f"{self._name} conversation {index + 1}"
        remedy = 'write {"messages": [{"role": "user", "content": "..."}, ...]}'
        try:
            messages = json.loads(self._lines[index])["messages"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(place, f"is not a conversation: {type(error).__name__}: {error}", remedy) from error
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise DataError(place, f"messages is {messages!r:.80}", remedy)
        return place, messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def open_corpus(cfg: Config, split: str = "train") -> Corpus | None:
    """The source that ``sft`` names. Held-out conversations exist only for an environment: None without."""
    if cfg.sft.source == "jsonl":
        return JsonlCorpus(cfg.sft.path) if split == "train" else None
    env = load_env(cfg.env, split)
    return EnvCorpus(env) if len(env) else None


def batch_indices(total: int, step: int, size: int, seed: int) -> list[int]:
    """Numbers of the ``size`` conversations of 0-based ``step``: each epoch is a new permutation, cut without a gap.

    A function of its arguments, so that a resumed run goes on with the same data.
    """
    first = step * size
    return [int(_permutation(total, seed, number // total)[number % total]) for number in range(first, first + size)]


@functools.lru_cache(maxsize=2)
def _permutation(total: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(total)
