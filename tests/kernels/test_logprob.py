"""One suite for every backend of the log-prob head: torch, and Triton in its interpreter.

Triton must know of its interpreter before it is imported: test_interpreted.py runs this file in a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.logprob import selected_logprob
from kernels.matmul import chunks
from tests.kernels.dense import CASES, LargestTensor, Problem, dense, logits, problem, relative, results, weighted

BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]


def run(p: Problem, backend: str, **options) -> tuple[torch.Tensor, ...]:
    return selected_logprob(*p[:4], **p.options(), backend=backend, **options)


def limit(backend: str) -> float:
    return 1e-12 if backend == "torch" else 1e-6  # the Triton kernels sum in fp32


def dtype(backend: str) -> torch.dtype:
    return torch.float64 if backend == "torch" else torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("token_chunk", "vocab_chunk"), [(100, 100), (4, 23), (3, 7)])
def test_outputs_and_gradients_equal_dense(backend, case, token_chunk, vocab_chunk):
    p = problem(dtype=dtype(backend), **CASES[case])
    got = results(p, run(p, backend, token_chunk=token_chunk, vocab_chunk=vocab_chunk))
    exact = p.double()
    for a, b in zip(got, results(exact, dense(exact)), strict=True):
        assert relative(a, b) < limit(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [8, 7], ids=["rows of 16 bytes", "other rows"])
def test_many_tiles_that_do_not_fit(backend, d):
    """Tokens, vocabulary and hidden size that no tile divides, with and without the alignment that TMA needs."""
    p = problem(n=37, v=70, d=d + 16, dtype=dtype(backend), scale=0.3, **CASES["all"])
    got = results(p, run(p, backend, vocab_chunk=33))
    exact = p.double()
    for a, b in zip(got, results(exact, dense(exact)), strict=True):
        assert relative(a, b) < limit(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["logp", "entropy", "lse", "logp entropy", "entropy lse"])
def test_any_of_the_outputs_may_have_a_gradient(backend, which):
    p = problem(dtype=dtype(backend), per_token=True)
    got = results(p, run(p, backend, token_chunk=4, vocab_chunk=9), which)
    exact = p.double()
    for a, b in zip(got, results(exact, dense(exact), which), strict=True):
        assert relative(a, b) < limit(backend)


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    p = problem(n=4, v=7, d=3, **CASES[case])

    def head(*inputs):
        bias = inputs[2] if p.bias is not None else None
        return run(p._replace(hidden=inputs[0], weight=inputs[1], bias=bias), "torch", token_chunk=3, vocab_chunk=2)

    assert torch.autograd.gradcheck(head, p.inputs())


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_head_gets_no_weight_gradient_and_pays_no_product(backend):
    p = problem(dtype=dtype(backend))
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__:
                products.append(func)
            return func(*args, **(kwargs or {}))

    counts = []
    for weight in (p.weight, p.weight.detach()):
        outputs = run(p._replace(weight=weight), backend)
        products.clear()
        with Count():
            weighted(outputs).backward()
        counts.append(len(products))
    assert counts[0] - counts[1] == 1
    exact = p.double()
    weighted(dense(exact)).backward()
    assert relative(p.hidden.grad, 2 * exact.hidden.grad) < limit(backend)
    assert relative(p.weight.grad, exact.weight.grad) < limit(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_tokens_are_taken_out_before_the_projection(backend):
    """torchtune #2425 and its kin: what stands at a masked place, NaN or a wrong id, is never touched."""
    p = problem(n=9, dtype=dtype(backend), per_token=True)
    mask = torch.tensor([True, False, True, True, False, True, True, False, True])
    with torch.no_grad():
        p.hidden[1] = torch.nan
        p.target[4] = 10**6
    outputs = run(p, backend, mask_N=mask)
    got = results(p, outputs)
    kept = Problem(p.hidden[mask], p.weight, p.target[mask], p.temperature[mask]).double()
    want = dense(kept)
    spread = tuple(torch.zeros(9, dtype=torch.float64).index_copy(0, mask.nonzero()[:, 0], x) for x in want)
    grads = torch.autograd.grad(weighted(spread), kept.inputs())
    for a, b in zip(outputs, spread, strict=True):
        assert torch.equal(a[~mask], torch.zeros(3, dtype=a.dtype)) and relative(a, b) < limit(backend)
    assert torch.equal(got[3][~mask], torch.zeros(3, 6, dtype=got[3].dtype))
    assert relative(got[3][mask], grads[0]) < limit(backend) and relative(got[4], grads[1]) < limit(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["no rows", "all masked"])
def test_no_tokens_still_have_a_graph(backend, how):
    """torchtune (#22 of the notes): all labels masked, the loss has no gradient and FSDP hangs."""
    p = problem(n=0 if how == "no rows" else 5, dtype=dtype(backend), bias=True)
    mask = None if how == "no rows" else torch.zeros(5, dtype=torch.bool)
    outputs = run(p, backend, mask_N=mask)
    weighted(outputs).backward()
    for x in (*outputs, p.hidden.grad, p.weight.grad, p.bias.grad):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_huge_logits_stay_finite(backend):
    p = problem(scale=1e4, dtype=dtype(backend))
    outputs = run(p, backend, token_chunk=4, vocab_chunk=5)
    weighted(outputs).backward()
    for x in (*outputs, p.hidden.grad, p.weight.grad):
        assert torch.isfinite(x).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_target_outside_the_vocabulary_is_not_a_number(backend):
    p = problem(dtype=dtype(backend))
    p.target[3], p.target[5] = 23, -1
    logp, entropy, lse = run(p, backend)
    assert logp.isnan().nonzero().flatten().tolist() == [3, 5]
    assert torch.isfinite(entropy).all() and torch.isfinite(lse).all()


def test_bf16_error_is_at_most_that_of_a_dense_bf16_computation():
    """Log-probs far better, since logits are not rounded; gradients at most 1.25 times as far from float64."""
    p = problem(n=64, v=500, d=64, dtype=torch.bfloat16, scale=0.3)
    exact = p.double()
    want = results(exact, dense(exact))
    rounded = logits(p).float()  # bf16 logits, fp32 softmax: what trainers without a head of their own do
    logp = rounded.log_softmax(-1)
    outputs = (logp.gather(1, p.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), rounded.logsumexp(-1))
    usual = results(p, outputs)
    got = results(p, run(p, "torch", token_chunk=16, vocab_chunk=100))
    assert got[0].dtype == torch.float32 and got[3].dtype == got[4].dtype == torch.bfloat16
    for ours, theirs, truth in zip(got, usual, want, strict=True):
        assert relative(ours, truth) <= 1.25 * relative(theirs, truth)
    assert (got[0] - want[0]).abs().max() < 1e-4 < (usual[0] - want[0]).abs().max()


@pytest.mark.parametrize(("n", "v", "d"), [(64, 500, 64), (4, 151_643, 32)])
def test_fp32_gradients_are_within_1e_6_of_float64(n, v, d):
    """Also at a vocabulary of real size, where log-sum-exp and sums are large against their terms."""
    p = problem(n, v, d, dtype=torch.float32, scale=0.3)
    exact = p.double()
    want = results(exact, dense(exact))
    for a, b in zip(results(p, run(p, "torch", token_chunk=16)), want, strict=True):
        assert relative(a, b) < 1e-6


def test_never_holds_all_logits_not_even_in_backward():
    """NeMo #4222, verl #6699: full-vocabulary logits, or chunks that autograd retains.

    NeMo #3124, verl #6984, TRL #5349: chunks put together again before the tokens are selected.
    """
    n, v, d = 512, 600, 8
    p = problem(n, v, d, torch.float32)
    saved = []
    with LargestTensor() as largest, saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        weighted(run(p, "torch", token_chunk=64, vocab_chunk=100)).backward()
    assert largest.elements <= 64 * 100
    assert sum(saved) <= n * d + v * d + 6 * n  # hidden, weight; target, lse, entropy; the test's own upstream


def test_saved_tensors_can_be_moved_away():
    """Activation offload: nothing but what autograd saves may be used in backward."""
    p = problem(per_token=True)
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        outputs = run(p, "torch")
    got = torch.autograd.grad(weighted(outputs), p.inputs())
    for a, b in zip(got, torch.autograd.grad(weighted(dense(p)), p.inputs()), strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": torch.tensor([1.0] * 10 + [0.0])}, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, r"temperature must be \(11,\)"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, r"target must be \(11,\)"),
        ({"bias": torch.zeros(4)}, r"bias must be \(23,\)"),
        ({"hidden": torch.zeros(11, 6)}, "hidden is torch.float32 and weight torch.float64"),
        ({"hidden": torch.zeros(11, 5, dtype=torch.float64)}, r"do not fit: \(11, 5\), \(23, 6\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(problem()._replace(**change), "torch")


def test_unknown_backend():
    with pytest.raises(ValueError, match="unknown backend 'cuda'; choose auto, torch or triton"):
        run(problem(), "cuda")


def test_chunks_cover_the_range_once():
    assert [range(10)[c] for c in chunks(10, 4)] == [range(0, 4), range(4, 8), range(8, 10)]
    assert chunks(0, 4) == []
