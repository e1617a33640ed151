"""When a run ends early: the held-out metric is no longer better than it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from asyncrl.config.evaluation import LARGER_IS_BETTER, best_by
from asyncrl.config.schema import Config


class EarlyStop:
    """Counts evaluations in a row that were no better than the best before them; a checkpoint holds the count.

    All ranks see the same figures, so all stop at the same step. A figure that is not finite is no better.
    """

    def __init__(self, cfg: Config, position: Mapping[str, Any]) -> None:
        """``position``: of the checkpoint that is continued from, empty at the start of a run.

        A checkpoint that counted by another metric, or did not count, is no history: counting begins anew.
        """
        self.patience, self.metric = cfg.eval.patience, best_by(cfg)
        self.best: float | None = None
        self.step = self.waited = 0
        told = position.get("early_stop", {})
        if told.get("metric") == self.metric:
            self.best, self.step, self.waited = told["best"], told["step"], told["waited"]

    def see(self, step: int, figures: Mapping[str, float]) -> None:
        """The evaluation of version ``step``; one without the metric does not count."""
        value = figures.get(self.metric)
        if not self.patience or value is None:
            return
        sign = 1 if LARGER_IS_BETTER[self.metric] else -1
        better = math.isfinite(value) and (self.best is None or sign * value > sign * self.best)
        if better:
            self.best, self.step, self.waited = value, step, 0
        else:
            self.waited += 1

    @property
    def reason(self) -> str:
        """Why the run ends now; empty while it goes on."""
        if not self.patience or self.waited < self.patience:
            return ""
        best = "was never finite" if self.best is None else f"was best at step {self.step}, {self.best:.4g}"
        return f"stopped early: {self.metric} {best} (eval.patience={self.patience})"

    def position(self) -> dict[str, Any]:
        """For a checkpoint; JSON-able."""
        if not self.patience:
            return {}
        told = {"metric": self.metric, "best": self.best, "step": self.step, "waited": self.waited}
        return {"early_stop": told}
