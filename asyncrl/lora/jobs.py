"""Jobs as the planner sees them, and the machine they run on."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.lora.cost import Load


@dataclass(frozen=True)
class PlanJob:
    """One adapter to train: ``steps`` optimizer steps of ``load`` each.

    ``state_bytes``: of its weights, their moments and gradients.
    """

    name: str
    steps: int
    load: Load
    state_bytes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """``replicas`` of the base, each with ``slots`` for adapters, ``state_bytes`` for them, and ``tokens`` a pass."""

    replicas: int
    slots: int
    tokens: float  # of a pack's step in one pass; a job with more takes several passes, alone
    state_bytes: float = float("inf")

    def check(self, jobs: list[PlanJob]) -> None:
        """Raises ``ValueError`` naming a job that no replica can hold, or a name that two jobs share."""
        names = [job.name for job in jobs]
        for name in {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two jobs are called {name}")
        for job in jobs:
            if job.state_bytes > self.state_bytes:
                raise ValueError(
                    f"job {job.name} needs {job.state_bytes / 2**20:.0f} MiB of adapter state and the memory leaves "
                    f"{self.state_bytes / 2**20:.0f}: lower its rank"
                )
