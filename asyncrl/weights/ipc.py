"""The ipc plane: engine and trainer share a GPU, and the engine copies out of the trainer's memory.

The publisher keeps one ring of device memory. A ``lent`` message says where in the ring a bucket lies, and how the CUDA
driver finds the ring: the raw fields of its handle, no pickle. The worker opens the ring once, copies the bucket into
its staging buffer, waits for the copy and acknowledges; only then does the publisher use the place again.

Invariants:
- the publisher has waited for the bytes before it lends them, so no CUDA event crosses processes;
- each worker gets a handle of its own, as torch counts in it who still has the memory open.
"""

from __future__ import annotations

import asyncio
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


def gpu_id(device: torch.device) -> str:
    """The name that a GPU has in every process, whatever CUDA_VISIBLE_DEVICES makes of its number."""
    return str(torch.cuda.get_device_properties(device).uuid)


class IpcSending(SendingPlane):
    def __init__(self) -> None:
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._gpu = ""

    def memory(self, nbytes: int, device: torch.device) -> Tensor:
        """Raises ``RuntimeError`` if the parameters are not on a GPU."""
        if device.type != "cuda":
            raise RuntimeError(f"weights.backend=ipc, but the trainer's parameters are on {device}; set it to zmq")
        self._ring = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._gpu = gpu_id(device)
        return self._ring

    async def move(self, engine: Engine, version: int, offset: int, data: Tensor) -> None:
        if engine.line is None:
            engine.line = {worker: self.share() for worker in engine.workers.values()}
        lent = {
            "version": version, "offset": offset, "bytes": data.numel(), "at": data.storage_offset(), "gpu": self._gpu
        }  # fmt: skip
        await asyncio.gather(
            *(
                self._listener.send(worker, "lent", {**lent, **handle}, deadline_s=self._deadline_s, wait="acked")
                for worker, handle in engine.line.items()
            )
        )

    def leave(self, engine: Engine) -> None:
        engine.line = None

    def share(self) -> dict[str, Any]:
        """A new handle of the ring, as the fields of ``lent``."""
        _, handle, size, start, counter, counter_at, _, _ = self._ring.untyped_storage()._share_cuda_()
        return {"handle": handle, "size": size, "start": start, "counter": counter, "counter_at": counter_at}


class IpcReceiving(ReceivingPlane):
    kind = "lent"

    def __init__(self, device: torch.device) -> None:
        self._device, self._gpu = device, gpu_id(device)
        self._stream = torch.cuda.Stream(device)
        self._ring = torch.empty(0, dtype=torch.uint8)
        self._ring_handle: Any = None

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def receive(self, staged: Staged, message: Message) -> None:
        header = message.header
        if header["gpu"] != self._gpu:
            raise PlaneFailed(
                f"weights.backend=ipc needs trainer rank 0 and the engine on one GPU, but they are on {header['gpu']} "
                f"and {self._gpu}; use nccl or zmq"
            )
        at, nbytes = header["at"], header["bytes"]
        if at < 0 or nbytes < 0 or at + nbytes > header["size"]:
            raise ProtocolError(f"lent: bytes {at} to {at + nbytes} of a memory of {header['size']}")
        self.copy(staged.place(header["offset"], nbytes), self._opened(header)[at : at + nbytes])

    def close(self) -> None:
        self._ring, self._ring_handle = torch.empty(0, dtype=torch.uint8), None

    def _opened(self, header: dict[str, Any]) -> Tensor:
        key = (header["handle"], header["start"], header["size"], header["counter"], header["counter_at"])
        if key != self._ring_handle:
            self.close()
            try:
                self._ring = self.open(header)
            except RuntimeError as error:  # the driver's refusal
                raise PlaneFailed(f"the trainer's memory cannot be opened here: {error}") from error
            self._ring_handle = key
        return self._ring

    def open(self, header: dict[str, Any]) -> Tensor:
        """The ring that ``IpcSending.share`` made the handle of."""
        with torch.cuda.stream(self._stream):
            storage = torch.UntypedStorage._new_shared_cuda(
                self._device.index or 0, header["handle"], header["size"], header["start"],
                header["counter"], header["counter_at"], b"", False,
            )  # fmt: skip
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (header["size"],), (1,))

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Returns when the bytes are there."""
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        self._stream.synchronize()
