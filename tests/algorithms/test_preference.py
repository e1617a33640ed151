"""Losses of pairs against numbers worked by hand, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.preference import hinge_loss, ipo_loss, preference_loss, ranked_rightly, sigmoid_loss
from asyncrl.config.schema import DpoConfig


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


# Two pairs: sums of log-probs (chosen, rejected), and learnt tokens.
# h = (-10 + 12) - (-9 + 6) = 5 and (-4 + 3) - (-2 + 5) = -4.
POLICY, REFERENCE = t([-10.0, -9.0], [-4.0, -2.0]), t([-12.0, -6.0], [-3.0, -5.0])
TOKENS = torch.tensor([[4, 3], [2, 6]])
# Over their lengths: 2/4 + 3/3 = 1.5 and -1/2 - 3/6 = -1.
BY_LENGTH = [1.5, -1.0]


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"beta": 0.2}, [softplus(-1.0), softplus(0.8)]),
        ({"beta": 0.5, "label_smoothing": 0.1}, [0.9 * softplus(-2.5) + 0.1 * softplus(2.5), None]),
        ({"loss": "ipo", "beta": 0.1}, [0.0, 81.0]),
        ({"loss": "ipo", "beta": 0.25}, [9.0, 36.0]),
        ({"loss": "hinge", "beta": 0.1}, [0.5, 1.4]),
        ({"loss": "hinge", "beta": 0.5}, [0.0, 3.0]),
        ({"beta": 2.0, "length_normalised": True}, [softplus(-3.0), softplus(2.0)]),
        ({"loss": "ipo", "beta": 0.5, "length_normalised": True}, [0.25, 4.0]),
        ({"loss": "hinge", "beta": 0.1, "sft_weight": 2.0}, [0.5 + 2 * 10 / 4, 1.4 + 2 * 4 / 2]),
    ],
)
def test_each_loss_by_hand(settings, wanted):
    loss, _ = preference_loss(POLICY, REFERENCE, TOKENS, DpoConfig(**settings))
    for found, value in zip(loss.tolist(), wanted, strict=True):
        assert value is None or found == pytest.approx(value, rel=1e-14, abs=1e-14)


def test_rewards_by_hand():
    _, plain = preference_loss(POLICY, REFERENCE, TOKENS, DpoConfig(beta=0.2))
    torch.testing.assert_close(plain, t([0.4, -0.6], [-0.2, 0.6]))
    _, short = preference_loss(POLICY, REFERENCE, TOKENS, DpoConfig(beta=0.2, length_normalised=True))
    torch.testing.assert_close(short, 0.2 * t([0.5, -1.0], [-0.5, 0.5]))
    torch.testing.assert_close(short[:, 0] - short[:, 1], 0.2 * t(*BY_LENGTH))
    assert ranked_rightly(t([0.1, -0.1], [0.0, 0.0], [-1.0, 1.0])).tolist() == [1.0, 0.5, 0.0]


def test_the_gradient_of_dpo_is_that_of_its_paper():
    """Equation after 7: -beta sigmoid(-beta h), of the chosen log-prob; its negative of the rejected one."""
    policy = POLICY.clone().requires_grad_()
    loss, _ = preference_loss(policy, REFERENCE, TOKENS, DpoConfig(beta=0.3))
    (grad,) = torch.autograd.grad(loss.sum(), policy)
    pull = 0.3 * torch.sigmoid(-0.3 * t(5.0, -4.0))
    torch.testing.assert_close(grad, torch.stack([-pull, pull], dim=1))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
@pytest.mark.parametrize("normalised", [False, True])
def test_gradients_are_those_of_differences(loss, normalised):
    smoothing = 0.2 if loss == "sigmoid" else 0.0
    settings = DpoConfig(loss, 0.15, smoothing, normalised, sft_weight=0.7)
    torch.manual_seed(0)
    policy = (-10 * torch.rand(5, 2, dtype=torch.float64)).requires_grad_()
    reference, tokens = -10 * torch.rand(5, 2, dtype=torch.float64), torch.randint(1, 9, (5, 2))
    assert torch.autograd.gradcheck(lambda p: preference_loss(p, reference, tokens, settings)[0], policy)


def test_where_policy_and_reference_are_the_same():
    for policy in (POLICY, POLICY.float()):
        loss, reward = preference_loss(policy, policy, TOKENS, DpoConfig())
        assert loss.tolist() == [pytest.approx(math.log(2.0), rel=1e-7)] * 2 and not reward.any()
    assert loss.dtype == torch.float32
    assert preference_loss(POLICY, POLICY, TOKENS, DpoConfig())[0].tolist() == [math.log(2.0)] * 2


def test_conservative_dpo_is_least_where_its_share_of_exchanged_pairs_says():
    """With e the best h has sigmoid(beta h) = 1 - e; without, there is no best."""
    h = torch.linspace(0, 200, 100_001, dtype=torch.float64)
    best = h[sigmoid_loss(h, 0.1, 0.2).argmin()]
    assert torch.sigmoid(0.1 * best).item() == pytest.approx(0.8, abs=1e-4)
    assert sigmoid_loss(h, 0.1).argmin() == len(h) - 1
    assert h[ipo_loss(h, 0.1).argmin()].item() == pytest.approx(5.0)
    assert h[hinge_loss(h, 0.1) == 0].min().item() == pytest.approx(10.0)


def test_far_from_the_reference_nothing_overflows():
    h = t(-1e5, 1e5).requires_grad_()
    loss = sigmoid_loss(h, 1.0)
    (grad,) = torch.autograd.grad(loss.sum(), h)
    assert loss.tolist() == [1e5, 0.0] and grad.tolist() == [-1.0, 0.0]
