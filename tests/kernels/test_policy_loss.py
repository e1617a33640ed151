"""The policy-loss head against the four-product head and one dense float64 expression, for every backend."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.logprob import selected_logprob
from kernels.policy_loss import by_autograd, policy_loss, tokens_of_chunk
from tests.kernels.dense import CASES, LargestTensor, Problem, dense, logits, problem, relative

BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]


def clipped(logp, entropy, behaviour, advantage, weight):
    """Clipped surrogate with an entropy bonus: masked tokens have weight zero."""
    ratio = (logp - behaviour).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return torch.where(weight > 0, -surrogate - 0.1 * entropy, 0.0) * weight


def with_derivatives(logp, entropy, behaviour, advantage, weight):
    """The same with its derivatives by hand."""
    ratio = (logp - behaviour).exp()
    active = torch.where(advantage > 0, ratio < 1.2, ratio > 0.8)
    slope = torch.where(active, -ratio * advantage, 0.0) * weight
    return clipped(logp, entropy, behaviour, advantage, weight), slope, -0.1 * weight


def known(p: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """behaviour, advantage, weight / denominator: ratios on both sides of both clips, a masked token."""
    n = len(p.hidden)
    g = torch.Generator().manual_seed(1)
    behaviour = dense(p.double())[0].detach() + 0.4 * torch.randn(n, generator=g, dtype=torch.float64)
    weight = torch.rand(n, generator=g, dtype=torch.float64) / n
    weight[n // 2 :: 7] = 0
    return tuple(x.to(dtype) for x in (behaviour, torch.randn(n, generator=g, dtype=torch.float64), weight))


CLIPPED = by_autograd(clipped)


def run(p: Problem, backend: str, rows: int = 4, token_loss=CLIPPED, dtype=torch.float64, **options):
    size = 8 if p.hidden.dtype == torch.float64 else 4
    chunk_bytes = rows * size * len(p.weight)
    return policy_loss(
        p.hidden, p.weight, p.target, token_loss, known(p, dtype), p.temperature,
        **p.options(), backend=backend, chunk_bytes=chunk_bytes, **options,
    )  # fmt: skip


def reference(p: Problem) -> list[torch.Tensor]:
    """(loss, logp, entropy, gradients) in float64, all logits at once."""
    exact = p.double()
    logp, entropy, _ = dense(exact)
    loss = clipped(logp, entropy, *known(p, torch.float64)).sum()
    return [loss, logp, entropy, *torch.autograd.grad(loss, exact.inputs())]


def agree(got: list[torch.Tensor], want: list[torch.Tensor], limit: float) -> None:
    """Relative norms; the loss, a sum in which terms of order one cancel, absolutely."""
    assert abs(got[0].item() - want[0].item()) < limit
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative(a, b) < limit


def settings(backend: str) -> tuple[torch.dtype, float]:
    return (torch.float64, 1e-12) if backend == "torch" else (torch.float32, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("rows", "token_loss"), [(100, CLIPPED), (4, with_derivatives)], ids=["autograd", "by hand"])
def test_equals_dense(backend, case, rows, token_loss):
    dtype, limit = settings(backend)
    p = problem(dtype=dtype, **CASES[case])
    loss, logp, entropy = run(p, backend, rows, token_loss, dtype)
    assert not logp.requires_grad and not entropy.requires_grad
    got = [loss, logp, entropy, *torch.autograd.grad(loss, p.inputs())]
    agree(got, reference(p), limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_head_of_four_products(backend):
    dtype, limit = settings(backend)
    p = problem(n=40, v=70, d=8, dtype=dtype, per_token=True, scale=0.5)
    logp, entropy, _ = selected_logprob(*p[:4], backend=backend)
    loss = clipped(logp, entropy, *known(p, dtype)).sum()
    want = [loss, logp, entropy, *torch.autograd.grad(loss, p.inputs())]
    outputs = run(p, backend, 16, dtype=dtype)
    got = [*outputs, *torch.autograd.grad(outputs[0], p.inputs())]
    agree(got, want, limit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_products_a_chunk_and_none_in_backward(backend):
    p = problem(n=12, dtype=settings(backend)[0])
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__:
                products.append(func)
            return func(*args, **(kwargs or {}))

    extras, room = known(p, p.hidden.dtype), 4 * p.hidden.element_size() * len(p.weight)
    for weight, count in ((p.weight, 9), (p.weight.detach(), 6)):
        products.clear()
        with Count():
            loss, _, _ = policy_loss(
                p.hidden, weight, p.target, with_derivatives, extras, backend=backend, chunk_bytes=room
            )  # fmt: skip
            loss.backward()
        assert len(products) == count


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_upstream_gradient_counts(backend):
    """A loss that is scaled, for example by the delayed clipping of an optimizer in backward."""
    dtype, limit = settings(backend)
    p = problem(dtype=dtype)
    (3.5 * run(p, backend, dtype=dtype)[0]).backward()
    for x, want in zip(p.inputs(), reference(p)[3:], strict=True):
        assert relative(x.grad, 3.5 * want) < limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_still_have_a_graph(backend):
    """torchtune (#22 of the notes): a rank without tokens takes part, with zero gradients."""
    p = problem(n=0, dtype=settings(backend)[0], bias=True)
    nothing = torch.zeros(0, dtype=p.hidden.dtype)
    loss, logp, entropy = policy_loss(
        *p[:3], by_autograd(clipped), [nothing] * 3, bias_V=p.bias, backend=backend
    )  # fmt: skip
    loss.backward()
    assert loss == 0 and len(logp) == len(entropy) == 0
    for x in p.inputs():
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_give_nothing_even_if_they_are_not_numbers(backend):
    """torchtune #2425: a loss that multiplies by its mask lets NaN through."""
    dtype, limit = settings(backend)
    p = problem(dtype=dtype)
    behaviour, advantage, weight = known(p, dtype)
    behaviour[weight == 0] = torch.nan

    def loss_of(logp, entropy, behaviour, advantage, weight):
        return clipped(logp, entropy, torch.where(weight > 0, behaviour, 0.0), advantage, weight)

    loss, _, _ = policy_loss(*p[:3], by_autograd(loss_of), [behaviour, advantage, weight], backend=backend)
    loss.backward()
    want = reference(p)
    agree([loss, p.hidden.grad, p.weight.grad], [want[0], *want[3:]], limit)


def test_without_gradients_it_only_scores():
    p = problem()
    with torch.no_grad():
        loss, logp, entropy = run(p, "torch")
    for a, b in zip((loss, logp, entropy), reference(p), strict=False):
        assert relative(a, b) < 1e-12


def test_gradients_are_given_away_once():
    p = problem()
    loss = run(p, "torch")[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_bf16_error_is_at_most_that_of_a_dense_bf16_computation():
    p = problem(n=64, v=500, d=64, dtype=torch.bfloat16, scale=0.3)
    want = reference(p)
    logp = logits(p).float().log_softmax(-1)
    entropy, picked = -(logp.exp() * logp).sum(-1), logp.gather(1, p.target[:, None])[:, 0]
    loss = clipped(picked, entropy, *known(p, torch.float32)).sum()
    usual = [picked, entropy, *torch.autograd.grad(loss, p.inputs())]
    outputs = run(p, "torch", 16, dtype=torch.float32)
    got = [*outputs[1:], *torch.autograd.grad(outputs[0], p.inputs())]
    assert got[2].dtype == got[3].dtype == torch.bfloat16
    for ours, theirs, truth in zip(got, usual, want[1:], strict=True):
        assert relative(ours, truth) <= 1.25 * relative(theirs, truth)


def test_holds_the_logits_of_one_chunk():
    p = problem(512, 600, 8, torch.float32)
    extras, room = known(p, torch.float32), 64 * 4 * 600
    with LargestTensor() as largest:
        policy_loss(*p[:3], by_autograd(clipped), extras, chunk_bytes=room)[0].backward()
    assert largest.elements <= 64 * 600


def test_extras_must_fit():
    p = problem()
    with pytest.raises(ValueError, match=r"extras must be \(11, ...\)"):
        policy_loss(*p[:3], by_autograd(clipped), [torch.zeros(3)])


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "most_bytes", "want"),
    [
        (8192, 128_256, 832 << 20, 1536),
        (8192, 151_936, 832 << 20, 1280),
        (100, 128_256, 832 << 20, 100),
        (4000, 305, 832 << 20, 4000),
        (10, 1000, 12_000, 3),  # 3, 3, 3, 1 would be uneven, and 2 too many chunks
        (0, 1000, 1, 1),
    ],
)
def test_tokens_of_a_chunk(tokens, vocabulary, most_bytes, want):
    size = tokens_of_chunk(tokens, vocabulary, most_bytes)
    assert size == want and (size == 1 or size * vocabulary * 4 <= most_bytes)
