"""A makespan that no schedule can beat, on a machine whose steps cost what the model says."""

from __future__ import annotations

from asyncrl.lora.cost import StepTime, total
from asyncrl.lora.jobs import Machine, PlanJob


def lower_bound(jobs: list[PlanJob], machine: Machine, cost: StepTime) -> float:
    """Seconds; the largest of what each argument proves, for schedules that may move jobs between replicas at any step.

    **Work.** Let K be the number of passes of all replicas. Summed over them, ``max(floor, base) >= floor`` and
    ``>= base``; tokens, squares and what adapters add are those of the jobs, whatever the packs. So the replicas are
    busy for ``max(K floor, K fixed + per_token tokens + per_square squares) + extra`` seconds together. A pass ends the
    step of at most ``slots`` jobs, which have at most ``state_bytes`` of state, and takes at most ``tokens`` tokens:
    each bounds K from below.

    **One job.** Its steps follow each other, and none is shorter than its step alone.
    """
    if not jobs:
        return 0.0
    work = total(job.load * job.steps for job in jobs)
    steps = max(
        sum(job.steps for job in jobs) / machine.slots,
        work.tokens / machine.tokens,
        sum(job.steps * job.state_bytes for job in jobs) / machine.state_bytes,
    )
    unfixed = cost.base(work) - cost.fixed
    busy = max(steps * cost.floor, steps * cost.fixed + unfixed) + cost.extra(work)
    alone = max(job.steps * pack_seconds([job], cost, machine) for job in jobs)
    return max(busy / machine.replicas, alone)


def pack_seconds(pack: list[PlanJob], cost: StepTime, machine: Machine) -> float:
    """A step of ``pack``; more than ``machine.tokens`` go in equal passes, after which the adapters step once."""
    load = total(job.load for job in pack)
    passes = max(1, int(-(-load.tokens // machine.tokens)))
    return passes * max(cost.floor, cost.base(load * (1 / passes))) + cost.extra(load)
