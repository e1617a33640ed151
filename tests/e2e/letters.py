"""A task that takes no skill: the reward is the share of letters from the first half of the alphabet."""

from __future__ import annotations


def letters(split: str, index: int, completion: str | None = None):
    if completion is None:
        return {"prompt": f"{split} {index}"}
    found = [c for c in completion.lower() if c.isalpha()]
    return sum(c < "n" for c in found) / max(1, len(found))
