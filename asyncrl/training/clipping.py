"""Clipping without the whole gradient: by the norms of the steps before.

The loss of step t is multiplied by c_t = min(1, C / N_t), where N_t is a running average of the global norms before it:
the gradient is exactly c_t times itself, whatever the accumulation or sharding. A spike is not in N_t, so each unit
(FSDP2 unit, layer) is also cut to ``guard`` times the average of its own norms, in its own step. No unit is cut below
C / sqrt(units): if all are below that, the global norm is below C. Until a unit has a history that share is its limit,
so the first step is bounded by C as well.

This is another rule than clipping by the norm of the same step: norms here are one step late. Averages learn the norm
after the cut, so one spike moves them by at most the guard. They are part of a checkpoint (:meth:`DelayedClip.state`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class DelayedClip:
    """``clip_norm`` is C, ``memory`` the weight of the past in the averages, ``guard`` 0 for none."""

    def __init__(self, units: Sequence[str], clip_norm: float, memory: float, guard: float) -> None:
        self.units, self.clip_norm, self.memory, self.guard = list(units), clip_norm, memory, guard
        self.norm: float | None = None
        self.unit_norms: dict[str, float] = {}

    @property
    def loss_scale(self) -> float:
        """c_t of the coming step."""
        return 1.0 if self.norm is None else min(1.0, self.clip_norm / (self.norm + 1e-6))

    def limit(self, unit: str) -> float:
        """The largest norm of the unscaled gradient that ``unit`` may have in the coming step."""
        share = self.clip_norm / math.sqrt(len(self.units))
        known = self.unit_norms.get(unit)
        if known is None:
            return share
        return max(self.guard * known, share) if self.guard else math.inf

    def learn(self, norms: dict[str, float]) -> None:
        """Takes the norms of a step's unscaled gradients before the cut; those that are not finite teach nothing."""
        cut = {u: min(n, self.limit(u)) for u, n in norms.items() if math.isfinite(n)}
        for unit, norm in cut.items():
            self.unit_norms[unit] = self._average(self.unit_norms.get(unit), norm)
        if cut:
            self.norm = self._average(self.norm, math.hypot(*cut.values()))

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else self.memory * old + (1 - self.memory) * new

    def state(self) -> dict[str, Any]:
        """JSON-able; floats survive JSON exactly."""
        return {"norm": self.norm, "unit_norms": dict(self.unit_norms)}

    def load(self, state: dict[str, Any]) -> None:
        """What :meth:`state` gave. Units that are called otherwise here start without a history."""
        self.norm = state.get("norm")
        self.unit_norms = {u: n for u, n in state.get("unit_norms", {}).items() if u in self.units}
