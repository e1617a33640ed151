"""Plans against bounds that are proven, exhaustive search, and a simulation written otherwise."""

from __future__ import annotations

import importlib.util
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.lora.assign import assign, longest_first
from asyncrl.lora.bound import lower_bound, pack_seconds
from asyncrl.lora.cost import StepTime, job_load
from asyncrl.lora.jobs import Machine, PlanJob
from asyncrl.lora.planner import plan
from asyncrl.lora.schedule import by_path, simulate

COST = StepTime(floor=0.01, fixed=0.002, per_token=3e-5, per_square=1e-8, per_rank_token=1e-8, per_job=1e-3)


def drawn(count: int, seed: int) -> list[PlanJob]:
    draw = random.Random(seed)
    return [
        PlanJob(
            f"job{i}",
            draw.randint(1, 40),
            job_load([draw.randint(4, 200) for _ in range(draw.randint(1, 4))], rank := draw.choice([8, 16, 64])),
            rank * 10.0,
        )
        for i in range(count)
    ]


MACHINES = st.builds(
    Machine,
    replicas=st.integers(1, 3),
    slots=st.integers(1, 5),
    tokens=st.sampled_from([100.0, 400.0, 2000.0]),
    state_bytes=st.sampled_from([640.0, 1500.0, float("inf")]),
)


@given(MACHINES, st.integers(1, 9), st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_schedule_beats_the_bound_and_none_loses_a_job(machine, count, seed, shared, migrate):
    jobs = drawn(count, seed)
    draw = random.Random(seed)
    draw.shuffle(jobs)
    lists = [jobs] if shared else [jobs[m :: machine.replicas] for m in range(machine.replicas)]
    outcome = simulate(lists, machine, COST, draw.choice([0.3, 1.0]) * machine.tokens, migrate)
    assert set(outcome.finished) == {job.name for job in jobs}
    for job in jobs:
        assert outcome.finished[job.name] >= job.steps * pack_seconds([job], COST, machine) * (1 - 1e-9)
    assert outcome.seconds >= lower_bound(jobs, machine, COST) * (1 - 1e-9)


def stepped(jobs: list[PlanJob], machine: Machine, cap: float) -> dict[str, float]:
    """One replica, one step at a time: what the simulation by events must give."""
    waiting, left, now, finished = list(jobs), {}, 0.0, {}
    while waiting or left:
        for job in list(waiting):
            pack = [*left, job]
            tokens, state = sum(j.load.tokens for j in pack), sum(j.state_bytes for j in pack)
            if len(left) < machine.slots and (not left or (tokens <= cap and state <= machine.state_bytes)):
                waiting.remove(job)
                left[job] = job.steps
        now += pack_seconds(list(left), COST, machine)
        for job in list(left):
            left[job] -= 1
            if not left[job]:
                del left[job]
                finished[job.name] = now
    return finished


@given(MACHINES, st.integers(1, 9), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_events_are_steps(machine, count, seed):
    one = Machine(1, machine.slots, machine.tokens, machine.state_bytes)
    jobs = drawn(count, seed)
    assert simulate([jobs], one, COST, one.tokens).finished == pytest.approx(stepped(jobs, one, one.tokens))


def test_moving_the_last_jobs_helps():
    """Two long jobs in one pack that fills the machine: the idle replica takes one over."""
    jobs = [PlanJob(name, 100, job_load([1000], 8)) for name in ("a", "b")] + [PlanJob("c", 1, job_load([10], 8))]
    machine, lists = Machine(2, 4, 4000), [jobs[:2], jobs[2:]]
    stay, move = (simulate(lists, machine, COST, 4000, migrate) for migrate in (False, True))
    assert move.seconds < 0.65 * stay.seconds and [name for _, name, *_ in move.moves] in (["a"], ["b"])


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_as_good_as_the_best_of_all_assignments(seed):
    """Five jobs, two replicas, every split of them and every order: what a planner without migration could find."""
    jobs = drawn(5, seed)
    machine = Machine(2, 2, 400, 1500)
    best = min(
        simulate([order[:cut], order[cut:]], machine, COST, cap, migrate=False).seconds
        for order in map(list, itertools.permutations(jobs))
        for cut in range(6)
        for cap in (400.0, 100.0)
    )
    assert plan(jobs, machine, COST).outcome.seconds <= best * 1.03


@pytest.mark.parametrize("slots", [4, 24])
def test_many_jobs_end_close_to_the_bound(slots):
    found = plan(drawn(60, 0), Machine(4, slots, 2000), COST)
    assert 1 <= found.ratio < 1.05 and "ratio" in str(found)


def test_the_same_jobs_give_the_same_plan():
    machine = Machine(3, 4, 400)
    first, second = (plan(drawn(20, 1), machine, COST) for _ in range(2))
    assert first == second


def test_without_the_solver_the_longest_go_first(monkeypatch):
    jobs, machine = drawn(12, 3), Machine(3, 4, 400)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert assign(jobs, machine, COST) == longest_first(by_path(jobs, COST, machine), machine, COST)


def test_the_solver_balances_what_longest_first_does_not():
    """3, 3, 2, 2, 2 on two replicas: longest first ends at 7, the best at 6 (Graham's example)."""
    cost = StepTime(0, 0, per_token=1.0)
    jobs = [PlanJob(f"job{i}", 1, job_load([n], 8)) for i, n in enumerate([3, 3, 2, 2, 2])]
    machine = Machine(2, 1, 100)
    assert simulate(longest_first(jobs, machine, cost), machine, cost, 100, migrate=False).seconds == 7
    assert simulate(assign(jobs, machine, cost), machine, cost, 100, migrate=False).seconds == 6


def test_what_no_machine_can_hold_is_named():
    big = PlanJob("big", 1, job_load([1], 8), state_bytes=2**30)
    with pytest.raises(ValueError, match="job big needs 1024 MiB of adapter state and the memory leaves 512"):
        plan([big], Machine(1, 1, 10, 2**29), COST)
    with pytest.raises(ValueError, match="two jobs are called big"):
        plan([big, big], Machine(1, 1, 10), COST)


def test_no_jobs():
    assert plan([], Machine(2, 2, 10), COST).outcome.seconds == 0
