"""Where this process stands in the run: its rank, the run folder, and the store that all ranks share.

Importing this module imports no torch, and on rank 0 neither does ``open_context``: rank 0 chooses the run folder and
may start child processes first. What it publishes reaches the store with the first call that needs the store. Other
ranks need the store at once, to learn the folder.

A sweep runs its jobs one after another in the same processes. Each job has keys of its own (a ``PrefixStore`` over
torchrun's store), so that nothing of an earlier job is ever read by a later one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.errors import RunFailed

if TYPE_CHECKING:
    from torch.distributed import Store


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
            self._store = _connect(self.place, self.job, self.deadline_s)
            for key, value in self._pending.items():
                self._store.set(key, value)
            self._pending.clear()
        return self._store

    def connect(self) -> None:
        """Reach the store, and with it the ranks that wait for what this one published; free in a world of one."""
        if self.world_size > 1:
            assert self.store is not None

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
        """Leave the job; every rank must come here before any drops its process group.

        A rank that drops it earlier closes connections that another, still inside ``init_process_group``, is about to
        use. Rank 0 goes last, as it may host the store. After a failure nobody is waited for: they may never come.
        """
        if failed or (self._store is None and self.world_size == 1):
            self._store = None
            return
        import torch.distributed as dist

        self._meet("left", range(self.world_size))
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meet("gone", range(self.world_size) if self.rank == 0 else ())
        self._store = None

    def _meet(self, key: str, awaited: Iterable[int]) -> None:
        """Say that this rank has come to ``key``, then wait until the ``awaited`` ranks have."""
        self.store.set(f"{key}/{self.rank}", "")
        for rank in awaited:
            self._await(f"{key}/{rank}", self.deadline_s, f"rank {rank} to end job {self.job}")

    def _await(self, key: str, deadline_s: float, waiting_for: str) -> str:
        import torch.distributed as dist

        try:
            self.store.wait([key], timedelta(seconds=deadline_s))
            return self.store.get(key).decode()
        except dist.DistStoreError as error:
            raise RunFailed(f"rank {self.rank} waited {deadline_s:g} s for {waiting_for} ({error})") from None


def _connect(place: Place, job: int, deadline_s: float) -> Store:
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


def lead_context(place: Place, run_dir: Path, job: int, deadline_s: float, published: dict[str, str]) -> RunContext:
    """The context of rank 0; ``published`` reaches the other ranks when rank 0 first needs the store."""
    pending = {f"published/{key}": value for key, value in published.items()}
    return RunContext(place, run_dir, job, deadline_s, _pending=pending)
