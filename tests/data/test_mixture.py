"""Several sources as one stream: exact shares, exact positions, bad records counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.mixture import Mixture


class Numbers:
    """``total`` texts "<name><index>", some of which are bad."""

    blocks = ()

    def __init__(self, name: str, total: int, bad: set[int] = frozenset(), error=DataError) -> None:
        self.name, self._total, self._bad, self._error = name, total, bad, error
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self._total

    def example(self, index: int) -> Example:
        self.asked.append(index)
        if index in self._bad:
            raise self._error(f"{self.name} line {index}", "is bad", "mend it", "json" if index % 2 else "roles")
        return Example(f"{self.name} line {index}", text=f"{self.name}{index}")

    def identity(self):
        return {"records": self._total}


def text(example: Example) -> str:
    return example.text or ""


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), count=st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_shares_are_exact_at_every_moment(weights, count):
    """Each source within (n * share - (K - 1), n * share + 1), whatever n: the bound of the module's text."""
    mixture = Mixture([Numbers(str(k), 7) for k in range(len(weights))], weights, seed=0)
    for n in range(1, count + 1):
        mixture.take(1, text)
        for weight, given_ in zip(weights, mixture.given, strict=True):
            share = n * weight / sum(weights)
            assert share - (len(weights) - 1) - 1e-6 < given_ < share + 1 + 1e-6


def test_ten_thousand_examples_have_the_weights_within_one_percent():
    mixture = Mixture([Numbers("a", 100), Numbers("b", 333), Numbers("c", 5)], [0.5, 2, 1.5], seed=3)
    names = Counter(name[0] for name in mixture.take(10_000, text))
    for name, share in (("a", 0.125), ("b", 0.5), ("c", 0.375)):
        assert names[name] / 10_000 == pytest.approx(share, rel=0.01)


def test_a_source_has_each_record_once_before_any_twice():
    names = Mixture([Numbers("a", 10), Numbers("b", 4)], [1, 1], seed=0).take(40, text)
    of_b = [name for name in names if name[0] == "b"]
    assert all(sorted(of_b[k : k + 4]) == ["b0", "b1", "b2", "b3"] for k in range(0, 20, 4))


SOURCES = st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 5)), min_size=1, max_size=3)


@given(sources=SOURCES, before=st.integers(0, 60), bad=st.booleans())
@settings(max_examples=80, deadline=None)
def test_row_24_a_position_says_all_about_what_comes_next(sources, before, bad):
    """torchtune #2785, #2852: mixing that resumes; here from any position, looking at no record before it."""

    def made():
        corpora = [Numbers(str(k), n + 1, {0} if bad else set()) for k, (n, _) in enumerate(sources)]
        return Mixture(corpora, [weight for _, weight in sources], seed=1, skip=True)

    whole, resumed = made(), made()
    whole.take(before, text)
    resumed.seek(json.loads(json.dumps(whole.position())))
    assert resumed.position() == whole.position()
    assert resumed.take(25, text) == whole.take(25, text)
    assert resumed.position() == whole.position()
    assert sum(len(corpus.asked) for corpus in resumed.corpora) <= 25 + resumed.skipped.total()


def test_a_position_of_other_sources_is_refused():
    with pytest.raises(ValueError, match="a position in 1 sources, there are 2"):
        Mixture([Numbers("a", 2), Numbers("b", 2)], [1, 1], 0).seek({"drawn": [1], "given": [1], "skipped": {}})


def test_bad_records_are_counted_by_reason_and_cost_no_example():
    mixture = Mixture([Numbers("a", 10, {1, 2, 3}), Numbers("b", 10)], [1, 1], seed=0, skip=True)
    names = mixture.take(28, text)
    assert Counter(name[0] for name in names) == {"a": 14, "b": 14}, "the next of the same source takes its place"
    assert not {"a1", "a2", "a3"} & set(names)
    assert mixture.drawn == [20, 14] and mixture.given == [14, 14]
    assert mixture.metrics() == {"data/skipped": 6, "data/skipped/json": 4, "data/skipped/roles": 2}
    assert mixture.drawn[0] == mixture.given[0] + mixture.skipped.total(), "nothing is lost silently"


def test_the_encoder_may_refuse_a_record_too():
    def short(example):
        if text(example) == "a1":
            raise DataError(example.place, "is long", "cut it", "too_long")
        return text(example)

    mixture = Mixture([Numbers("a", 3)], [1], seed=0, skip=True)
    assert Counter(mixture.take(6, short)) == {"a0": 3, "a2": 3}
    assert mixture.skipped["too_long"] == mixture.drawn[0] - 6 > 1


def test_without_skip_the_first_bad_record_ends_it():
    with pytest.raises(DataError, match="a line 1: is bad"):
        Mixture([Numbers("a", 3, {1})], [1], seed=0).take(3, text)


def test_a_source_without_a_good_record_ends_it_and_says_why():
    mixture = Mixture([Numbers("a", 4, {0, 1, 2, 3})], [1], seed=0, skip=True)
    with pytest.raises(SourceError, match=r"a: none of its 4 records can be learnt \(reasons: json, roles\)"):
        mixture.take(1, text)


def test_an_error_of_the_whole_source_is_never_skipped():
    with pytest.raises(SourceError):
        Mixture([Numbers("a", 3, {0, 1, 2}, SourceError)], [1], seed=0, skip=True).take(1, text)


def test_identity_changes_with_what_decides_the_examples():
    def identity(weights, total=3, skip=False):
        return Mixture([Numbers("a", total), Numbers("b", 2)], weights, 0, skip).identity()

    assert identity([1, 1]) == identity([2, 2])
    assert identity([1, 1])["sft.data[0].records"] == 3
    assert len({json.dumps(i) for i in (identity([1, 1]), identity([1, 2]), identity([1, 1], 4))}) == 3
    assert identity([1, 1]) == identity([1, 1], skip=True)
