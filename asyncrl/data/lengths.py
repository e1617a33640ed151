"""Examples that are too long: ``sft.too_long`` says what becomes of them, and nothing happens to one uncounted.

No token is invented: a text that was cut has no end of turn, so it does not teach to stop there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from asyncrl.config.schema import SftConfig
from asyncrl.data.errors import DataError
from asyncrl.data.tokens import Conversation, Pair

S = TypeVar("S", Conversation, Pair)
Fate = Literal["whole", "cut", "split", "skipped"]


@dataclass(frozen=True)
class Encoded(Generic[S]):
    """One example: one sample, several (``split``), or none (``skipped``)."""

    samples: list[S]
    fate: Fate = "whole"


def fates(examples: Iterable[Encoded[S]]) -> dict[str, int]:
    """How many ``examples`` were cut, split and skipped, under their keys of ``asyncrl.report.keys``."""
    found: Counter[str] = Counter(example.fate for example in examples)
    return {f"sample/{fate}": found[fate] for fate in ("cut", "split", "skipped")}


def fit(sample: Conversation, settings: SftConfig, place: str) -> Encoded[Conversation]:
    """``sample`` in pieces of at most ``max_length`` tokens.

    Raises ``DataError`` if it is longer and that is an error, or if nothing in it is learnt.
    """
    if not sample.learnt.any():
        raise nothing_learnt(place)
    limit = settings.max_length
    if len(sample) <= limit:
        return Encoded([sample])
    if settings.too_long == "cut":
        head = _piece(sample, 0, limit)
        return Encoded([head], "cut") if head.learnt.any() else Encoded([], "skipped")
    if settings.too_long == "split":
        # A piece begins with the last token of the one before: what follows it is predicted once, in one piece.
        pieces = [_piece(sample, start, start + limit) for start in range(0, len(sample) - 1, limit - 1)]
        return Encoded([piece for piece in pieces if piece.learnt.any()], "split")
    return _refuse(len(sample), settings, place, "sft.too_long=skip, cut or split")


def fit_pair(pair: Pair, settings: SftConfig, place: str) -> Encoded[Pair]:
    """``pair`` with at most ``max_length`` tokens a side. Raises ``DataError`` as :func:`fit` does."""
    longest, limit = max(len(pair.chosen), len(pair.rejected)), settings.max_length
    if not (pair.chosen.learnt.any() and pair.rejected.learnt.any()):
        raise nothing_learnt(place)
    if longest <= limit:
        return Encoded([pair])
    if settings.too_long == "cut":
        chosen, rejected = (_piece(side, 0, limit) for side in (pair.chosen, pair.rejected))
        alike = chosen.ids.tolist() == rejected.ids.tolist()
        if alike or not (chosen.learnt.any() and rejected.learnt.any()):
            return Encoded([], "skipped")
        return Encoded([Pair(chosen, rejected, pair.prompt)], "cut")
    return _refuse(longest, settings, place, "sft.too_long=skip or cut (half a preference cannot be learnt)")


def nothing_learnt(place: str) -> DataError:
    return DataError(
        place,
        "has no token to learn",
        "give it an answer of the assistant whose weight is not 0, or leave it out",
        "nothing_to_learn",
    )


def _refuse(length: int, settings: SftConfig, place: str, instead: str) -> Encoded[S]:
    """Skips, if that is what is wanted, or raises."""
    if settings.too_long == "skip":
        return Encoded([], "skipped")
    raise DataError(
        place,
        f"{length} tokens are more than sft.max_length={settings.max_length}",
        f"raise sft.max_length, or choose {instead}",
        "too_long",
    )


def _piece(sample: Conversation, start: int, stop: int) -> Conversation:
    learnt = sample.learnt[start:stop].copy()
    learnt[:1] = False
    return Conversation(sample.ids[start:stop], learnt)
