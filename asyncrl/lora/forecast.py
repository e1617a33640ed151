"""How long a pack's training will take: the step-time model, fitted to its own first steps, and the plan that it gives.

Of what a job costs a step only the mean so far is known; of a job that has not begun yet, that of the others at its own
rank. Evaluations and checkpoints are not steps and not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.data.tokens import Conversation
from asyncrl.lora.cost import Load, fit, job_load, total
from asyncrl.lora.jobs import Machine, PlanJob
from asyncrl.lora.planner import Plan, plan

AFTER = 6  # steps of the pack; the first of them, which also allocates, is left out


@dataclass(frozen=True)
class Left:
    """A job that has not ended: its steps from now on, and the rank of its adapter."""

    name: str
    steps: int
    rank: int


class Forecast:
    """Sees every step of a pack; predicts once there have been :data:`AFTER`. ``seconds``: of all steps so far."""

    def __init__(self, slots: int, token_cap: int) -> None:
        self.machine = Machine(replicas=1, slots=slots, tokens=float(token_cap))
        self.seconds = 0.0
        self._loads: list[Load] = []
        self._times: list[float] = []
        self._sums: dict[str, Load] = {}

    def see(self, batches: Mapping[str, tuple[Sequence[Conversation], int]], seconds: float) -> bool:
        """A step on ``batches`` (job -> batch and rank) took ``seconds``; whether now is the time to predict."""
        loads = {name: job_load([len(c) - 1 for c in batch], rank) for name, (batch, rank) in batches.items()}
        for name, load in loads.items():
            self._sums[name] = self._sums.get(name, Load()) + load
        self._loads.append(total(loads.values()))
        self._times.append(seconds)
        self.seconds += seconds
        return len(self._times) == AFTER

    def plan(self, left: Sequence[Left]) -> Plan:
        """Of the steps that are left."""
        model = fit(self._loads[1:], self._times[1:])
        jobs = [PlanJob(job.name, job.steps, self._load(job)) for job in left if job.steps]
        return plan(jobs, self.machine, model)

    def _load(self, job: Left) -> Load:
        own = self._sums.get(job.name)
        if own is not None:
            return own * (1 / own.jobs)
        seen = total(self._sums.values())
        each = seen * (1 / seen.jobs)
        return Load(each.tokens, each.squares, each.tokens * job.rank, 1.0)
