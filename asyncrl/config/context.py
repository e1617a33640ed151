"""Where this process stands in the run: its rank, the run folder, and the store that all ranks share.

Importing this module imports no torch, and on rank 0 neither does ``open_context``: rank 0 chooses the run folder and
may start child processes first. What it publishes reaches the store with the first call that needs the store. Other
ranks need the store at once, to learn the folder.

A sweep runs its jobs one after another in the same processes. Each job has keys of its own (a ``PrefixStore`` over
torchrun's store), so that nothing of an earlier job is ever read by a later one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.errors import RunFailed

if TYPE_CHECKING:
    from torch.distributed import Store

RUN_DIR_KEY = "run_dir"


@dataclass(frozen=True)
class Place:
    """What torchrun says about this process; a world of one without torchrun."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    attempt: int = 0  # restarts by torchrun so far (--max-restarts)

    @classmethod
    def from_environment(cls) -> Place:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(name, default))

        return cls(
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node=number("GROUP_RANK", 0),
            attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        )


@dataclass
class RunContext:
    """One job of one launch, as seen by one rank. Close it when the job ends, well or badly."""

    place: Place
    run_dir: Path
    job: int = 0  # number in a sweep
    deadline_s: float = 600.0  # of every wait for another rank
    _store: Store | None = field(default=None, repr=False)
    _pending: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def local_rank(self) -> int:
        return self.place.local_rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def node(self) -> int:
        return self.place.node

    @property
    def store(self) -> Store:
        """This job's store, shared by all ranks; the first call imports torch and connects."""
        if self._store is None:
            self._store = connect(self.place, self.job, self.deadline_s)
            for key, value in self._pending.items():
                self._store.set(key, value)
            self._pending.clear()
        return self._store

    def publish(self, key: str, value: str) -> None:
        """Make ``value`` known to all ranks of this job under ``key``."""
        self.store.set(f"published/{key}", value)

    def await_published(self, key: str, deadline_s: float) -> str:
        """What another rank published under ``key``. Raises RunFailed when it does not come in time."""
        return self._await(f"published/{key}", deadline_s, f"another rank to publish {key!r}")

    def init_process_group(self, backend: str, timeout_s: float | None = None) -> None:
        """Initialise torch.distributed for this job, in keys of its own.

        ``timeout_s`` bounds each collective. For a backend with NCCL the rank's device is set first.
        """
        import torch
        import torch.distributed as dist

        if "nccl" in backend:
            torch.cuda.set_device(self.local_rank)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("process_group", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s or self.deadline_s),
        )

    def close(self, failed: bool = False) -> None:
        """Leave the job: drop the process group and, unless the job failed, wait until every rank has come here.

        Rank 0 may host the store, so it must not leave first. After a failure nobody is waited for: the others may
        never come.
        """
        if self._store is None:
            return
        import torch.distributed as dist

        if dist.is_initialized() and not failed:
            dist.destroy_process_group()
        if self.world_size > 1 and not failed:
            self._store.set(f"left/{self.rank}", "")
            for rank in range(self.world_size):
                self._await(f"left/{rank}", self.deadline_s, f"rank {rank} to end job {self.job}")
        self._store = None

    def _await(self, key: str, deadline_s: float, waiting_for: str) -> str:
        import torch.distributed as dist

        try:
            self.store.wait([key], timedelta(seconds=deadline_s))
            return self.store.get(key).decode()
        except dist.DistStoreError as error:
            raise RunFailed(f"rank {self.rank} waited {deadline_s:g} s for {waiting_for} ({error})") from None


def connect(place: Place, job: int, deadline_s: float) -> Store:
    """torchrun's store under the prefix of this attempt and job; an in-process one for a world of one."""
    import torch.distributed as dist

    store: Store
    if place.world_size == 1:
        store = dist.HashStore()
    else:
        try:
            store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=deadline_s))))
        except dist.DistError as error:
            raise RunFailed(f"rank {place.rank} did not reach torchrun's store in {deadline_s:g} s ({error})") from None
    return dist.PrefixStore(f"asyncrl/attempt{place.attempt}/job{job}", store)


def lead_context(place: Place, run_dir: Path, job: int, deadline_s: float) -> RunContext:
    """The context of rank 0, which has chosen ``run_dir``."""
    return RunContext(place, run_dir, job, deadline_s, _pending={RUN_DIR_KEY: str(run_dir)})


def join_context(place: Place, job: int, deadline_s: float) -> RunContext:
    """The context of any other rank: waits for rank 0 to publish the run folder."""
    context = RunContext(place, Path(), job, deadline_s)
    context.run_dir = Path(context._await(RUN_DIR_KEY, deadline_s, "rank 0 to choose the run folder"))
    return context
