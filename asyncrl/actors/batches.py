"""From taken groups to what each trainer rank receives, and the figures that describe a batch.

The cut is made once, here: advantages, the packing plan, and the assertion that no token is staler than promised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.algorithms.advantage import ADVANTAGES
from asyncrl.config.schema import Config
from asyncrl.rollouts.cut import encode, train_samples
from asyncrl.rollouts.packing import plan_groups
from asyncrl.rollouts.slots import age_of_tokens
from asyncrl.rollouts.types import Group, Sample, TrainSample


@dataclass
class Batch:
    """Batch ``version`` trains the weights of that version into the next. ``metrics`` describe its samples."""

    version: int
    groups: list[Group]
    samples: list[TrainSample]
    metrics: dict[str, Any]


def trainable(group: Group) -> list[Sample]:
    """The samples of a group that carry a gradient: scored, and at least one token long."""
    return [s for s in group.samples if s.reward is not None and len(s.token_ids)]


def rewards_of(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """(n,) rewards of scored samples."""
    return np.array([s.reward for s in samples], dtype=np.float64)


def cut(version: int, groups: list[Group], cfg: Config) -> Batch:
    """Make batch ``version`` of ``groups``. Advantages are taken over each group's trainable samples.

    Raises ``StalenessError`` when a token is older than ``staleness.max_steps``: a defect of the slots, never of a
    user's setting.
    """
    for group in groups:
        group.samples.sort(key=lambda s: s.index)  # so that a replayed batch is the same to the last bit
    samples = train_samples(groups, _advantages(groups, cfg))
    return Batch(version, groups, samples, _describe(version, groups, samples, cfg))


def payloads(batch: Batch, ranks: int, token_budget: int, tp: int = 1) -> list[tuple[dict[str, Any], Sequence[Any]]]:
    """For each rank the header and buffers of its micro-batches; every rank has the same number of them.

    The ``tp`` neighbouring ranks that split each layer get the same ones (``parallel.tp``).
    """
    samples = batch.samples
    prompts = [len(s.prompt_ids) for s in samples]
    packing = plan_groups([len(s) for s in samples], [s.ordinal for s in samples], prompts, ranks // tp, token_budget)
    return [encode(packing, rank // tp, batch.samples, batch.version) for rank in range(ranks)]


def _advantages(groups: list[Group], cfg: Config) -> list[list[float | None]]:
    """Per group and sample; None for a sample that is not trainable."""
    chosen = [trainable(group) for group in groups]
    rewards = np.concatenate([rewards_of(row) for row in chosen])
    ordinals = [s.ordinal for row in chosen for s in row]
    settings = cfg.algorithm
    extra = {"eps": settings.advantage_eps} if settings.advantage == "group_norm" else {}
    values = dict(
        zip(
            ((s.ordinal, s.index) for row in chosen for s in row),
            ADVANTAGES[settings.advantage](rewards, ordinals, **extra).tolist(),
            strict=True,
        )
    )
    return [[values.get((s.ordinal, s.index)) for s in group.samples] for group in groups]


def _describe(version: int, groups: list[Group], samples: list[TrainSample], cfg: Config) -> dict[str, Any]:
    every = [s for group in groups for s in group.samples]
    rewards = rewards_of([s for s in every if s.reward is not None])
    within = [rewards_of(trainable(g)).std() for g in groups]
    oldest, mean_age = age_of_tokens([s.versions for s in samples], version, cfg.staleness.max_steps)
    lengths = np.array([len(s.token_ids) for s in every])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/group_std_mean": float(np.mean(within)),
        "staleness/max": oldest,
        "staleness/mean": mean_age,
        "staleness/mixed_share": float(np.mean([len(np.unique(s.versions)) > 1 for s in samples])),
        "sample/length_mean": float(lengths.mean()),
        "sample/length_max": int(lengths.max()),
        "sample/truncated_share": float(np.mean([s.finish_reason == "length" for s in every])),
        "sample/empty": int((lengths == 0).sum()),
    }
