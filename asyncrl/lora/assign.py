"""Which replica trains which job: CP-SAT on the work that each replica gets, or longest first without the solver.

The load of replica m is a surrogate of its time, ``work_m + floor * rounds_m`` with ``rounds_m`` at least the longest
job's steps and the sum of steps over the slots. It is above ``max(floor, base)``, so the solver's own bound holds for
the surrogate only and is not shown. What counts is the simulation of what it answers.
"""

from __future__ import annotations

import importlib.util
import math

from asyncrl.lora.bound import pack_seconds
from asyncrl.lora.cost import StepTime
from asyncrl.lora.jobs import Machine, PlanJob
from asyncrl.lora.schedule import by_path

HORIZON = 1_000_000  # units of time that the solver counts a replica's fair share in
WORK_LIMIT = 1.0  # deterministic time of the solver, so that the same jobs get the same plan on any machine


def assign(jobs: list[PlanJob], machine: Machine, cost: StepTime) -> list[list[PlanJob]]:
    """For each replica its jobs, longest first."""
    order = by_path(jobs, cost, machine)
    if machine.replicas == 1:
        return [order]
    places = solved(order, machine, cost) if importlib.util.find_spec("ortools") else None
    if places is None:
        return longest_first(order, machine, cost)
    return [[job for job, place in zip(order, places, strict=True) if place == m] for m in range(machine.replicas)]


def longest_first(order: list[PlanJob], machine: Machine, cost: StepTime) -> list[list[PlanJob]]:
    """Each job, longest first, to the replica with the least work so far (Graham 1969)."""
    lists: list[list[PlanJob]] = [[] for _ in range(machine.replicas)]
    loads = [0.0] * machine.replicas
    for job in order:
        m = min(range(machine.replicas), key=lambda r: (loads[r], r))
        lists[m].append(job)
        loads[m] += job.steps * pack_seconds([job], cost, machine)
    return lists


def solved(order: list[PlanJob], machine: Machine, cost: StepTime) -> list[int] | None:
    """The replica of each job; None if the solver finds nothing in its limit."""
    from ortools.sat.python import cp_model

    work = [job.steps * (cost.base(job.load) - cost.fixed + cost.extra(job.load)) for job in order]
    total = sum(work) + cost.floor * sum(job.steps for job in order) / machine.slots
    unit = max(total / machine.replicas, 1e-9) / HORIZON
    floor, costs = cost.floor / unit, [math.ceil(w / unit) for w in work]
    model = cp_model.CpModel()
    placed = [[model.new_bool_var("") for _ in range(machine.replicas)] for _ in order]
    for job_places in placed:
        model.add_exactly_one(job_places)
    longest = sum(costs) + math.ceil(floor * sum(job.steps for job in order))
    makespan = model.new_int_var(0, longest, "makespan")
    for m in range(machine.replicas):
        rounds = model.new_int_var(0, longest, "")  # in units of time
        for job, job_places in zip(order, placed, strict=True):
            model.add(rounds >= math.ceil(floor * job.steps) * job_places[m])
        shares = [math.ceil(floor * job.steps / machine.slots) for job in order]
        model.add(rounds >= sum(s * p[m] for s, p in zip(shares, placed, strict=True)))
        model.add(makespan >= rounds + sum(c * p[m] for c, p in zip(costs, placed, strict=True)))
    for j, job_places in enumerate(
        placed[: machine.replicas]
    ):  # replicas are alike: job j is on one of the first j + 1
        for m in range(j + 1, machine.replicas):
            model.add(job_places[m] == 0)
    model.minimize(makespan)
    for m, jobs in enumerate(longest_first(order, machine, cost)):
        for job in jobs:
            model.add_hint(placed[order.index(job)][m], 1)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several race each other, and the first to answer is not always the same
    solver.parameters.max_deterministic_time = WORK_LIMIT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [next(m for m, var in enumerate(job_places) if solver.value(var)) for job_places in placed]
