"""The likeliest token against an argmax over all logits."""

from __future__ import annotations

import pytest
import torch

from kernels.likeliest import likeliest


@pytest.mark.parametrize("logits", [1, 30, 1 << 20])
def test_it_is_the_argmax_of_all_logits(logits):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    assert torch.equal(likeliest(hidden, weight, logits=logits), (hidden @ weight.T).argmax(-1))
    assert torch.equal(likeliest(hidden, weight, bias, logits), (hidden @ weight.T + bias).argmax(-1))


def test_of_equal_logits_the_first_is_taken():
    weight = torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    assert likeliest(torch.ones(3, 1), weight).tolist() == [1, 1, 1]
