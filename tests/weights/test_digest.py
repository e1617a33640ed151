"""Digests: shards add up, and every kind of damage shows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.weights.digest import U64, tensor_digest, tensor_digests

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def digest(tensor: torch.Tensor, **where) -> int:
    return int(tensor_digest(tensor, **where)) % U64


@pytest.fixture
def weights() -> torch.Tensor:
    return torch.randn(64, 48, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 13), cols=st.integers(1, 9), cut=st.integers(0, 13), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_row_shards_add_up(dtype, rows, cols, cut, seed):
    whole = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    cut = min(cut, rows)
    parts = digest(whole[:cut]) + digest(whole[cut:], offset=cut * cols)
    assert parts % U64 == digest(whole)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("pieces", [2, 3])
def test_shards_of_any_dimension_add_up(dim, pieces):
    whole = torch.randn(6, 5, 7)
    total, start = 0, 0
    for piece in whole.chunk(pieces, dim):
        total += digest(piece, offset=start * whole.stride(dim), strides=whole.stride())
        start += piece.shape[dim]
    assert total % U64 == digest(whole)


def test_same_whatever_the_chunks(weights, monkeypatch):
    expected = digest(weights)
    for chunk in (1, 7, 48, 100, 1000):
        monkeypatch.setattr("asyncrl.weights.digest.CHUNK", chunk)
        assert digest(weights) == expected
        blocks = [digest(weights[:, i : i + 12], offset=i, strides=(48, 1)) for i in range(0, 48, 12)]
        assert sum(blocks) % U64 == expected


def test_memory_layout_does_not_matter(weights):
    assert digest(weights.t().contiguous().t()) == digest(weights)


def test_every_bit_of_every_dtype_counts():
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
        tensor = torch.ones(5, dtype=dtype)
        seen = {digest(tensor)}
        for bit in range(8 * tensor.element_size()):
            flipped = tensor.clone()
            flipped.view(bits)[3] ^= torch.tensor(1, dtype=bits) << bit
            seen.add(digest(flipped))
        assert len(seen) == 1 + 8 * tensor.element_size()


def test_swaps_show(weights):
    rows, elements = weights.clone(), weights.clone()
    rows[[3, 4]] = rows[[4, 3]]
    elements[0, 0], elements[0, 1] = weights[0, 1], weights[0, 0]
    assert len({digest(weights), digest(rows), digest(elements), digest(weights.t())}) == 4


def test_skips_show(weights):
    holes = weights.clone()
    holes[10] = 0
    assert digest(holes) != digest(weights)
    assert digest(weights[:-1]) != digest(weights)
    assert digest(weights[1:], offset=0) != digest(weights[1:], offset=48)


def test_a_cast_shows_even_of_zeros():
    assert len({digest(torch.zeros(7, dtype=d)) for d in DTYPES}) == len(DTYPES)
    assert digest(torch.zeros(7)) != digest(torch.zeros(8))


def test_a_cast_and_back_shows(weights):
    assert digest(weights.bfloat16().float()) != digest(weights)


def test_known_value():
    """The digest is part of the wire format: both ends must agree across versions."""
    assert digest(torch.arange(5, dtype=torch.float32)) == KNOWN


KNOWN = 14384708240665364780


def test_many_at_once(weights):
    tensors = [weights, weights[0], torch.zeros(0)]
    assert tensor_digests(tensors) == [digest(t) for t in tensors]
    assert tensor_digests([]) == []


def test_unknown_dtype_is_refused():
    with pytest.raises(TypeError, match=r"no digest for dtype torch\.complex64"):
        tensor_digest(torch.zeros(2, dtype=torch.complex64))


def test_strides_must_fit():
    with pytest.raises(ValueError, match="1 strides for a block of 2 dimensions"):
        tensor_digest(torch.zeros(2, 2), strides=(1,))
