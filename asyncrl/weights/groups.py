"""The nccl plane: each bucket is broadcast from the publisher's GPU into the staging buffers of an engine's workers.

Every engine has a group of its own, of the publisher (rank 0) and its workers, made at the announcement when there is
none: a new or restarted engine gets one at the next announcement, and the groups of the others stay as they are. So a
dead engine ends its own broadcasts only; one group of all engines would leave the rest without the version, with nobody
able to say which of them had stopped. The price is that the publisher sends every byte once an engine.

Invariants:
- blocking calls on a group come from one thread of its own, never from the thread of the links;
- every call has a deadline, and ``abort`` ends it at once: neither waits for a peer that does not come.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.transport.errors import ProtocolError
from asyncrl.transport.frames import Message
from asyncrl.weights.errors import PlaneFailed
from asyncrl.weights.manifest import Staged
from asyncrl.weights.planes import ReceivingPlane, SendingPlane

if TYPE_CHECKING:
    from asyncrl.weights.subscribers import Engine


class Group(ABC):
    """A communicator whose rank 0 broadcasts. Calls come from one thread, ``abort`` from any."""

    @abstractmethod
    def ticket(self) -> bytes:
        """Rank 0: what all ranks need for ``open``; never empty."""

    @abstractmethod
    def open(self, ticket: bytes, rank: int, size: int, deadline_s: float) -> None:
        """Returns when all ranks are here. Raises ``PlaneFailed``."""

    @abstractmethod
    def broadcast(self, data: Tensor, deadline_s: float) -> None:
        """Rank 0's ``data`` (uint8) to the same-sized ``data`` of the others; returns when this rank's part is done.

        Raises ``PlaneFailed``; the group must then be aborted.
        """

    @abstractmethod
    def abort(self) -> None:
        """Free the group; ``open`` and ``broadcast`` under way end with ``PlaneFailed``. A second call does nothing."""


class Line:
    """One engine's group and the thread that makes its blocking calls, in the order of ``run``."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name
        self.ticket = b""
        self.opened = False
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"weights to {name}", daemon=True).start()

    def run(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Have the thread make a call; returns at once."""
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: call(*arguments)))
        return asyncio.wrap_future(future)

    def end(self) -> None:
        """Abort the group and end the thread; returns at once."""
        self._jobs.put(None)
        threading.Thread(target=self.group.abort, name=f"end of weights to {self.name}", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised again where the future is awaited
                future.set_exception(error)


class GroupSending(SendingPlane):
    def __init__(self, make: Callable[[torch.device], Group]) -> None:
        self._make, self._device = make, torch.device("cpu")

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        self._device = device
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    async def invite(self, engine: Engine) -> bytes:
        if engine.line is not None:
            return b""
        line = engine.line = Line(self._make(self._device), engine.name)
        line.ticket = await line.run(line.group.ticket)
        return line.ticket

    async def meet(self, engine: Engine) -> None:
        line = self._line(engine)
        if not line.opened:
            await line.run(line.group.open, line.ticket, 0, 1 + len(engine.workers), self._deadline_s)
            line.opened = True

    async def move(self, engine: Engine, version: int, offset: int, data: Tensor) -> None:
        line = self._line(engine)
        header = {"version": version, "offset": offset, "bytes": data.numel()}
        await asyncio.gather(
            line.run(line.group.broadcast, data, self._deadline_s),
            *(
                self._listener.send(worker, "broadcast", header, deadline_s=self._deadline_s, wait="acked")
                for worker in engine.workers.values()
            ),
        )

    def leave(self, engine: Engine) -> None:
        line, engine.line = engine.line, None
        if line is not None:
            line.end()

    @staticmethod
    def _line(engine: Engine) -> Line:
        if engine.line is None:
            raise PlaneFailed(f"{engine.name} began anew in the middle of a version")
        return engine.line


class GroupReceiving(ReceivingPlane):
    kind = "broadcast"

    def __init__(
        self, make: Callable[[torch.device], Group], device: torch.device, rank: int, workers: int, deadline_s: float
    ) -> None:
        """``rank`` of the ``workers`` of the engine. ``deadline_s``: for the group to form, and for each bucket."""
        self._make, self._device = make, device
        self._rank, self._size, self._deadline_s = 1 + rank, 1 + workers, deadline_s
        self._group: Group | None = None

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def join(self, ticket: bytes) -> None:
        self.close()
        self._group = group = self._make(self._device)
        group.open(ticket, self._rank, self._size, self._deadline_s)

    def receive(self, staged: Staged, message: Message) -> None:
        header, group = message.header, self._group
        if group is None:
            raise ProtocolError(f"version {staged.version}: a broadcast came and no group was announced")
        group.broadcast(staged.place(header["offset"], header["bytes"]), self._deadline_s)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
