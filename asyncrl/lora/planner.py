"""The plan of a sweep: which replica trains which jobs, in which order, and how many tokens a pack takes at most.

Several assignments and caps are simulated (asyncrl/lora/schedule.py); the best is improved by moving and swapping jobs
of the replica that ends last. Every plan comes with a makespan that nothing can beat (asyncrl/lora/bound.py), so that
their ratio tells how much a better planner could still gain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.lora.assign import assign, longest_first
from asyncrl.lora.bound import lower_bound
from asyncrl.lora.cost import StepTime
from asyncrl.lora.jobs import Machine, PlanJob
from asyncrl.lora.schedule import Outcome, by_path, simulate

CAPS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the machine's tokens: smaller packs let long jobs end earlier
TRIES = 200  # of moves and swaps
NEAR = 1.005  # of the bound: good enough to stop


@dataclass(frozen=True)
class Plan:
    """``lists``: jobs of each replica, or one list that all take from. ``cap``: most tokens in a pack."""

    lists: list[list[PlanJob]]
    cap: float
    outcome: Outcome
    bound: float

    @property
    def ratio(self) -> float:
        """Of the predicted makespan to the bound: 1 is optimal."""
        return self.outcome.seconds / self.bound if self.bound else 1.0

    def __str__(self) -> str:
        packs = " | ".join(f"{len(jobs)} jobs" for jobs in self.lists)
        return (
            f"predicted makespan {self.outcome.seconds:.1f} s, at least {self.bound:.1f} s whatever the plan: "
            f"ratio {self.ratio:.3f}; packs of at most {self.cap:.0f} tokens; {packs}"
        )


def plan(jobs: Sequence[PlanJob], machine: Machine, cost: StepTime, seed: int = 0) -> Plan:
    """The best plan found. A function of its arguments alone: no clock is read.

    Raises ``ValueError`` for jobs that the machine cannot hold or that share a name.
    """
    jobs = list(jobs)
    machine.check(jobs)
    bound = lower_bound(jobs, machine, cost)
    order = by_path(jobs, cost, machine)

    def tried(*starts: list[list[PlanJob]]) -> list[Plan]:
        caps = [share * machine.tokens for share in CAPS]
        return [Plan(lists, cap, simulate(lists, machine, cost, cap), bound) for lists in starts for cap in caps]

    plans = tried([order], longest_first(order, machine, cost))
    if _shortest(plans).ratio > NEAR:
        plans += tried(assign(jobs, machine, cost))
    return improved(_shortest(plans), machine, cost, random.Random(seed))


def _shortest(plans: list[Plan]) -> Plan:
    return min(plans, key=lambda plan: plan.outcome.seconds)


def improved(best: Plan, machine: Machine, cost: StepTime, draw: random.Random) -> Plan:
    """``best`` after up to ``TRIES`` changes of the lists, each kept if the makespan falls; stops near the bound."""
    for _ in range(TRIES):
        if best.ratio <= NEAR:
            break
        lists = _changed(best, draw)
        outcome = simulate(lists, machine, cost, best.cap)
        if outcome.seconds < best.outcome.seconds:
            best = Plan(lists, best.cap, outcome, best.bound)
    return best


def _changed(plan: Plan, draw: random.Random) -> list[list[PlanJob]]:
    """A job of the list whose jobs end last goes elsewhere in it, or to another list, perhaps for one of those."""
    lists = [list(jobs) for jobs in plan.lists]
    full = [m for m, jobs in enumerate(lists) if jobs]
    last = max(full, key=lambda m: max(plan.outcome.finished[job.name] for job in lists[m]))
    job = lists[last].pop(draw.randrange(len(lists[last])))
    other = draw.randrange(len(lists))
    if lists[other] and other != last and draw.random() < 0.5:
        lists[last].insert(0, lists[other].pop(draw.randrange(len(lists[other]))))
    lists[other].insert(draw.randrange(len(lists[other]) + 1), job)
    return lists
