"""Data planes by name. Those that need a GPU have a likeness on the CPU: the same code around another driver.

``gloo`` is the nccl plane over gloo; ``file`` is the ipc plane whose ring is a memory-mapped file.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.weights.errors import PlaneFailed
from asyncrl.weights.groups import Group, GroupReceiving, GroupSending
from asyncrl.weights.ipc import IpcReceiving, IpcSending
from asyncrl.weights.planes import ReceivingPlane, SendingPlane, receiving_plane, sending_plane


class GlooGroup(Group):
    """Gloo cannot be interrupted while it forms a group; everything else is as the interface says."""

    def __init__(self, device: torch.device) -> None:
        self._store: dist.Store | None = None
        self._group: Any = None
        self._aborted = False

    def ticket(self) -> bytes:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return str(self._store.port).encode()

    def open(self, ticket: bytes, rank: int, size: int, deadline_s: float) -> None:
        limit = timedelta(seconds=deadline_s)
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", int(ticket), is_master=False, timeout=limit)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        try:
            self._group = dist.ProcessGroupGloo(self._store, rank, size, options)
        except RuntimeError as error:
            raise PlaneFailed(f"gloo: {error}") from error

    def broadcast(self, data: Tensor, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = None if self._aborted else self._group.broadcast([data], options)
        while work is not None and not self._aborted and not work.is_completed():
            if time.monotonic() > end:
                raise PlaneFailed(f"waited {deadline_s:g} s for {data.numel()} bytes to be broadcast")
            time.sleep(1e-4)
        if self._aborted:
            raise PlaneFailed("the gloo group was given up")
        try:
            work.wait()
        except RuntimeError as error:
            raise PlaneFailed(f"gloo: {error}") from error

    def abort(self) -> None:
        self._aborted = True


class FileSending(IpcSending):
    """The name of the file takes the place of the CUDA driver's handle."""

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        self._gpu, self._folder = "CPU", tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "ring"
        self._ring = torch.from_file(str(self._path), shared=True, size=nbytes, dtype=torch.uint8)
        return self._ring

    def share(self) -> dict[str, Any]:
        name = str(self._path).encode()
        return {"handle": name, "size": self._ring.numel(), "start": 0, "counter": b"", "counter_at": 0}


class FileReceiving(IpcReceiving):
    def __init__(self, gpu: str = "CPU") -> None:
        self._device, self._gpu, self.opened = torch.device("cpu"), gpu, 0
        self._ring, self._ring_handle = torch.empty(0, dtype=torch.uint8), None

    def open(self, header: dict[str, Any]) -> Tensor:
        self.opened += 1
        return torch.from_file(header["handle"].decode(), shared=True, size=header["size"], dtype=torch.uint8)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)


def sending(name: str, chunk_bytes: int) -> SendingPlane:
    match name:
        case "gloo":
            return GroupSending(GlooGroup)
        case "file":
            return FileSending()
    return sending_plane(name, chunk_bytes)


def receiving(name: str, rank: int = 0, workers: int = 1, deadline_s: float = 20) -> ReceivingPlane:
    match name:
        case "gloo":
            return GroupReceiving(GlooGroup, torch.device("cpu"), rank, workers, deadline_s)
        case "file":
            return FileReceiving()
    device = torch.device("cpu") if name == "zmq" else torch.device("cuda", 0)
    return receiving_plane(name, device, rank, workers, deadline_s)
