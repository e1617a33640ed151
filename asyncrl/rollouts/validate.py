"""What must hold of a sample before anything is computed with it."""

from __future__ import annotations

import numpy as np

from asyncrl.rollouts.types import Sample

# float32 rounding can lift the log-probability of a certain token a little above 0
_LARGEST_LOGPROB = 1e-3


def defect(sample: Sample, version: int) -> str | None:
    """Why ``sample`` cannot be trained on, in a few words that serve as a counter's name; None if it can.

    Args:
        version: newest weights that exist; no token can be newer.
    """
    count = len(sample.token_ids)
    if not count == len(sample.logprobs) == len(sample.versions):
        return "arrays of different lengths"
    if count == 0:
        return "no tokens"
    if not np.isfinite(sample.logprobs).all():
        return "log-prob not finite"
    if sample.logprobs.max() > _LARGEST_LOGPROB:
        return "log-prob above zero"
    if sample.token_ids.min() < 0:
        return "negative token id"
    if sample.versions.min() < 0 or sample.versions.max() > version:
        return "version does not exist"
    if (np.diff(sample.versions) < 0).any():
        return "versions go backwards"
    return None
