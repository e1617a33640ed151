"""One thread a rank that writes checkpoints while training goes on.

    saver.begin(take)      training thread: ``take`` copies what is to be written; returns when it has
    saver.check()          training thread, between steps: raises what has failed meanwhile, on all ranks at once
    saver.wait()           training thread: until all is written; raises what failed

All ranks begin the same saves in the same order, and each rank's thread writes them in that order. The threads agree
over a process group of their own, so that nothing of theirs ever meets a collective of training. A rank whose copies
are all still being written waits in ``begin`` for the oldest; every wait ends after ``deadline_s``. A rank that dies
takes its part of the group with it: the others' threads fail with that, and say so.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.training.agreement import Agreement, describe
from asyncrl.training.errors import CheckpointError
from asyncrl.training.host_memory import HostMemory
from asyncrl.training.mesh import Mesh

log = logging.getLogger(__name__)
DEADLINE = "deadline.checkpoint_s"


@dataclass
class Job:
    """One save. ``write`` is a collective of the threads; one of the other two is called after it, on every rank."""

    what: str
    write: Callable[[Agreement], Path]
    on_saved: Callable[[Path], None] = lambda path: None
    on_failed: Callable[[CheckpointError], None] = lambda error: None


class Saver:
    """``copies``: saves whose data may lie in ``memory`` at a time, the one being written included."""

    def __init__(self, mesh: Mesh, copies: int, deadline_s: float) -> None:
        self.mesh, self.deadline_s = mesh, deadline_s
        self.failed = False  # a save has failed on this rank since the last ``wait``
        self.hold_s: float | None = None
        self.write_s: float | None = None
        self.memory = HostMemory(mesh.device)
        self._agreement: Agreement | None = None
        self._copies = threading.Semaphore(copies)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._pending = 0
        self._begun = False
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Collective. Makes the process group, unless it is there; the first ``begin`` does it otherwise."""
        if self._agreement is None:
            group = None
            if self.mesh.world_size > 1:
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline_s))
            self._agreement = Agreement(self.mesh.rank, self.mesh.world_size, group)

    def begin(self, take: Callable[[], Job]) -> None:
        """Collective. Calls ``take`` once there is room for its copy; its job is written while training goes on."""
        began = time.perf_counter()
        self.open()
        if not self._copies.acquire(timeout=self.deadline_s):
            raise CheckpointError(self._late("room for another copy in host memory (checkpoint.copies)"))
        try:
            job = take()
        except BaseException:
            self._copies.release()
            raise
        self.hold_s = (self.hold_s or 0.0) + time.perf_counter() - began
        self._begun = True
        with self._idle:
            self._pending += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"saver rank {self.mesh.rank}", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def wait(self) -> None:
        """Until everything begun is written. Raises the first failure since the last call."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._pending == 0, self.deadline_s):
                raise CheckpointError(self._late("its checkpoints to be written"))
            error, self._error, self.failed = self._error, None, False
        if error is not None:
            raise error

    def check(self) -> None:
        """Collective, between steps. Raises on all ranks at the same call if a save has failed on any of them."""
        if not self._begun or not self.mesh.gather_rows(torch.tensor([self.failed])).any():
            return
        self.wait()
        raise CheckpointError("another rank could not write a checkpoint; its message says why")

    def close(self) -> None:
        """``wait``, then end the thread."""
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def metrics(self) -> dict[str, float]:
        """Declared keys of what has happened since the last call."""
        found = {"time/checkpoint_hold_s": self.hold_s, "time/checkpoint_write_s": self.write_s}
        self.hold_s = self.write_s = None
        return {key: value for key, value in found.items() if value is not None}

    def _late(self, waiting_for: str) -> str:
        return f"trainer rank {self.mesh.rank} waited {self.deadline_s:g} s for {waiting_for} ({DEADLINE})"

    def _run(self) -> None:
        assert self._agreement is not None
        while (job := self._jobs.get()) is not None:
            began = time.perf_counter()
            error: CheckpointError | None = None
            try:
                job.on_saved(job.write(self._agreement))
            except CheckpointError as failure:
                error = failure
            except Exception as failure:
                log.exception("rank %d: %s", self.mesh.rank, job.what)
                error = CheckpointError(f"could not {job.what}: {describe(failure)}")
            if error is not None:
                self.failed, self._error = True, self._error or error
                self._tell(job, error)
            self.write_s = time.perf_counter() - began
            del job  # and with it the copy
            self._copies.release()
            with self._idle:
                self._pending -= 1
                self._idle.notify_all()

    def _tell(self, job: Job, error: CheckpointError) -> None:
        try:
            job.on_failed(error)
        except Exception:
            log.exception("rank %d could not tell that it %s", self.mesh.rank, error)
