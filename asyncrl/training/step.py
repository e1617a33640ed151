"""One optimizer step of GRPO on packed micro-batches.

Invariants:

- every rank runs the same number of micro-batches (checked before the first collective of the step); an empty one
  still runs forward and backward on a dummy whose mask is zero;
- one denominator, added over all ranks before backward, from the masks that also make the numerators;
- a step with a non-finite loss or gradient, or with nothing to train, changes no weight on any rank, is counted
  with its reason, and still makes a new version;
- ``before_update`` returns before any weight changes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.rollouts.types import TrainSample
from asyncrl.training import checkpoint
from asyncrl.training.errors import BatchError, ModelError
from asyncrl.training.exact import exact
from asyncrl.training.mesh import Mesh
from asyncrl.training.metrics import StepReport, StepSums
from asyncrl.training.model import DTYPES, Policy
from asyncrl.training.noise import noise_floor, score_in_halves
from asyncrl.training.objective import batch_loss
from asyncrl.training.optim import (
    build_optimizer,
    clip_factor,
    learning_rate,
    local_square_norm,
    scale_gradients,
    set_learning_rate,
)
from asyncrl.training.packing import PackedBatch, pack
from asyncrl.training.sharding import distribute, sum_gradients


class Trainer:
    """The policy of one rank with its optimizer. ``version`` counts consumed batches, skipped ones included."""

    def __init__(self, cfg: Config, policy: Policy, mesh: Mesh) -> None:
        """Raises :class:`ModelError` if something would be trained that ``named_parameters_hf`` does not list."""
        self.cfg, self.mesh, self.policy = cfg, mesh, policy
        self.compute = DTYPES[cfg.model.compute_dtype]
        trainer = cfg.trainer
        policy.vocab_chunk = trainer.vocab_chunk
        self.sharded = distribute(policy, mesh, self.compute, trainer.shard, trainer.activation_checkpointing)
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        sent = {id(p) for _, p in self.named_parameters_hf()}
        unsent = [name for name, p in trained.items() if id(p) not in sent]
        if unsent:
            raise ModelError(f"{len(unsent)} trained parameters would never reach an engine, e.g. {unsent[0]}")
        self.optimizer = build_optimizer(self.parameters, cfg.optim)
        self.version = 0
        self.skipped: Counter[str] = Counter()

    def named_parameters_hf(self) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, tensor or DTensor) in model order; a tied weight appears once."""
        return list(self.policy.lm.named_parameters())

    def save(self, root: str | Path, keep: int = 0) -> Path:
        """Collective. Writes ``root/step_<version>``, keeps the ``keep`` newest; see :func:`checkpoint.save`."""
        return checkpoint.save(self, Path(root), keep)

    def load(self, folder: str | Path) -> None:
        """Collective. Restores one checkpoint; see :func:`checkpoint.load`."""
        checkpoint.load(self, Path(folder))

    def load_latest(self, root: str | Path) -> Path | None:
        """Collective. Restores the newest checkpoint in ``root`` and returns its folder; None if there is none."""
        folder = checkpoint.latest(Path(root))
        self.mesh.agree(-1 if folder is None else int(folder.name.rpartition("_")[2]), "the newest checkpoint")
        if folder is not None:
            self.load(folder)
        return folder

    def step(
        self, micro_batches: Sequence[Sequence[TrainSample]], before_update: Callable[[], Any] = lambda: None
    ) -> StepReport:
        """Trains this rank's ``micro_batches`` (each possibly empty) together with all other ranks.

        ``before_update`` is called once, just before weights change; not on a skipped step. Raises
        :class:`BatchError` for samples that cannot be trained or ranks with different numbers of micro-batches.
        """
        clock = [time.perf_counter()]
        batches = self._pack(micro_batches)
        tokens, samples = self._totals(batches)
        sums = StepSums(self.mesh.device)
        if tokens:
            denominator = tokens if self.cfg.algorithm.aggregation == "token_mean" else samples
            with exact(self.compute):
                again = score_in_halves(micro_batches[0], self._score_otherwise) if self._measures_noise() else None
                for batch in batches:
                    logp_M = self._forward_backward(batch, denominator, sums)
                    if again is not None and batch is batches[0]:
                        sums.add_floor(noise_floor(batch, logp_M, again))
            if self.mesh.world_size > 1 and not self.sharded:
                sum_gradients(self.parameters, self.mesh)
        report = sums.reduce(self.mesh, local_square_norm(self.parameters), self.sharded, samples)
        clock.append(time.perf_counter())
        clock.append(self.finish(report, tokens, samples, before_update))
        clock.append(time.perf_counter())
        report.micro_batches = len(batches)
        report.seconds, report.forward_backward_s = clock[-1] - clock[0], clock[1] - clock[0]
        report.gather_wait_s, report.optimizer_s = clock[-2] - clock[1], clock[-1] - clock[-2]
        return report

    def finish(
        self, report: StepReport, tokens: int, samples: int, before_update: Callable[[], Any] = lambda: None
    ) -> float:
        """The end of every step, once ``report`` knows loss and gradient norm: update or skip, a new version.

        Returns the time (``perf_counter``) at which ``before_update`` was back.
        """
        report.lr = learning_rate(self.version, self.cfg.trainer.steps, self.cfg.optim)
        report.skipped = reason_to_skip(tokens, report.loss, report.grad_norm)
        if report.skipped is None:
            before_update()
        waited_until = time.perf_counter()
        if report.skipped is None:
            self.update(report)
        else:
            self.skipped[report.skipped] += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        report.version, report.tokens, report.samples = self.version, tokens, samples
        return waited_until

    def update(self, report: StepReport) -> None:
        """Clips, sets the learning rate and steps the optimizer."""
        scale_gradients(self.parameters, clip_factor(report.grad_norm, self.cfg.optim.clip_norm))
        set_learning_rate(self.optimizer, report.lr)
        self.optimizer.step()

    def _measures_noise(self) -> bool:
        every = self.cfg.report.noise_floor_every
        return every > 0 and self.version % every == 0

    def _score_otherwise(self, samples: Sequence[TrainSample]) -> tuple[PackedBatch, Tensor]:
        """``samples`` packed as plain documents, where training may share prompts, and their log-probs."""
        packed = pack(samples, self.version, self.mesh.device, self._loss_dtype, share=False)
        return packed, self.policy(packed, self.cfg.sampling.temperature)[0]

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def _pack(self, micro_batches: Sequence[Sequence[TrainSample]]) -> list[PackedBatch]:
        # Variable-length flash attention knows plain documents only.
        share = not (self.mesh.device.type == "cuda" and self.compute == torch.bfloat16)
        return [pack(m, self.version, self.mesh.device, self._loss_dtype, share) for m in micro_batches]

    def _totals(self, batches: list[PackedBatch]) -> tuple[int, int]:
        """Trained tokens and samples of all ranks; checks that ranks agree on the number of micro-batches."""
        mine = [len(batches), sum(b.tokens for b in batches), sum(b.samples for b in batches)]
        rows = self.mesh.gather_rows(torch.tensor(mine))
        if len(set(rows[:, 0].tolist())) > 1:
            raise BatchError(f"ranks have different numbers of micro-batches: {rows[:, 0].tolist()}")
        return int(rows[:, 1].sum()), int(rows[:, 2].sum())

    def _forward_backward(self, batch: PackedBatch, denominator: int, sums: StepSums) -> Tensor:
        """Returns the log-probs (M,), without their graph."""
        loss, logp_M, entropy_M, metrics = batch_loss(self.policy, batch, self.cfg, denominator)
        loss.backward()
        sums.add(batch, loss, logp_M, entropy_M, metrics)
        return logp_M.detach()


def reason_to_skip(tokens: int, loss: float, norm: float) -> str | None:
    if tokens == 0:
        return "no_tokens"
    if not math.isfinite(loss):
        return "loss_not_finite"
    if not math.isfinite(norm):
        return "gradient_not_finite"
    return None
