"""asyncrl.rollouts.validate: each defect has its name."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.rollouts.validate import defect
from tests.rollouts.books import make_sample


def changed(name, position, value):
    sample = make_sample(0, 0, version=3)
    getattr(sample, name)[position] = value
    return sample


def test_a_good_sample():
    assert defect(make_sample(0, 0, version=3), 3) is None
    assert defect(changed("versions", 0, 2), 3) is None
    assert defect(changed("logprobs", 0, 1e-7), 3) is None


@pytest.mark.parametrize(
    "name, position, value, reason",
    [
        ("logprobs", 1, np.nan, "log-prob not finite"),
        ("logprobs", 1, -np.inf, "log-prob not finite"),
        ("logprobs", 1, 0.5, "log-prob above zero"),
        ("token_ids", 0, -1, "negative token id"),
        ("versions", 4, 4, "version does not exist"),
        ("versions", 0, -1, "version does not exist"),
        ("versions", 4, 2, "versions go backwards"),
    ],
)
def test_bad_values(name, position, value, reason):
    assert defect(changed(name, position, value), 3) == reason


def test_bad_shapes():
    assert defect(make_sample(0, 0, tokens=0), 3) == "no tokens"
    sample = make_sample(0, 0)
    sample.versions = sample.versions[:-1]
    assert defect(sample, 3) == "arrays of different lengths"
