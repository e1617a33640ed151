"""From the losses of one step to new weights, in the same words for an optimizer after and in the backward pass.

===============  ==================================================  =============================================
                 after the backward pass                             in it (``optim.in_backward``)
===============  ==================================================  =============================================
refused by       loss, ratio, KL and the gradient's norm             loss, ratio and KL of all ranks, known before the
                                                                     last micro-batch's backward (with a folding
                                                                     accumulation before each one)
weights change   in :meth:`Update.close`                             in the last backward
``before_update``  before ``optimizer.step``                         before the last backward
===============  ==================================================  =============================================

What can still go wrong in the backward pass: a gradient that is not finite is known only when its unit is complete.
That unit keeps its weights and its state; others may have stepped. Such a partial step is counted, and more than
``optim.max_partial_steps`` of them end the run. With a folding accumulation a batch that is refused at its second or
later micro-batch leaves gradients in the optimizer's state (no weight changes); it counts as a partial step too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.config.schema import OptimConfig
from asyncrl.training.errors import PartialSteps
from asyncrl.training.in_backward import UnitOptimizer
from asyncrl.training.metrics import StepReport
from asyncrl.training.optim import (
    clip_factor,
    learning_rate,
    local_square_norm,
    replicas,
    scale_gradients,
    set_learning_rate,
)
from asyncrl.training.sharding import sum_gradients

if TYPE_CHECKING:
    from asyncrl.training.step import Trainer

Measure = Callable[[Tensor], StepReport]  # this rank's share of the square norm -> all ranks' report; collective


class Update:
    """One step: ``backward`` for each micro-batch, then ``close``. ``measure`` reports what was computed so far."""

    def __init__(
        self,
        trainer: Trainer,
        tokens: int,
        samples: int,
        measure: Measure,
        before_update: Callable[[], Any] = lambda: None,
    ) -> None:
        """Raises :class:`PartialSteps` on all ranks if too many steps before were partial."""
        check_budget(trainer.partial_steps, trainer.cfg.optim)
        self.trainer, self.tokens, self.samples = trainer, tokens, samples
        self.measure, self.before_update = measure, before_update
        units = trainer.optimizer if isinstance(trainer.optimizer, UnitOptimizer) else None
        self.units = units
        self.hooked = units if units is not None and units.in_backward else None
        self.scale = units.loss_scale if units else 1.0
        self.report: StepReport | None = None
        self.waited_s = 0.0

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward of one micro-batch's share of the loss; ``last`` if no other comes."""
        if self.hooked is not None and (last or self.hooked.fold):
            self._admit(self.hooked, last)
        (loss if self.scale == 1.0 else loss * self.scale).backward()

    def close(self) -> StepReport:
        """Ends the step: new weights or a reason why not, a new version, counters."""
        trainer = self.trainer
        report = self._step_after() if self.hooked is None else self._close_units(self.hooked)
        if report.skipped is not None:
            trainer.skipped[report.skipped] += 1
        trainer.optimizer.zero_grad(set_to_none=True)
        trainer.version += 1
        report.version, report.tokens, report.samples = trainer.version, self.tokens, self.samples
        return report

    def _admit(self, units: UnitOptimizer, last: bool) -> None:
        """Lets the coming backward use its gradients if every rank's losses so far are acceptable."""
        if self.report is not None and self.report.skipped:
            return  # refused at an earlier micro-batch
        self.report = self.measure(torch.zeros((), dtype=torch.float64))
        self._judge(self.report)
        if self.report.skipped:
            units.discard()
        elif last:
            self._prepare(self.report)
            units.arm()

    def _judge(self, report: StepReport) -> None:
        report.lr = learning_rate(self.trainer.version, self.trainer.cfg.trainer.steps, self.trainer.cfg.optim)
        report.skipped = reason_to_skip(self.tokens, report, self.trainer.cfg.optim)

    def _prepare(self, report: StepReport) -> None:
        """Whatever must happen before the first weight changes."""
        set_learning_rate(self.trainer.optimizer, report.lr)
        began = time.perf_counter()
        self.before_update()
        self.waited_s = time.perf_counter() - began

    def _close_units(self, units: UnitOptimizer) -> StepReport:
        report = self.report
        if report is None:  # there was nothing to train, and no backward
            report = self.measure(torch.zeros((), dtype=torch.float64))
            self._judge(report)
            units.discard()
        units.step()
        taken = units.taken
        if report.skipped is None and not taken.moved:
            report.skipped = "gradient_not_finite"
        partial = bool(taken.dropped and taken.moved) or (report.skipped is not None and taken.folded)
        self.trainer.partial_steps += partial
        report.grad_norm = taken.norm
        report.partial_units = len(taken.dropped) if taken.moved else 0
        self._describe_clip(report)
        report.partial_total = self.trainer.partial_steps
        return report

    def _step_after(self) -> StepReport:
        trainer, world = self.trainer, self.trainer.mesh.world_size
        if self.tokens and world > 1 and not trainer.sharded:
            sum_gradients(trainer.parameters, trainer.mesh)
        trained = [p for p in trainer.parameters if p.grad is not None]
        copies = [replicas(p, world) for p in trained]
        square = local_square_norm([p.grad for p in trained if p.grad is not None], copies)
        report = self.measure(square / self.scale**2)
        self._judge(report)
        if report.skipped is None and not math.isfinite(report.grad_norm):
            report.skipped = "gradient_not_finite"
        if report.skipped is None:
            self._prepare(report)
            if not trainer.cfg.optim.delayed_clip:
                scale_gradients(trainer.parameters, clip_factor(report.grad_norm, trainer.cfg.optim.clip_norm))
            trainer.optimizer.step()
        self._describe_clip(report)
        return report

    def _describe_clip(self, report: StepReport) -> None:
        if self.units is not None and self.units.clip is not None:
            stepped = report.skipped is None
            report.clip_scale, report.guarded_units = self.scale, self.units.taken.guarded if stepped else 0


def check_budget(partial_steps: int, cfg: OptimConfig) -> None:
    """Raises :class:`PartialSteps` if more steps were partial than the run may have."""
    if partial_steps > cfg.max_partial_steps:
        raise PartialSteps(
            f"{partial_steps} steps updated only a part of the model because gradients were not finite, more than "
            f"optim.max_partial_steps={cfg.max_partial_steps}; lower optim.lr, or find the batch with "
            "optim.in_backward=false, which refuses such a step as a whole"
        )


def reason_to_skip(tokens: int, report: StepReport, cfg: OptimConfig) -> str | None:
    """Why a step with these figures must not change weights; known before the gradient is."""
    if tokens == 0:
        return "no_tokens"
    checked = {
        "loss": (abs(report.loss), cfg.max_loss),
        "ratio": (report.ratio_max, cfg.max_ratio),
        "kl": (report.approx_kl, cfg.max_kl),
    }
    for name, (value, _) in checked.items():
        if not math.isfinite(value):
            return f"{name}_not_finite"
    for name, (value, limit) in checked.items():
        if limit and value > limit:
            return f"{name}_over_limit"
    return None
