"""How far the trainer disagrees with itself: the same tokens scored in two layouts of micro-batches.

Floating-point sums depend on how a batch is cut and packed, so no engine can agree with the trainer better than the
trainer agrees with itself. This floor stands beside the mismatch between the two: only what exceeds it is the engine's.
The weights are the same for both scores, and one of them is that of the training forward itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asyncrl.rollouts.types import TrainSample
from asyncrl.training.packing import PackedBatch

Score = Callable[[Sequence[TrainSample]], tuple[PackedBatch, Tensor]]


@torch.no_grad()
def score_in_halves(samples: Sequence[TrainSample], score: Score) -> list[Tensor]:
    """Log-probs of each of ``samples`` that has tokens, from two micro-batches that hold every second one.

    ``score`` packs samples, possibly none, and gives their log-probs. It is called twice whatever the samples are, so
    that the ranks' collectives match. Call this before the training forward: an FSDP2 root that is not followed by a
    backward stays gathered, and would miss the optimizer's update.
    """
    kept = [s for s in samples if len(s.token_ids)]
    even, odd = (_by_sample(*score(half)) for half in (kept[::2], kept[1::2]))
    return [(odd if i % 2 else even)[i // 2] for i in range(len(kept))]


def noise_floor(batch: PackedBatch, logp_M: Tensor, again: Sequence[Tensor]) -> Tensor:
    """Compares the scores of ``batch``'s samples with ``again``, those of :func:`score_in_halves`.

    Returns float64 (3,): sum of absolute differences in nat, their number, the largest one.
    """
    gaps = [(a - b).abs() for a, b in zip(_by_sample(batch, logp_M), again, strict=True)]
    gap = torch.cat([logp_M.new_zeros(1), *gaps]).double()
    return torch.stack([gap.sum(), gap.new_tensor(len(gap) - 1), gap.amax()])


def _by_sample(batch: PackedBatch, logp_M: Tensor) -> list[Tensor]:
    """The log-probs of each sample, in the order in which the samples were given to ``pack``."""
    if not batch.tokens:
        return []
    pieces = dict(zip(batch.order, logp_M.split(batch.mask.lengths().tolist()), strict=True))
    return [pieces[i] for i in range(len(pieces))]
