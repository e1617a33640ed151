"""The trainer's side of a weight push: gathers shards while training goes on, sends, has engines prove and commit.

    publisher = WeightPublisher(named_params, wire_dtype="bfloat16", rank=rank, world=world)   # on every rank
    publisher.publish(version)            # every rank, the same order; returns at once
    ... forward and backward of the next step ...
    publisher.wait_gathered()             # before anything changes the parameters
    optimizer.step()

Invariants:
- all ranks gather or none does: rank 0 gets ``ready`` from the engines first and broadcasts its decision;
- parameters are read between ``publish`` and ``wait_gathered`` only;
- at most ``window_bytes`` (or the largest tensor, if that is larger) of gathered bytes exist at a time;
- versions are pushed one after the other, each to its end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.transport.errors import DeadlineExpired
from asyncrl.weights.digest import combined, tensor_digests
from asyncrl.weights.errors import GatherMismatch, PublishFailed
from asyncrl.weights.gather import Gatherer, Local, local_of
from asyncrl.weights.manifest import WIRE_DTYPES
from asyncrl.weights.planes import SendingPlane, ZmqSending
from asyncrl.weights.subscribers import Engine, Hub, Timings
from asyncrl.weights.window import Window

log = logging.getLogger(__name__)

FAILED, NOT_NEEDED, SEND = -1, 0, 1


@dataclass
class SyncReport:
    """What one push did. Seconds; those of engines are the slowest engine's. Empty of engines: nobody lacked it."""

    version: int
    bytes: int = 0
    digest: str = ""  # of all tensors, the trainer's and every engine's; empty if nothing was sent
    engines: list[str] = field(default_factory=list)  # that serve the version now
    dropped: dict[str, str] = field(default_factory=dict)  # name -> reason
    ready_s: float = 0.0  # until the engines were ready
    gather_s: float = 0.0  # until the bytes no longer depended on parameters
    transfer_s: float = 0.0  # from the first byte until all engines held all
    commit_s: float = 0.0  # until all engines had resumed
    total_s: float = 0.0
    load_s: float = 0.0  # of which in the worker
    digest_s: float = 0.0  # of which digests
    pause_s: float = 0.0  # generation stood still


class _Drops:
    """Work for the publisher's thread: tell who was dropped."""


@dataclass
class _Job:
    version: int
    locals: list[Local]
    updated: torch.cuda.Event | None  # on a GPU: after the work that the parameters came out of
    gathered: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)
    report: SyncReport | None = None


class WeightPublisher:
    """Pushes ``named_params()`` to all engines that subscribed. One thread a rank; rank 0 also serves the links."""

    def __init__(
        self,
        named_params: Callable[[], Iterable[tuple[str, Tensor | Local]]],
        *,
        wire_dtype: str = "",
        rank: int = 0,
        world: int = 1,
        group: dist.ProcessGroup | None = None,
        chunk_bytes: int = 16 << 20,
        window_bytes: int = 64 << 20,
        deadline_s: float = 120.0,
        on_drop: Callable[[str, str], None] | None = None,
        on_served: Callable[[str, int, str], None] | None = None,
        plane: SendingPlane | None = None,
        **listener_options: Any,
    ) -> None:
        """``named_params()``: (Hugging Face name, tensor or DTensor), the same order on all ranks and every time; a
        ``Local`` instead of a tensor says itself what this rank holds.

        ``wire_dtype``: of ``manifest.WIRE_DTYPES``; empty sends each tensor as it is. ``group``: used by this
        publisher alone, with a timeout beyond ``deadline_s``; None makes one if ``world`` > 1 (a collective call).
        ``deadline_s``: for every single phase of an engine. ``on_drop(engine, reason)``, at the end of a push or, for
        an engine that fails between two, at once, and, once an engine serves a version, ``on_served(engine, version,
        digest)``: called on rank 0, from the publisher's thread.
        ``plane``: how rank 0 moves bytes; None: in messages. ``listener_options``: see ``Listener`` (address, keys,
        heartbeat_s, ...).
        """
        self._named_params = named_params
        self._wire_dtype = WIRE_DTYPES[wire_dtype] if wire_dtype else None
        self.rank, self.world = rank, world
        if group is None and world > 1:
            group = dist.new_group(timeout=timedelta(seconds=2 * deadline_s + 60))
        self._group = group
        self._chunk_bytes, self._window_bytes, self._deadline_s = chunk_bytes, window_bytes, deadline_s
        self._on_drop, self._on_served = on_drop, on_served
        self._plane = plane or ZmqSending(chunk_bytes)
        self._gatherer: Gatherer | None = None
        self._window: Window | None = None
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None
        self._leaving = False  # what a push in progress dies of is of no interest any more
        self._jobs: queue.SimpleQueue[_Job | _Drops | None] = queue.SimpleQueue()
        self._last: _Job | None = None
        self._hub = (
            Hub(deadline_s, self._plane, lambda: self._jobs.put(_Drops()), **listener_options) if rank == 0 else None
        )
        self.endpoint = self._hub.endpoint if self._hub else ""
        self._thread = threading.Thread(target=self._run, name=f"publisher rank {rank}", daemon=True)
        self._thread.start()

    def publish(self, version: int) -> None:
        """Begin to push the parameters as they are now. Raises what an earlier push died of."""
        self._check()
        locals_ = [p if isinstance(p, Local) else local_of(name, p) for name, p in self._named_params()]
        self._last = _Job(version, locals_, _mark(locals_))
        self._jobs.put(self._last)

    def wait_gathered(self, deadline_s: float | None = None) -> None:
        """Until no push depends on the parameters any more. Raises ``PublishFailed`` or ``DeadlineExpired``."""
        self._wait("gathered", deadline_s)

    def wait_committed(self, deadline_s: float | None = None) -> SyncReport | None:
        """Until the last push came to its end; returns its report (rank 0; None elsewhere or before the first)."""
        self._wait("finished", deadline_s)
        return self._last.report if self._last else None

    def wait_for_engines(self, count: int, deadline_s: float) -> None:
        """Rank 0: until ``count`` engines have subscribed in full."""
        assert self._hub is not None, "engines subscribe to rank 0"
        self._hub.run(self._hub.subscribers.wait_for(count, deadline_s), deadline_s + 10, "engines to subscribe")

    def close(self, wait: bool = True) -> None:
        """Leave the engines; with ``wait`` only after the push in progress."""
        self._leaving = not wait
        self._jobs.put(None)
        if wait:
            self._thread.join(4 * self._deadline_s)
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()

    def __enter__(self) -> WeightPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=error is None)

    def _check(self) -> None:
        if self._error is not None:
            raise PublishFailed(f"the weight push of rank {self.rank} failed: {self._error}") from self._error

    def _wait(self, event: str, deadline_s: float | None) -> None:
        job = self._last
        if job is not None:
            seconds = 4 * self._deadline_s if deadline_s is None else deadline_s
            if not getattr(job, event).wait(seconds):
                raise DeadlineExpired(f"trainer rank {self.rank}", seconds, f"version {job.version} to be {event}")
        self._check()

    # -- the publisher's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Drops):
                self._run_drops()
                continue
            try:
                if self._error is None:
                    with torch.no_grad(), self._beside(job):
                        self._push(job)
            except BaseException as error:  # raised again in the trainer's thread by ``_check``
                if not self._leaving:
                    log.exception("pushing version %d failed", job.version)
                self._error = error
            finally:
                job.gathered.set()
                job.finished.set()

    def _run_drops(self) -> None:
        hub = self._hub
        if hub is None or self._error is not None:
            return
        try:
            self._tell_dropped(hub)
        except BaseException as error:  # raised again in the trainer's thread by ``_check``
            if not self._leaving:
                log.exception("telling who was dropped failed")
            self._error = error

    @contextmanager
    def _beside(self, job: _Job) -> Iterator[None]:
        """On a GPU: work on a stream of the publisher's own, or gathers would wait for the trainer's whole step."""
        if job.updated is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(job.locals[0].tensor.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(job.updated)
            yield
            self._stream.synchronize()  # nothing reads parameters any more

    def _push(self, job: _Job) -> None:
        if self._gatherer is None:
            self._gatherer = Gatherer(
                job.locals, self._wire_dtype, rank=self.rank, world=self.world, group=self._group,
                bucket_bytes=self._chunk_bytes,
            )  # fmt: skip
        hub = self._hub
        if hub is None:
            if self._decide(None) == SEND:
                for bucket in self._gatherer.buckets:
                    self._gatherer.gather(bucket, job.locals)
                self._gatherer.shard_digests()
            return
        if self._window is None:
            self._window = self._open_window(self._gatherer, job)
        job.report = SyncReport(job.version)
        try:
            _Sender(hub, self._gatherer, job, self._decide, self._window).run()
        finally:
            self._tell(hub, job.report)

    def _open_window(self, gatherer: Gatherer, job: _Job) -> Window:
        device = job.locals[0].tensor.device if job.locals else torch.device("cpu")
        size = Window.size(self._window_bytes, gatherer.largest)
        return Window(size, self._plane.memory(size, device))

    def _tell(self, hub: Hub, report: SyncReport) -> None:
        """Name the engines that were dropped, and those that serve the version."""
        report.dropped.update(self._tell_dropped(hub))
        for engine in report.engines:
            if self._on_served:
                self._on_served(engine, report.version, report.digest)

    def _tell_dropped(self, hub: Hub) -> dict[str, str]:
        dropped = hub.run(hub.subscribers.take_dropped(), self._deadline_s, "the names of dropped engines")
        for engine, reason in dropped.items():
            log.warning("%s is dropped: it %s", engine, reason)
            if self._on_drop:
                self._on_drop(engine, reason)
        return dropped

    def _decide(self, decision: int | None) -> int:
        """Rank 0's decision, on all ranks."""
        if self.world == 1:
            return NOT_NEEDED if decision is None else decision
        on_gloo = dist.get_backend(self._group) == "gloo"
        value = torch.tensor([0 if decision is None else decision], device="cpu" if on_gloo else "cuda")
        dist.broadcast(value, 0 if self._group is None else dist.get_global_rank(self._group, 0), group=self._group)
        if value.item() == FAILED and decision is None:
            raise RuntimeError("rank 0 could not reach the engines")
        return int(value.item())


def _mark(locals_: list[Local]) -> torch.cuda.Event | None:
    """What the caller's stream has been asked for so far, if the parameters are on a GPU."""
    if not locals_ or locals_[0].tensor.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(locals_[0].tensor.device))
    return event


class _Sender:
    """Rank 0's way through one version."""

    def __init__(self, hub: Hub, gatherer: Gatherer, job: _Job, decide: Callable[[int], int], window: Window) -> None:
        assert job.report is not None
        self._hub, self._gatherer, self._job, self._decide = hub, gatherer, job, decide
        self._window, self._report = window, job.report
        self._engines: list[Engine] = []
        self._timings = Timings()

    def run(self) -> None:
        began = time.monotonic()
        version, report = self._job.version, self._report
        try:
            self._announce()
        except BaseException:
            self._decide(FAILED)
            raise
        report.ready_s = time.monotonic() - began
        if self._decide(SEND if self._engines else NOT_NEEDED) == SEND:
            sending = time.monotonic()
            digests = self._send()
            report.digest = combined(digests)
            self._phase("verify", version, np.array(digests, "<u8").tobytes())
            report.transfer_s = time.monotonic() - sending
            committing = time.monotonic()
            self._phase("load", version, report.digest)
            report.commit_s = time.monotonic() - committing
            report.bytes = self._gatherer.manifest.nbytes
        report.engines = [engine.name for engine in self._engines]
        report.load_s, report.digest_s = self._timings.load_s, self._timings.digest_s
        report.pause_s = self._timings.pause_s
        report.total_s = time.monotonic() - began

    def _announce(self) -> None:
        subscribers, manifest = self._hub.subscribers, self._gatherer.manifest

        async def announce() -> list[Engine]:
            lacking = subscribers.lacking(self._job.version)
            return await subscribers.announce(self._job.version, manifest.nbytes, manifest.to_bytes(), lacking)

        self._engines = self._hub.start(announce()).result()

    def _phase(self, name: str, *arguments: Any) -> None:
        work = getattr(self._hub.subscribers, name)(*arguments, self._engines, self._timings)
        self._engines = self._hub.start(work).result()

    def _send(self) -> list[int]:
        """Gather and send all buckets; returns the digests of what was sent."""
        began = time.monotonic()
        specs = self._gatherer.manifest.specs
        sent: list[int] = []
        for bucket in self._gatherer.buckets:
            origin = specs[bucket.start].offset
            place = self._window.take(self._gatherer.bucket_bytes(bucket))
            stream = self._gatherer.gather(bucket, self._job.locals, place)
            assert stream is not None
            if self._gatherer.world > 1:
                sent += tensor_digests(specs[i].view(stream, origin) for i in bucket)
            self._submit(origin, stream)
        shards = self._gatherer.shard_digests()
        self._report.gather_s = time.monotonic() - began
        self._job.gathered.set()
        self._window.drain()
        self._engines = [engine for engine in self._engines if not engine.dropped]
        assert shards is not None
        if self._gatherer.world > 1 and sent != shards:
            wrong = [spec.name for spec, a, b in zip(specs, sent, shards, strict=True) if a != b]
            raise GatherMismatch(self._job.version, wrong)
        return shards

    def _submit(self, origin: int, stream: Tensor) -> None:
        if stream.device.type == "cuda":
            torch.cuda.current_stream(stream.device).synchronize()  # other processes and streams are to read it
        moved = self._hub.subscribers.move(self._job.version, origin, stream, self._engines)
        self._window.lend(self._hub.start(moved))
