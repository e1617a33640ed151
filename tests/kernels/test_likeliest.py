"""The likeliest token against an argmax over all logits."""

from __future__ import annotations

import pytest
import torch

from kernels.likeliest import Draw, gumbel, likeliest


@pytest.mark.parametrize("logits", [1, 30, 1 << 20])
def test_it_is_the_argmax_of_all_logits(logits):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)
    assert torch.equal(likeliest(hidden, weight, logits=logits), (hidden @ weight.T).argmax(-1))
    assert torch.equal(likeliest(hidden, weight, bias, logits), (hidden @ weight.T + bias).argmax(-1))


def test_of_equal_logits_the_first_is_taken():
    weight = torch.tensor([[0.0], [2.0], [2.0], [1.0]])
    assert likeliest(torch.ones(3, 1), weight).tolist() == [1, 1, 1]


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.5, None), (2.0, 1.5)])
def test_draws_have_the_frequencies_of_the_softmax(temperature, softcap):
    """Chi-square with 10 degrees of freedom stays below 30 in 99.9 % of draws; the keys are fixed."""
    torch.manual_seed(0)
    n, hidden, weight = 40_000, torch.randn(1, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    logits = (hidden @ weight.T)[0]
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = n * torch.softmax(logits / temperature, 0)
    found = likeliest(hidden.expand(n, -1), weight, draw=Draw(torch.arange(n), temperature, softcap))
    assert ((torch.bincount(found, minlength=11) - expected) ** 2 / expected).sum() < 30


def test_a_draw_depends_on_its_key_alone():
    torch.manual_seed(0)
    hidden, weight, keys = torch.randn(50, 5), torch.randn(11, 5), torch.arange(50) * 977
    whole = likeliest(hidden, weight, draw=Draw(keys, 1.0))
    assert torch.equal(whole, likeliest(hidden, weight, logits=20, draw=Draw(keys, 1.0)))
    order = torch.randperm(50)
    assert torch.equal(whole[order], likeliest(hidden[order], weight, draw=Draw(keys[order], 1.0)))
    assert not torch.equal(whole, likeliest(hidden, weight, draw=Draw(keys + 1, 1.0)))


def test_noise_of_a_shard_is_that_of_the_whole_and_is_a_gumbel():
    keys = torch.arange(400)
    whole = gumbel(keys, 0, 300)
    assert torch.equal(whole[:, 100:], gumbel(keys, 100, 200)) and whole.isfinite().all()
    assert whole.mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant; the deviation is 0.004
    assert whole.var().item() == pytest.approx(torch.pi**2 / 6, abs=0.05)
