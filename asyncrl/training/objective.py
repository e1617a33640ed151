"""The loss of one micro-batch of GRPO, by either head.

``algorithm.loss_head`` chooses. Both compute the same loss and gradients; :mod:`kernels.policy_loss` says what its one
product less costs. It takes losses that are a sum over tokens of a function of the token's own log-prob and entropy,
with everything else known before forward: clipped surrogates under both aggregations are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.loss import clipped_surrogate, grpo_loss, ratio_metrics
from asyncrl.config.schema import Config
from asyncrl.training.model import Objective, Policy
from asyncrl.training.packing import PackedBatch
from kernels.policy_loss import by_autograd


def batch_loss(
    policy: Policy, batch: PackedBatch, cfg: Config, denominator: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(loss, logp_M, entropy_M, metrics): the loss is this micro-batch's share, already divided."""
    algorithm, temperature = cfg.algorithm, cfg.sampling.temperature
    known = batch.behaviour_M, batch.advantage_M, batch.mask
    clips = algorithm.clip_low, algorithm.clip_high
    if algorithm.loss_head == "logprob":
        logp_M, entropy_M = policy(batch, temperature)
        numerator, metrics = grpo_loss(logp_M, *known, *clips, algorithm.aggregation)
        return numerator / denominator, logp_M, entropy_M, metrics
    objective = grpo_objective(batch, cfg, denominator)
    loss, logp_M, entropy_M = policy(batch, temperature, objective)
    return loss, logp_M, entropy_M, ratio_metrics(logp_M, *known, *clips)


def grpo_objective(batch: PackedBatch, cfg: Config, denominator: int) -> Objective:
    """:func:`asyncrl.algorithms.loss.grpo_loss` over ``denominator`` as a loss of single tokens."""
    algorithm, mask = cfg.algorithm, batch.mask
    divisor_M = mask.divisors(algorithm.aggregation)
    scale_M = torch.full_like(batch.advantage_M, 1.0 / denominator)
    if divisor_M is not None:
        scale_M /= divisor_M

    def loss_of(
        logp: Tensor, _: Tensor, behaviour: Tensor, advantage: Tensor, scale: Tensor, trained: Tensor
    ) -> Tensor:
        logp = torch.where(trained, logp, 0.0)
        return -scale * clipped_surrogate(logp, behaviour, advantage, algorithm.clip_low, algorithm.clip_high)

    # A masked token has ratio one and advantage zero, whatever stands there.
    extras = mask.keep(batch.behaviour_M), mask.keep(batch.advantage_M), scale_M, mask.trained_M
    return Objective(by_autograd(loss_of), extras, cfg.trainer.loss_chunk_bytes)
