from __future__ import annotations

import pytest
import torch

from kernels.multi_lora_segments import segments


def random_slots(seed: int, tokens: int, slots: int) -> torch.Tensor:
    """Some slots without tokens, some consecutive rows of one slot, some rows without adapter."""
    g = torch.Generator().manual_seed(seed)
    share = torch.rand(slots + 1, generator=g) * (torch.rand(slots + 1, generator=g) < 0.7)
    share[0] += 1e-3
    return torch.multinomial(share, tokens, replacement=True, generator=g) - 1


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_sorted_by_slot_in_their_order_and_cut_from_the_first_of_each(seed):
    """Against Python loops: order, bounds, tiles, chunks, and the pieces that are not there."""
    tokens, slots = 1 + 17 * seed, 5
    slot_T = random_slots(seed, tokens, slots)
    found = segments(slot_T, slots, tile=4, chunk=12)
    rows = [[t for t in range(tokens) if slot_T[t] == s] for s in [*range(slots), -1]]
    assert [r.tolist() for r in found.rows] == rows
    assert found.order_T.tolist() == [t for r in rows for t in r]
    for pieces, size in ((found.tiles, 4), (found.chunks, 12)):
        wanted = [(s, int(found.start[s]) + i) for s, r in enumerate(rows) for i in range(0, len(r), size)]
        got = list(zip(pieces.slot.tolist(), pieces.first.tolist(), strict=True))
        assert got == wanted + [(-1, tokens)] * (len(got) - len(wanted))
        assert len(got) == min(tokens, tokens // size + slots + 1)
    chunks = [-(-len(r) // 12) for r in rows]
    assert found.first_chunk.tolist() == [sum(chunks[:i]) for i in range(slots + 2)]


def test_contents_change_in_place():
    """As before a replay of a captured graph: same tensors, other segments."""
    table, other = (segments(random_slots(seed, 40, 3), 3) for seed in (1, 2))
    assert not torch.equal(table.order_T, other.order_T)
    addresses = [t.data_ptr() for t in table.tensors]
    assert len(table.rows) == 4  # what is remembered must be forgotten
    table.copy_(other)
    assert [t.data_ptr() for t in table.tensors] == addresses
    assert all(torch.equal(a, b) for a, b in zip(table.tensors, other.tensors, strict=True))
    assert [r.tolist() for r in table.rows] == [r.tolist() for r in other.rows]
    with pytest.raises(ValueError, match="other sizes"):
        table.copy_(segments(random_slots(1, 41, 3), 3))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="from -1 to 3, of 3 slots"):
        segments(torch.tensor([0, 3, -1]), 3)
    with pytest.raises(ValueError, match="from -2 to 1, of 3 slots"):
        segments(torch.tensor([0, 1, -2]), 3)
    with pytest.raises(ValueError, match="int64, is"):
        segments(torch.zeros(3), 3)
    with pytest.raises(ValueError, match="has 3 tokens, longest=2"):
        segments(torch.tensor([1, 1, -1, 1, -1, -1, -1]), 2, longest=2)


def test_no_tokens_and_no_slots():
    assert segments(torch.zeros(0, dtype=torch.int64), 2).start.tolist() == [0, 0, 0, 0]
    assert [r.tolist() for r in segments(torch.tensor([-1, -1]), 0).rows] == [[0, 1]]
