"""Version boundaries, and their comparison with what the engine says."""

from __future__ import annotations

import pytest

from asyncrl.actors.versions import VersionDisagreement, VersionSpans


def test_one_version():
    assert VersionSpans(4).per_token(3).tolist() == [4, 4, 4]
    assert VersionSpans(4).per_token(0).tolist() == []


def test_boundaries():
    spans = VersionSpans(1)
    spans.boundary(2, at=3)
    spans.boundary(5, at=4)
    assert spans.per_token(6).tolist() == [1, 1, 1, 2, 5, 5]


def test_a_version_that_drew_nothing_leaves_no_trace():
    spans = VersionSpans(1)
    spans.boundary(2, at=0)
    spans.boundary(3, at=2)
    spans.boundary(4, at=2)
    assert spans.per_token(4).tolist() == [2, 2, 4, 4]
    spans.check(4, [("2", 0, 2), ("4", 2, 4)])


def test_time_does_not_run_backwards():
    spans = VersionSpans(3)
    spans.boundary(4, at=5)
    with pytest.raises(ValueError, match="boundary to version 3 at token 6 after 4 at 5"):
        spans.boundary(3, at=6)
    with pytest.raises(ValueError, match="boundary to version 5 at token 4 after 4 at 5"):
        spans.boundary(5, at=4)


@pytest.mark.parametrize(
    "reported",
    [[("1", 0, 4)], [("1", 0, 1), ("2", 1, 4)], [("1", 0, 2), ("3", 2, 4)], [("default", 0, 2), ("2", 2, 4)], []],
)
def test_disagreement_is_an_error(reported):
    spans = VersionSpans(1)
    spans.boundary(2, at=2)
    spans.check(4, [("1", 0, 2), ("2", 2, 4)])
    with pytest.raises(VersionDisagreement, match=r"the engine reports .* the boundaries say"):
        spans.check(4, reported)
