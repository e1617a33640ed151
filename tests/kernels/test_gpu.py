"""Both heads on a GPU: bf16 on the Triton kernels against float64, odd sizes, and how much memory they take."""

from __future__ import annotations

import pytest
import torch

from kernels.logprob import selected_logprob
from kernels.policy_loss import policy_loss, tokens_of_chunk
from tests.kernels.dense import Problem, dense, logits, problem, relative, results
from tests.kernels.test_logprob import CASES
from tests.kernels.test_policy_loss import CLIPPED, clipped

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Tokens, vocabulary, hidden size: multiples of every tile; Qwen2.5's odd vocabulary; rows that TMA cannot read.
SIZES = [(512, 2048, 256), (300, 151_643, 64), (130, 1001, 84)]


def on_gpu(n: int, v: int, d: int, **case) -> Problem:
    return problem(n, v, d, torch.bfloat16, scale=0.5 * d**-0.5, device="cuda", **case)


def extras(p: Problem) -> tuple[torch.Tensor, ...]:
    """Behaviour log-probs on both sides of the clip, advantages, weights with a masked token."""
    g = torch.Generator(device="cuda").manual_seed(1)
    n = len(p.hidden)
    with torch.no_grad():
        behaviour = dense(p.double())[0] + 0.3 * torch.randn(n, device="cuda", generator=g)
    weight = torch.rand(n, device="cuda", generator=g) / n
    weight[n // 2] = 0
    return behaviour.float(), torch.randn(n, device="cuda", generator=g), weight


def usual(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 logits and an fp32 softmax of them: what trainers without a head of their own do."""
    z = logits(p).float()
    logp = z.log_softmax(-1)
    return logp.gather(1, p.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), z.logsumexp(-1)


def check(got: list[torch.Tensor], theirs: list[torch.Tensor], truth: list[torch.Tensor], rounded: float = 0.0) -> None:
    """``rounded``: of the weight's gradient (number 3 of the policy-loss head), by sums in bf16."""
    for i, (ours, other, exact) in enumerate(zip(got, theirs, truth, strict=True)):
        assert torch.isfinite(ours).all()
        more = rounded if i == 3 else 0.0
        assert relative(ours, exact) <= 1.25 * (relative(other, exact) ** 2 + more**2) ** 0.5
    assert (got[0].double() - truth[0]).abs().max() < 2e-4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_log_prob_head_in_bf16(sizes, case, backend):
    p = on_gpu(*sizes, **CASES[case])
    exact = p.double()
    outputs = selected_logprob(*p[:4], **p.options(), backend=backend)
    check(results(p, outputs), results(p, usual(p)), results(exact, dense(exact)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_the_policy_loss_head_in_bf16(sizes, case, fp32, backend):
    p = on_gpu(*sizes, **CASES[case])
    exact, known = p.double(), extras(p)

    def both(q, outputs):
        loss = clipped(*outputs[:2], *known).sum()
        return [*outputs[:2], *torch.autograd.grad(loss, q.inputs())]

    room = 4 * sizes[1] * max(1, sizes[0] // 3)
    loss, logp, entropy = policy_loss(
        *p[:3],
        CLIPPED,
        known,
        p.temperature,
        **p.options(),
        chunk_bytes=room,
        fp32_weight_gradient=fp32,
        backend=backend,
    )
    (2.0 * loss).backward()  # the scale kernel
    chunks = -(-sizes[0] // tokens_of_chunk(sizes[0], sizes[1], room))
    rounded = 0.0 if fp32 else 1.7e-3 * ((chunks - 1) / 2) ** 0.5
    check([logp, entropy, *(x.grad / 2 for x in p.inputs())], both(p, usual(p)), both(exact, dense(exact)), rounded)


def test_gradients_over_their_logits_equal_those_beside_them():
    """The row kernel writes bf16 over fp32 it has read; many rows and blocks at once would show a race."""
    p = on_gpu(2048, 50_000, 64, per_token=True)
    known, found = extras(p), []
    for backend in ("triton", "torch"):
        loss, _, _ = policy_loss(*p[:3], CLIPPED, known, p.temperature, backend=backend)
        found.append(torch.autograd.grad(loss, p.inputs()))
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < 2e-3


def peak(action) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_both_heads():
    n, v, d = 8192, 128_256, 1024
    p = on_gpu(n, v, d)
    outputs = 2 * (n * d + v * d)
    ones = torch.ones(n, device="cuda")

    def four(vocab_chunk):
        logp, entropy, _ = selected_logprob(*p[:3], vocab_chunk=vocab_chunk)
        torch.autograd.grad((logp + 0.1 * entropy).sum(), p.inputs())

    def three():
        torch.autograd.grad(policy_loss(*p[:3], CLIPPED, (ones, ones, ones))[0], p.inputs())

    few = 2**20 * 16  # vectors of one number a token
    for vocab_chunk in (8192, 2048):
        assert peak(lambda width=vocab_chunk: four(width)) - outputs <= 4 * n * d + 2 * n * vocab_chunk + few
    rows = tokens_of_chunk(n, v, 832 * 2**20)
    assert peak(three) - outputs <= 4 * rows * v + few
