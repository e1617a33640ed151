"""What a step measured: local sums of every rank, added in one exchange."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.training.mesh import Mesh
from asyncrl.training.packing import PackedBatch

AGES = 8  # mismatch is kept for ages 0..6 and "7 or more" steps, then samples made under several versions
TOKEN_SUMS = ("loss", "entropy", "clip_low", "clip_high", "ratio", "ratio_square", "kl", "advantage_abs")
SAMPLE_SUMS = ("ratio_sequence", "ratio_geometric")
SUMS = (*TOKEN_SUMS, *SAMPLE_SUMS, "padded", "positions")
MAXIMA = ("ratio_max", "mismatch_max", "floor_max")


@dataclass
class StepReport:
    """One optimizer step, the same on every rank but for the times. Means are over the trained tokens of all ranks."""

    version: int = 0  # after the step
    lr: float = 0.0
    loss: float = 0.0
    grad_norm: float = 0.0  # before clipping
    clip_low_share: float = 0.0
    clip_high_share: float = 0.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    ratio_sequence_mean: float = 1.0  # product over a sample, mean over samples
    ratio_geometric_mean: float = 1.0  # geometric mean over a sample, mean over samples
    ess_share: float = 1.0  # effective sample size of the token ratios over their number
    approx_kl: float = 0.0  # k3 estimate of KL(mu || pi), nat
    entropy: float = 0.0  # nat, at the sampling temperature
    advantage_abs_mean: float = 0.0
    mismatch: float | None = None  # mean |trainer - engine log-prob|, age 0 and one version; None: no such token
    mismatch_max: float | None = None
    mismatch_tokens: int = 0
    mismatch_by_age: dict[str, float] = field(default_factory=dict)  # "1".."6", "7+", "mixed" versions
    floor: float | None = None  # mean |trainer - trainer log-prob| between two layouts; None: not measured
    floor_max: float | None = None
    floor_tokens: int = 0
    padding_share: float = 0.0  # attention positions that hold no token
    packing_efficiency: float | None = None  # tokens over what the micro-batches hold; None: not this trainer's
    tokens: int = 0
    samples: int = 0
    micro_batches: int = 0
    seconds: float = 0.0
    forward_backward_s: float = 0.0
    gather_wait_s: float = 0.0
    optimizer_s: float = 0.0
    skipped: str | None = None  # the reason; the weights did not change
    clip_scale: float | None = None  # factor of the loss by delayed clipping; None: another rule
    guarded_units: int | None = None
    partial_units: int | None = None  # units that kept their weights while others stepped; None: not possible
    partial_total: int | None = None
    figures: dict[str, float] = field(default_factory=dict)  # means of the trainer's own, by declared key

    def metrics(self) -> dict[str, float | str]:
        """The report under the keys of ``asyncrl.report.keys``; what was not measured is absent."""
        found: dict[str, float | str | None] = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/lr": self.lr,
            "train/entropy": self.entropy,
            "train/advantage_abs_mean": self.advantage_abs_mean,
            "train/ratio_mean": self.ratio_mean,
            "train/ratio_max": self.ratio_max,
            "train/ratio_sequence_mean": self.ratio_sequence_mean,
            "train/ratio_geometric_mean": self.ratio_geometric_mean,
            "train/ess_share": self.ess_share,
            "train/clip_low_share": self.clip_low_share,
            "train/clip_high_share": self.clip_high_share,
            "train/kl_behaviour": self.approx_kl,
            "train/tokens": self.tokens,
            "train/samples": self.samples,
            "train/micro_batches": self.micro_batches,
            "train/padding_share": self.padding_share,
            "train/packing_efficiency": self.packing_efficiency,
            "train/skipped": self.skipped,
            "train/clip_scale": self.clip_scale,
            "train/guarded_units": self.guarded_units,
            "train/partial_units": self.partial_units,
            "train/partial_total": self.partial_total,
            "mismatch/abs_mean": self.mismatch,
            "mismatch/abs_max": self.mismatch_max,
            "mismatch/tokens": self.mismatch_tokens,
            **{f"mismatch/age/{age}": mean for age, mean in self.mismatch_by_age.items()},
            "mismatch/floor_abs_mean": self.floor,
            "mismatch/floor_abs_max": self.floor_max,
            "mismatch/floor_tokens": self.floor_tokens or None,
            "time/train_s": self.seconds,
            "time/forward_backward_s": self.forward_backward_s,
            "time/gather_wait_s": self.gather_wait_s,
            "time/optimizer_s": self.optimizer_s,
            **self.figures,
        }
        return {key: value for key, value in found.items() if value is not None}


class StepSums:
    """Sums over this rank's micro-batches, kept on the device until :meth:`reduce`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(SUMS) + 2 * (AGES + 1), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        self.floor = torch.zeros(2, dtype=torch.float64, device=device)  # sum and number of tokens

    def add_floor(self, found: Tensor) -> None:
        """Adds what :func:`asyncrl.training.noise.noise_floor` found."""
        self.floor += found[:2]
        self.maxima[-1] = torch.maximum(self.maxima[-1], found[2])

    @torch.no_grad()
    def add(
        self, batch: PackedBatch, loss: Tensor, logp_M: Tensor, entropy_M: Tensor, metrics: dict[str, Tensor]
    ) -> None:
        """Adds one micro-batch: its share of the loss, its log-probs and the loss function's sums."""
        mask = batch.mask
        found = {
            "loss": loss.detach(),
            "entropy": mask.sum(entropy_M),
            "advantage_abs": mask.sum(batch.advantage_M.abs()),
            **_sample_ratios(batch, logp_M.detach()),
            **metrics,
        }
        padded, positions = batch.documents.padding()
        scalars = torch.stack([found[name].double() for name in (*TOKEN_SUMS, *SAMPLE_SUMS)])
        sizes = torch.tensor([padded, positions], dtype=torch.float64, device=scalars.device)
        gap_M = mask.keep((logp_M.detach() - batch.behaviour_M).abs()).double()
        slot_M = torch.where(batch.age_M < 0, AGES, batch.age_M.clamp(max=AGES - 1))
        zeros = torch.zeros(AGES + 1, dtype=torch.float64, device=gap_M.device)
        gaps = zeros.index_add(0, slot_M, gap_M)
        counts = zeros.index_add(0, slot_M, mask.trained_M.double())
        self.sums += torch.cat([scalars, sizes, gaps, counts])
        current = torch.where(batch.age_M == 0, gap_M, 0.0).amax()
        self.maxima[:2] = torch.maximum(self.maxima[:2], torch.stack([metrics["ratio_max"].double(), current]))

    def reduce(self, mesh: Mesh, square_norm: Tensor, samples: int) -> StepReport:
        """Adds all ranks' sums in one exchange; ``samples`` is their global number.

        ``square_norm`` is this rank's share of the gradient's square norm.
        """
        rows = mesh.gather_rows(torch.cat([self.sums, self.floor, self.maxima, square_norm.to(self.sums)[None]]))
        summed = len(self.sums) + len(self.floor)
        total, maxima = rows[:: mesh.sizes.tp, :summed].sum(0), rows[:, summed:-1].amax(0)
        square = rows[:, -1].sum()
        value = dict(zip(SUMS, total[: len(SUMS)].tolist(), strict=True))
        gaps, counts, floor = total[len(SUMS) :].split([AGES + 1, AGES + 1, 2])
        labels = [str(age) for age in range(AGES - 1)] + [f"{AGES - 1}+", "mixed"]
        by_age = {k: float(g / c) for k, g, c in zip(labels, gaps, counts, strict=True) if c > 0}
        tokens = max(1.0, float(counts.sum()))
        return StepReport(
            loss=value["loss"],
            grad_norm=float(square.sqrt()),
            clip_low_share=value["clip_low"] / tokens,
            clip_high_share=value["clip_high"] / tokens,
            ratio_mean=value["ratio"] / tokens,
            ratio_max=float(maxima[0]),
            ratio_sequence_mean=value["ratio_sequence"] / max(1, samples),
            ratio_geometric_mean=value["ratio_geometric"] / max(1, samples),
            ess_share=value["ratio"] ** 2 / (tokens * value["ratio_square"]) if value["ratio_square"] else 1.0,
            approx_kl=value["kl"] / tokens,
            entropy=value["entropy"] / tokens,
            advantage_abs_mean=value["advantage_abs"] / tokens,
            mismatch=by_age.pop("0", None),
            mismatch_max=float(maxima[1]) if counts[0] else None,
            mismatch_tokens=int(counts[0]),
            mismatch_by_age=by_age,
            floor=float(floor[0] / floor[1]) if floor[1] else None,
            floor_max=float(maxima[2]) if floor[1] else None,
            floor_tokens=int(floor[1]),
            padding_share=value["padded"] / max(1.0, value["positions"]),
        )


def _sample_ratios(batch: PackedBatch, logp_M: Tensor) -> dict[str, Tensor]:
    """Sums over samples of the product and of the geometric mean of the token ratios."""
    mask = batch.mask
    log_ratio_M = mask.keep(logp_M - batch.behaviour_M).double()
    zeros = torch.zeros(mask.samples, dtype=torch.float64, device=log_ratio_M.device)
    total, lengths = zeros.index_add(0, mask.sample_M, log_ratio_M), mask.lengths()
    there = lengths > 0
    return {
        "ratio_sequence": torch.where(there, total.exp(), 0.0).sum(),
        "ratio_geometric": torch.where(there, (total / lengths.clamp(min=1)).exp(), 0.0).sum(),
    }
