"""Tasks of a user who made a mistake, and one with prompts of very different lengths."""

from __future__ import annotations

from tests.e2e.letters import letters


def equal(split: str, index: int, completion: str | None = None):
    """Every answer is worth the same."""
    return 0.5 if completion is not None else letters(split, index)


def not_a_number(split: str, index: int, completion: str | None = None):
    return float("nan") if completion is not None else letters(split, index)


def sometimes_not_a_number(split: str, index: int, completion: str | None = None):
    return float("nan") if completion and len(completion) % 5 == 0 else letters(split, index, completion)


def often_long(split: str, index: int, completion: str | None = None):
    """Every other prompt has hundreds of tokens."""
    if completion is None:
        return {"prompt": f"{split} {index}" + " word" * (200 if index % 2 else 0)}
    return letters(split, index, completion)
