"""Losses of preference pairs, from the log-probs of both answers under the policy and under its reference.

Of a pair with prompt x, chosen answer c and rejected answer r

    reward(y) = beta * log(pi(y | x) / ref(y | x))        the implicit reward (DPO, equation 5, up to a term in x)
    h         = log(pi(c | x) / ref(c | x)) - log(pi(r | x) / ref(r | x))

=======  ===========================================================================================================
sigmoid  ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``. DPO: Rafailov et al. 2023 (arXiv 2305.18290,
         equation 7); e, a share of exchanged pairs, makes it conservative (Mitchell 2023, a note with DPO's code)
ipo      ``(h - 1 / (2 beta))^2``. Azar et al. 2023 (arXiv 2310.12036)
hinge    ``max(0, 1 - beta h)``. SLiC's hinge on the same h: RSO, Liu et al. 2023 (arXiv 2309.06657)
=======  ===========================================================================================================

With ``length_normalised`` each side's log-ratio is divided by its number of learnt tokens (Tulu 3, Lambert et al. 2024,
arXiv 2411.15124).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.config.schema import DpoConfig


def sigmoid_loss(h_P: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(P,) in nat; log 2 at h = 0."""
    loss_P = -(1.0 - label_smoothing) * F.logsigmoid(beta * h_P)
    return loss_P - label_smoothing * F.logsigmoid(-beta * h_P) if label_smoothing else loss_P


def ipo_loss(h_P: Tensor, beta: float) -> Tensor:
    """(P,); zero at h = 1 / (2 beta)."""
    return (h_P - 0.5 / beta).square()


def hinge_loss(h_P: Tensor, beta: float) -> Tensor:
    """(P,); zero from h = 1 / beta on."""
    return F.relu(1.0 - beta * h_P)


def log_ratios(policy_P2: Tensor, reference_P2: Tensor, tokens_P2: Tensor, settings: DpoConfig) -> Tensor:
    """(P, 2): log pi/ref of the chosen and of the rejected answer, over its length if that is wanted."""
    ratio_P2 = policy_P2 - reference_P2
    return ratio_P2 / tokens_P2 if settings.length_normalised else ratio_P2


def preference_loss(
    policy_P2: Tensor, reference_P2: Tensor, tokens_P2: Tensor, settings: DpoConfig
) -> tuple[Tensor, Tensor]:
    """(loss of each pair (P,), implicit rewards (P, 2) without a graph).

    ``policy_P2``, ``reference_P2``: log-probs of the chosen (column 0) and the rejected answer, sums over their learnt
    tokens, of which there are ``tokens_P2``. Only ``policy_P2`` has a gradient.
    """
    ratio_P2 = log_ratios(policy_P2, reference_P2.detach(), tokens_P2, settings)
    h_P = ratio_P2[:, 0] - ratio_P2[:, 1]
    if settings.loss == "sigmoid":
        loss_P = sigmoid_loss(h_P, settings.beta, settings.label_smoothing)
    else:
        loss_P = {"ipo": ipo_loss, "hinge": hinge_loss}[settings.loss](h_P, settings.beta)
    if settings.sft_weight:
        loss_P = loss_P - settings.sft_weight * policy_P2[:, 0] / tokens_P2[:, 0]
    return loss_P, settings.beta * ratio_P2.detach()


def ranked_rightly(reward_P2: Tensor) -> Tensor:
    """(P,): 1 where the chosen answer has more, 0 where it has less, one half where both have the same.

    So its mean is the chance level, one half, before anything is learnt.
    """
    return (torch.sign(reward_P2[:, 0] - reward_P2[:, 1]) + 1.0) / 2.0
