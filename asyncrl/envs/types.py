"""What an environment is: items to ask, and a score for each answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from asyncrl.config.errors import Problem

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class Item:
    """One question.

    ``item_id`` names it for ever ("train:123"); ``messages`` is a conversation in OpenAI's form (dicts with ``role``
    and ``content``); ``entry`` is JSON-able and all that the scorer needs beside the completion, so a restart can
    score what was sampled before it.
    """

    item_id: str
    index: int
    messages: list[dict[str, str]]
    entry: dict[str, Any]


class Env(Protocol):
    """One split of one task. Items are deterministic and found without the items before them."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> Item:
        """Item ``index`` of range(len(self)).

        Raises:
            EnvError: the task could not make it.
        """
        ...

    def score(self, text: str, entry: dict[str, Any]) -> float:
        """The reward of completion ``text`` to the item whose ``entry`` is given.

        Raises ``Unreadable`` for a wrong answer, worth 0, that the task's scorer cannot read. Whatever else the scorer
        raises passes through: the caller counts it as that sample's failure.
        """
        ...

    def fingerprint(self) -> str:
        """Hash of what decides the items and their scores; a resumed run must find the same."""
        ...


class EnvError(ValueError):
    """The environment cannot be made as configured; ``problem`` names the key and the remedy."""

    def __init__(self, key: str, message: str, remedy: str) -> None:
        self.problem = Problem(key, message, remedy)
        super().__init__(str(self.problem))


class Unreadable(Exception):
    """An answer that the task's scorer raises on, though it scores the right one: wrong, 0, and counted by itself."""


class BadScore(ValueError):
    """A scorer returned something that is not a number."""


def as_number(value: Any, scorer: str) -> float:
    """``value`` as a float, NaN and infinities included; ``scorer`` is named in the error.

    Raises:
        BadScore: it is no number (text and None are none; a 0-dimensional tensor or array is one).
    """
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise BadScore(f"{scorer} returned {type(value).__name__} {value!r:.80}; a reward is a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadScore(f"{scorer} returned {type(value).__name__} that is not one number: {error}") from error
