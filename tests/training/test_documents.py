from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.training.documents import WASTE, Documents, _buckets

CPU = torch.device("cpu")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=40), st.sampled_from([0, 50, 200]))
def test_buckets_hold_every_document_once_in_order_and_waste_little(lengths, alone):
    lengths = sorted(lengths, reverse=True)
    first = 0
    for b in _buckets(lengths, CPU, alone):
        assert b.first == first and b.tokens == sum(lengths[first : first + b.rows])
        assert b.rows * b.length <= WASTE * b.tokens
        first += b.rows
        x = torch.arange(float(b.tokens))[:, None, None]
        assert torch.equal(b.unpad(b.pad(x)), x)
    assert first == sum(n > 0 for n in lengths)


def test_long_runs_of_one_length_are_views():
    (large, small) = _buckets([9] * 40 + [8, 8], CPU, alone=100)
    assert large.rows == 40 and large.gather_N is None and small.rows == 2
    (mixed,) = _buckets([9] * 40 + [8, 8], CPU)
    assert mixed.gather_N is not None


def test_unsorted_documents_are_refused():
    with pytest.raises(ValueError, match="sorted"):
        Documents([2, 3])
