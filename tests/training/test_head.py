from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.training.head import selected_logprob_entropy


def dense(hidden, weight, target, temperature):
    logp = (hidden @ weight.t() / temperature).log_softmax(-1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def problem(m=11, v=23, e=6, dtype=torch.float64, scale=1.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(m, e, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(v, e, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, v, (m,), generator=g)


@pytest.mark.parametrize(("token_chunk", "vocab_chunk"), [(100, 100), (4, 23), (11, 5), (3, 7), (1, 1)])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_chunks_equal_dense_log_softmax(token_chunk, vocab_chunk, temperature):
    hidden, weight, target = problem()
    got = selected_logprob_entropy(hidden, weight, target, temperature, token_chunk, vocab_chunk)
    want = dense(hidden, weight, target, temperature)
    up = torch.linspace(-1, 2, 11, dtype=torch.float64)
    got_grads = torch.autograd.grad((got[0] * up).sum() + (got[1] * up.flip(0)).sum(), [hidden, weight])
    want_grads = torch.autograd.grad((want[0] * up).sum() + (want[1] * up.flip(0)).sum(), [hidden, weight])
    for a, b in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_logprob_and_entropy():
    hidden, weight, target = problem(m=4, v=7, e=3)
    assert torch.autograd.gradcheck(lambda h, w: selected_logprob_entropy(h, w, target, 0.7, 3, 2), (hidden, weight))


def test_logprob_alone_has_the_gradient_of_logprob_alone():
    hidden, weight, target = problem()
    got = torch.autograd.grad(selected_logprob_entropy(hidden, weight, target, 0.8, 4, 9)[0].sum(), [hidden, weight])
    want = torch.autograd.grad(dense(hidden, weight, target, 0.8)[0].sum(), [hidden, weight])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_frozen_head_gets_no_weight_gradient():
    hidden, weight, target = problem()
    selected_logprob_entropy(hidden, weight.detach(), target)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_huge_logits_stay_finite():
    hidden, weight, target = problem(scale=1e4)
    logp, entropy = selected_logprob_entropy(hidden, weight, target, 1.0, 4, 5)
    (logp.sum() + entropy.sum()).backward()
    for x in (logp, entropy, hidden.grad, weight.grad):
        assert torch.isfinite(x).all()


def test_bf16_logits_are_not_rounded_before_the_log_sum_exp():
    hidden, weight, target = problem(m=64, v=500, e=64, dtype=torch.bfloat16)
    logp, _ = selected_logprob_entropy(hidden, weight, target, 1.0, 16, 100)
    exact, _ = dense(hidden.double(), weight.double(), target, 1.0)
    rounded = (hidden @ weight.t()).float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert logp.dtype == torch.float32
    assert (logp - exact).abs().max() < 1e-4 < (rounded - exact).abs().max()


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_never_holds_all_logits_not_even_in_backward():
    """NeMo #4222, verl #6699: full-vocabulary logits, or chunks that autograd retains."""
    m, v, e = 512, 600, 8
    hidden, weight, target = problem(m, v, e, torch.float32)
    saved = []
    with LargestTensor() as largest, saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        selected_logprob_entropy(hidden, weight, target, 1.0, 64, 100)[0].sum().backward()
    assert largest.elements <= 64 * 100
    assert sum(saved) <= m * e + v * e + 3 * m


def test_temperature_must_be_positive():
    hidden, weight, target = problem()
    with pytest.raises(ValueError, match="temperature"):
        selected_logprob_entropy(hidden, weight, target, 0.0)
