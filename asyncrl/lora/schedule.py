"""What happens when replicas take jobs from lists: a simulation by events, exact for the model of step times.

A replica steps all its resident jobs together. When one ends, its slot is filled at once with the first waiting job
that fits, whoever is next in line (work conserving); a job stays where it is until it ends. A replica without work, and
with no job waiting, takes over jobs from the one that would end last: adapters are small, and move at a step's end.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from asyncrl.lora.bound import pack_seconds
from asyncrl.lora.cost import StepTime
from asyncrl.lora.jobs import Machine, PlanJob


@dataclass
class Replica:
    """Jobs with the steps they have left, since the time ``since``."""

    number: int
    waiting: list[PlanJob]
    left: dict[PlanJob, int] = field(default_factory=dict)
    since: float = 0.0
    seconds: float = 0.0  # of one step of the resident jobs

    def ends(self) -> float:
        """When the next resident job ends."""
        return self.since + self.seconds * min(self.left.values())

    def busy_until(self) -> float:
        """When the last one would, without others coming or going: none of them would end later than that."""
        return self.since + self.seconds * max(self.left.values(), default=0)


@dataclass(frozen=True)
class Outcome:
    """``seconds``: the makespan. ``finished``: of each job. ``moves``: (job, from, to) at its time."""

    seconds: float
    finished: dict[str, float]
    moves: list[tuple[float, str, int, int]]


class Simulation:
    """``lists``: for each replica the jobs it takes, in this order; one list for all is a common queue."""

    def __init__(
        self, lists: Sequence[Sequence[PlanJob]], machine: Machine, cost: StepTime, cap: float, migrate: bool = True
    ) -> None:
        self.machine, self.cost, self.cap, self.migrate = machine, cost, cap, migrate
        queues = [list(entry) for entry in lists]
        shared = len(queues) == 1
        self.replicas = [Replica(r, queues[0] if shared else queues[r]) for r in range(machine.replicas)]
        self.finished: dict[str, float] = {}
        self.moves: list[tuple[float, str, int, int]] = []

    def run(self) -> Outcome:
        for replica in self.replicas:
            self._admit(replica)
        events = [(r.ends(), r.number) for r in self.replicas if r.left]
        heapq.heapify(events)
        while events:
            now, number = heapq.heappop(events)
            replica = self.replicas[number]
            if not replica.left or now < replica.ends():
                continue  # jobs have left it since this event was noted
            for touched in self._end(replica, now):
                heapq.heappush(events, (touched.ends(), touched.number))
        return Outcome(max(self.finished.values(), default=0.0), self.finished, self.moves)

    def _end(self, replica: Replica, now: float) -> list[Replica]:
        """Jobs of ``replica`` end at ``now``; the replicas whose packs are others since."""
        done = min(replica.left.values())
        replica.left = {job: left - done for job, left in replica.left.items()}
        self.finished |= {job.name: now for job, left in replica.left.items() if not left}
        replica.left = {job: left for job, left in replica.left.items() if left}
        replica.since = now
        self._admit(replica)
        if replica.left or not self.migrate:
            return [replica] if replica.left else []
        return self._take_over(replica, now)

    def _admit(self, replica: Replica) -> None:
        for job in list(replica.waiting):
            if len(replica.left) == self.machine.slots:
                break
            if self._fits([*replica.left, job]):
                replica.waiting.remove(job)
                replica.left[job] = job.steps
        self._time(replica)

    def _fits(self, pack: Sequence[PlanJob]) -> bool:
        if len(pack) == 1:
            return True
        tokens, state = sum(job.load.tokens for job in pack), sum(job.state_bytes for job in pack)
        return len(pack) <= self.machine.slots and tokens <= self.cap and state <= self.machine.state_bytes

    def _time(self, replica: Replica) -> None:
        replica.seconds = pack_seconds(list(replica.left), self.cost, self.machine) if replica.left else 0.0

    def _take_over(self, idle: Replica, now: float) -> list[Replica]:
        """Waiting jobs of another list, or else resident jobs of the replica that would end last, if both gain."""
        donor = max(self.replicas, key=lambda r: (self._seconds_left(r, now), -r.number))
        if donor.waiting:
            idle.waiting = donor.waiting  # from here on they share the queue
            self._admit(idle)
            return [idle]
        if len(donor.left) < 2:
            return []
        steps = math.ceil((now - donor.since) / donor.seconds)
        at = donor.since + steps * donor.seconds  # jobs move when the step in hand is over
        left = {job: count - steps for job, count in donor.left.items()}
        if min(left.values()) <= 0:
            return []  # one ends with this very step, and the donor's own event comes first
        stay, go = self._split(left)
        if not go:
            return []
        for replica, share in ((donor, stay), (idle, go)):
            replica.left, replica.since = share, at
            self._time(replica)
        self.moves += [(at, job.name, donor.number, idle.number) for job in go]
        return [donor, idle]

    def _seconds_left(self, replica: Replica, now: float) -> float:
        waiting = sum(job.steps * pack_seconds([job], self.cost, self.machine) for job in replica.waiting)
        return replica.busy_until() - now + waiting

    def _split(self, left: dict[PlanJob, int]) -> tuple[dict[PlanJob, int], dict[PlanJob, int]]:
        """The longest stay together while that ends earlier than parting does."""
        order = sorted(left, key=lambda job: (-left[job], job.name))
        best, best_end = len(order), self._end_of(order, left)
        for cut in range(1, len(order)):
            end = max(self._end_of(order[:cut], left), self._end_of(order[cut:], left))
            if end < best_end * (1 - 1e-9):
                best, best_end = cut, end
        return {job: left[job] for job in order[:best]}, {job: left[job] for job in order[best:]}

    def _end_of(self, pack: Sequence[PlanJob], left: dict[PlanJob, int]) -> float:
        """Seconds until the last of ``pack`` ends, as the others leave."""
        now, done = 0.0, 0
        for gone, job in enumerate(reversed(pack)):  # shortest first
            members = list(pack[: len(pack) - gone])
            now += (left[job] - done) * pack_seconds(members, self.cost, self.machine)
            done = left[job]
        return now


def simulate(
    lists: Sequence[Sequence[PlanJob]], machine: Machine, cost: StepTime, cap: float, migrate: bool = True
) -> Outcome:
    """The outcome of ``lists`` (one a replica, or one for all) with at most ``cap`` tokens in a pack."""
    return Simulation(lists, machine, cost, cap, migrate).run()


def by_path(jobs: Iterable[PlanJob], cost: StepTime, machine: Machine) -> list[PlanJob]:
    """Longest first, by the time each takes alone."""
    return sorted(jobs, key=lambda job: (-job.steps * pack_seconds([job], cost, machine), job.name))
