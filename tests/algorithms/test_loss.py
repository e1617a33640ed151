from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.loss import LossMask, grpo_loss

AGGREGATIONS = ["token_mean", "sequence_mean"]


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def mask(trained, sample):
    return LossMask(torch.tensor(trained, dtype=torch.bool), torch.tensor(sample, dtype=torch.int64), len(set(sample)))


def loss(logp, behaviour, advantage, m, aggregation="token_mean"):
    return grpo_loss(logp, behaviour, advantage, m, 0.2, 0.28, aggregation)


# Two samples: tokens 0-1 and 2-4. Ratios 1.5 (clipped high), 0.5 (clipped low), 1.5 with A < 0, 0.5 with A > 0, 1.
RATIOS = t(1.5, 0.5, 1.5, 0.5, 1.0)
ADVANTAGE = t(2.0, -1.0, -1.0, 3.0, 4.0)
SAMPLE = [0, 0, 1, 1, 1]
# min(r A, clip(r) A): 1.28*2; max-cost side 0.8*-1; 1.5*-1 is unclipped below; 0.5*3 likewise; 4
SURROGATE = [2.56, -0.8, -1.5, 1.5, 4.0]


def test_surrogate_and_both_aggregations_by_hand():
    m = mask([True] * 5, SAMPLE)
    behaviour = t(-1.0, -2.0, -0.5, -3.0, -1.5)
    logp = RATIOS.log() + behaviour
    token, _ = loss(logp, behaviour, ADVANTAGE, m)
    sequence, _ = loss(logp, behaviour, ADVANTAGE, m, "sequence_mean")
    assert token.item() == pytest.approx(-sum(SURROGATE), rel=1e-12)
    assert sequence.item() == pytest.approx(-((2.56 - 0.8) / 2 + (-1.5 + 1.5 + 4.0) / 3), rel=1e-12)
    assert m.count("token_mean") == 5 and m.count("sequence_mean") == 2


def test_contract_ratio_each_clip_share_becomes_non_zero_when_the_ratio_moves():
    """Contract Ratio: with pi / mu a clip acts even with one step a batch; recomputed old log-probs make it inert."""
    m, behaviour = mask([True] * 5, SAMPLE), torch.zeros(5, dtype=torch.float64)
    logp = RATIOS.log().requires_grad_()
    value, metrics = loss(logp, behaviour, ADVANTAGE, m)
    assert metrics["clip_high"].item() == 1 and metrics["clip_low"].item() == 1
    (g,) = torch.autograd.grad(value, logp)
    assert g[0] == 0 and g[1] == 0  # exactly the clipped tokens
    torch.testing.assert_close(g[2:], -(RATIOS * ADVANTAGE)[2:])
    still, _ = torch.zeros(5, dtype=torch.float64), None
    unmoved = loss(still, behaviour, ADVANTAGE, m)[1]
    assert unmoved["clip_high"].item() == unmoved["clip_low"].item() == 0


def test_metrics_by_hand():
    m = mask([True] * 5, SAMPLE)
    _, metrics = loss(RATIOS.log(), torch.zeros(5, dtype=torch.float64), ADVANTAGE, m)
    assert metrics["ratio"].item() == pytest.approx(5.0)
    assert metrics["ratio_max"].item() == pytest.approx(1.5)
    assert metrics["ratio_square"].item() == pytest.approx(2 * 2.25 + 2 * 0.25 + 1)
    k3 = sum(r - 1 - math.log(r) for r in RATIOS.tolist())
    assert metrics["kl"].item() == pytest.approx(k3)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck(aggregation):
    """SkyRL #1353, NeMo #2506: a term that a clamp or no_grad cuts off the graph."""
    g = torch.Generator().manual_seed(0)
    logp = (0.3 * torch.randn(6, generator=g, dtype=torch.float64)).requires_grad_()
    behaviour, advantage = (torch.randn(6, generator=g, dtype=torch.float64) for _ in range(2))
    m = mask([True, True, False, True, True, True], [0, 0, 0, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda x: loss(x, 0.1 * behaviour, advantage, m, aggregation)[0], (logp,))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["logp", "behaviour", "advantage"])
def test_nan_planted_in_a_masked_position_has_no_effect(where, bad, aggregation):
    """SkyRL #1635: 0 * NaN leaks out of masked positions."""
    m = mask([True, True, False, True, True], SAMPLE)
    clean = {"logp": t(-1, -2, -3, -1, -2), "behaviour": t(-1.1, -2, -2.5, -1, -2.2), "advantage": ADVANTAGE.clone()}
    dirty = {k: v.clone() for k, v in clean.items()}
    dirty[where][2] = bad
    results = []
    for case in (clean, dirty):
        logp = case["logp"].requires_grad_()
        value, metrics = loss(logp, case["behaviour"], case["advantage"], m, aggregation)
        results.append([value, *torch.autograd.grad(value, logp), *metrics.values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][1][2] == 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("tokens", [2, 0], ids=["all masked", "no token"])
def test_a_batch_without_trained_tokens_gives_finite_zero_gradients(aggregation, tokens):
    """unsloth-zoo #1286, TRL #5826, verl #5899, open-instruct #1685: 0/0 when every token is masked.

    PipelineRL cc0a881: a sum scattered from no token is detached from the graph.
    """
    m = mask([False] * tokens, range(tokens))
    logp = t(-1.0, -2.0)[:tokens].requires_grad_()
    value, metrics = loss(logp, t(-1.0, -1.0)[:tokens], t(1.0, 1.0)[:tokens], m, aggregation)
    assert m.count(aggregation) == 0
    (g,) = torch.autograd.grad(value, logp)
    assert value.item() == 0 and torch.equal(g, torch.zeros_like(g))
    assert all(metric.item() == 0 for metric in metrics.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_sample_whose_tokens_are_all_masked_counts_nowhere(aggregation):
    """TRL PR #7077: the mean over a sample of no trained token is 0/0, and spoils the samples beside it."""
    behaviour, logp = torch.zeros(5, dtype=torch.float64), RATIOS.log().requires_grad_()
    m, alone = mask([False, False, True, True, True], SAMPLE), mask([True] * 3, [0] * 3)
    value, _ = loss(logp, behaviour, ADVANTAGE, m, aggregation)
    want, _ = loss(RATIOS[2:].log(), behaviour[2:], ADVANTAGE[2:], alone, aggregation)
    assert torch.equal(value, want) and m.count(aggregation) == alone.count(aggregation)
    (g,) = torch.autograd.grad(value, logp)
    assert torch.isfinite(g).all() and g[:2].tolist() == [0, 0] and g[2:].all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_truncated_tokens_leave_numerator_and_denominator_together(aggregation):
    """TRL #6369, #6439: masked in the numerator only. One object owns both."""
    m = mask([True, False, False, False, True], SAMPLE)
    value = m.numerator(torch.full((5,), 7.0, dtype=torch.float64), aggregation)
    assert value.item() / m.count(aggregation) == pytest.approx(7.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_do_not_depend_on_the_cut_into_micro_batches(aggregation):
    """prime-rl #2562, open-instruct #1137, #1161, TRL #3021: a mean of means is not the mean."""
    behaviour = t(-1.0, -2.0, -0.5, -3.0, -1.5)

    def gradient(cuts):
        parts, count, logp = [], 0, (RATIOS.log() + behaviour).requires_grad_()
        for samples in cuts:
            pick = torch.tensor([s in samples for s in SAMPLE])
            ids = torch.tensor([samples.index(s) for s in SAMPLE if s in samples])
            m = LossMask(torch.ones(int(pick.sum()), dtype=torch.bool), ids, len(samples))
            parts.append(loss(logp[pick], behaviour[pick], ADVANTAGE[pick], m, aggregation)[0])
            count += m.count(aggregation)
        return torch.autograd.grad(sum(parts) / count, logp)[0]

    torch.testing.assert_close(gradient([[0, 1]]), gradient([[1], [0]]), rtol=1e-12, atol=0)


def test_unknown_aggregation_is_an_error():
    with pytest.raises(ValueError, match="aggregation"):
        mask([True], [0]).count("batch_mean")
