"""What a step measured: local sums of every rank, added in one exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.training.mesh import Mesh
from asyncrl.training.packing import PackedBatch

AGES = 8  # mismatch is kept for ages 0..6 and "7 or more" steps, then samples made under several versions
SUMS = ("loss", "entropy", "clip_low", "clip_high", "ratio", "kl")


@dataclass
class StepReport:
    """One optimizer step, the same on every rank. Means are over the trained tokens of all ranks."""

    version: int  # after the step
    lr: float
    loss: float = 0.0
    grad_norm: float = 0.0  # before clipping
    clip_low_share: float = 0.0
    clip_high_share: float = 0.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    approx_kl: float = 0.0
    entropy: float = 0.0  # nat, at the sampling temperature
    mismatch: float | None = None  # mean |trainer - engine log-prob|, age 0 and one version; None: no such token
    mismatch_by_age: dict[str, float] = field(default_factory=dict)  # "1".."6", "7+", "mixed" versions
    tokens: int = 0
    samples: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    skipped: str | None = None  # the reason; the weights did not change


class StepSums:
    """Sums over this rank's micro-batches, kept on the device until :meth:`reduce`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS) + 2 * (AGES + 1), dtype=torch.float64, device=device)
        self.ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self, batch: PackedBatch, loss: Tensor, logp_M: Tensor, entropy_M: Tensor, metrics: dict[str, Tensor]
    ) -> None:
        """Adds one micro-batch: its share of the loss, its log-probs and the loss function's sums."""
        found = {"loss": loss.detach(), "entropy": batch.mask.sum(entropy_M), **metrics}
        scalars = torch.stack([found[name].double() for name in SUMS])
        gap_M = batch.mask.keep((logp_M.detach() - batch.behaviour_M).abs()).double()
        slot_M = torch.where(batch.age_M < 0, AGES, batch.age_M.clamp(max=AGES - 1))
        zeros = torch.zeros(AGES + 1, dtype=torch.float64, device=gap_M.device)
        gaps = zeros.index_add(0, slot_M, gap_M)
        counts = zeros.index_add(0, slot_M, batch.mask.trained_M.double())
        self.sums += torch.cat([scalars, gaps, counts])
        self.ratio_max = torch.maximum(self.ratio_max, metrics["ratio_max"].double())

    def reduce(self, mesh: Mesh, square_norm: Tensor, square_norm_is_local: bool) -> tuple[StepReport, float]:
        """Adds all ranks' sums. Returns a report without counts, and the gradient norm."""
        row = torch.cat([self.sums, self.ratio_max[None], square_norm.to(self.sums)[None]])
        rows = mesh.gather_rows(row)
        total = rows[:, : len(self.sums)].sum(0)
        square = rows[:, -1].sum() if square_norm_is_local else rows[0, -1]
        values = dict(zip(SUMS, total[: len(SUMS)].tolist(), strict=True))
        gaps, counts = total[len(SUMS) :].split(AGES + 1)
        tokens = max(1.0, float(counts.sum()))
        labels = [str(a) for a in range(AGES - 1)] + [f"{AGES - 1}+", "mixed"]
        by_age = {k: float(g / c) for k, g, c in zip(labels, gaps, counts, strict=True) if c > 0}
        report = StepReport(
            version=0,
            lr=0.0,
            loss=values["loss"],
            grad_norm=float(square.sqrt()),
            clip_low_share=values["clip_low"] / tokens,
            clip_high_share=values["clip_high"] / tokens,
            ratio_mean=values["ratio"] / tokens,
            ratio_max=float(rows[:, -2].max()),
            approx_kl=values["kl"] / tokens,
            entropy=values["entropy"] / tokens,
            mismatch=by_age.pop("0", None),
            mismatch_by_age=by_age,
            tokens=int(counts.sum()),
        )
        return report, report.grad_norm
