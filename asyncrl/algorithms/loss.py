"""GRPO's clipped surrogate and its aggregation.

A loss returns ``(sum over its mask, metrics)``. One :class:`LossMask` owns both the sum of the numerator and the
count of the denominator, so that the two cannot disagree; the count is added over all micro-batches and ranks
before backward. Masked positions are removed with ``where`` before anything is computed from them: a NaN there
reaches neither the loss nor a gradient.

The ratio is trainer log-prob over the engine's (behaviour) log-prob, both at the sampling temperature. The clip
acts on this ratio, so that it is active even with one optimizer step a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True)
class LossMask:
    """Which predicted tokens are trained, and to which sample each belongs.

    ``trained_M`` bool; ``sample_M`` int64, ids 0..samples-1 local to the micro-batch; ``samples`` their number.
    """

    trained_M: Tensor
    sample_M: Tensor
    samples: int

    def lengths(self) -> Tensor:
        """Trained tokens of each sample, (samples,), int64."""
        zeros = torch.zeros(self.samples, dtype=torch.int64, device=self.trained_M.device)
        return zeros.index_add(0, self.sample_M, self.trained_M.to(torch.int64))

    def count(self, aggregation: Aggregation) -> int:
        """This micro-batch's share of the denominator: trained tokens, or samples with a trained token."""
        _check(aggregation)
        if aggregation == "token_mean":
            return int(self.trained_M.sum())
        return int((self.lengths() > 0).sum())

    def keep(self, value_M: Tensor) -> Tensor:
        """``value_M`` with zeros at masked positions, by ``where``."""
        return torch.where(self.trained_M, value_M, torch.zeros((), dtype=value_M.dtype, device=value_M.device))

    def sum(self, value_M: Tensor) -> Tensor:
        return self.keep(value_M).sum()

    def numerator(self, value_M: Tensor, aggregation: Aggregation) -> Tensor:
        """``sum_t value`` for token_mean, ``sum_i (1/L_i) sum_t value`` for sequence_mean. Scalar with a graph."""
        divisor_M = self.divisors(aggregation)
        kept = self.keep(value_M)
        return (kept if divisor_M is None else kept / divisor_M).sum()

    def divisors(self, aggregation: Aggregation) -> Tensor | None:
        """What each token's value is divided by in :meth:`numerator`, (M,) int64: L_i; None if by one."""
        _check(aggregation)
        return None if aggregation == "token_mean" else self.lengths().clamp(min=1)[self.sample_M]


def _check(aggregation: str) -> None:
    if aggregation not in ("token_mean", "sequence_mean"):
        raise ValueError(f"unknown aggregation {aggregation!r}; choose token_mean or sequence_mean")


def clipped_surrogate(
    logp_M: Tensor, behaviour_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` of each token (clip-higher: DAPO, arXiv 2503.14476)."""
    ratio_M = (logp_M - behaviour_M).exp()
    clipped_M = ratio_M.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)


@torch.no_grad()
def ratio_metrics(
    logp_M: Tensor, behaviour_M: Tensor, advantage_M: Tensor, mask: LossMask, clip_low: float, clip_high: float
) -> dict[str, Tensor]:
    """Sums over the mask (``ratio_max`` a maximum), without a graph:

    - ``clip_low`` / ``clip_high``: tokens whose gradient is cut by that side of the clip;
    - ``ratio``, ``ratio_square``, ``ratio_max``;
    - ``kl``: ``r - 1 - log r``, whose mean under the behaviour policy is KL(mu || pi).
    """
    log_ratio_M = mask.keep(logp_M) - mask.keep(behaviour_M)
    ratio_M, advantage_M = log_ratio_M.exp(), mask.keep(advantage_M)
    return {
        "clip_low": mask.sum(((ratio_M < 1.0 - clip_low) & (advantage_M < 0)).to(ratio_M.dtype)),
        "clip_high": mask.sum(((ratio_M > 1.0 + clip_high) & (advantage_M > 0)).to(ratio_M.dtype)),
        "ratio": mask.sum(ratio_M),
        "ratio_square": mask.sum(ratio_M.square()),
        "ratio_max": mask.keep(ratio_M).amax() if len(ratio_M) else ratio_M.new_zeros(()),
        "kl": mask.sum(ratio_M - 1.0 - log_ratio_M),
    }


def grpo_loss(
    logp_M: Tensor,
    behaviour_M: Tensor,
    advantage_M: Tensor,
    mask: LossMask,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus the sum of :func:`clipped_surrogate` over the mask, and :func:`ratio_metrics`.

    Divide by the global denominator of the same masks to get the loss.
    """
    kept = mask.keep(logp_M), mask.keep(behaviour_M), mask.keep(advantage_M)
    surrogate_M = clipped_surrogate(*kept, clip_low, clip_high)
    metrics = ratio_metrics(*kept, mask, clip_low, clip_high)
    return -mask.numerator(surrogate_M, aggregation), metrics
