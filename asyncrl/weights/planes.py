"""Data planes: how a bucket of gathered bytes gets from the publisher into an engine's staging buffer.

The four phases of ``messages`` are the same for all; a plane moves bytes between announce and verify, and nothing else.

    zmq    in messages, through host memory: any machine, any device, CURVE-encrypted where keys are given
    ipc    the engine copies out of the trainer's memory: both on one GPU, no byte leaves it
    nccl   a broadcast from GPU to GPU: trainer and engine on different GPUs, of one machine or of several

Each has two halves. ``SendingPlane`` belongs to the publisher, ``ReceivingPlane`` to one worker of an engine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from asyncrl.transport.frames import Message
from asyncrl.transport.links import Listener
from asyncrl.weights.manifest import Staged

if TYPE_CHECKING:
    from asyncrl.weights.subscribers import Engine


class SendingPlane(ABC):
    """The publisher's half. ``memory`` is called in the publisher's thread, everything else on the hub's loop.

    What a method raises from ``TransportError`` costs the engine its place; anything else ends the publisher.
    """

    _listener: Listener
    _deadline_s: float

    def attach(self, listener: Listener, deadline_s: float) -> None:
        """Called once, before anything else: the links to the engines, and how long one move may take."""
        self._listener, self._deadline_s = listener, deadline_s

    def memory(self, nbytes: int, device: torch.device) -> Tensor | None:
        """Memory (uint8) from which all buckets are to leave; None: each leaves from host memory of its own.

        ``device`` is where the parameters are.
        """
        return None

    async def invite(self, engine: Engine) -> bytes:
        """What the announcement must tell the engine's workers for them to ``join``; empty if they need nothing."""
        return b""

    async def meet(self, engine: Engine) -> None:
        """The publisher's part of what workers do in ``join``; runs while they do it."""
        return

    @abstractmethod
    async def move(self, engine: Engine, version: int, offset: int, data: Tensor) -> None:
        """Bring ``data`` (uint8, complete on its device) to byte ``offset`` of all workers' staging buffers.

        Returns when all have it. Calls for one engine may overlap, and their bytes arrive in the order of the calls.
        """

    def leave(self, engine: Engine) -> None:
        """The engine has gone or begun anew: give up what is under way with it. Returns at once."""
        return


class ReceivingPlane(ABC):
    """One worker's half. Belongs to the receiving thread, apart from ``close``."""

    kind: ClassVar[str]  # of the messages it takes

    @abstractmethod
    def staging(self, nbytes: int) -> Tensor:
        """A staging buffer, uint8."""

    def join(self, ticket: bytes) -> None:
        """Begin anew with what ``SendingPlane.invite`` made. Called only if that is not empty."""
        return

    @abstractmethod
    def receive(self, staged: Staged, message: Message) -> None:
        """Fill in what the message brings or announces; the bytes are there when it returns.

        Raises ``TransportError``; the version has then failed.
        """

    def close(self) -> None:
        """End ``join`` and ``receive``, from any thread."""
        return


class ZmqSending(SendingPlane):
    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    async def move(self, engine: Engine, version: int, offset: int, data: Tensor) -> None:
        array = data.numpy()
        sends = [
            self._listener.send(
                worker, "chunk", {"version": version, "offset": offset + begin},
                [array[begin : begin + self._chunk_bytes]], deadline_s=self._deadline_s, wait="acked",
            )
            for begin in range(0, len(array), self._chunk_bytes)
            for worker in engine.workers.values()
        ]  # fmt: skip
        await asyncio.gather(*sends)


class ZmqReceiving(ReceivingPlane):
    kind = "chunk"

    def __init__(self, *, pin: bool = False) -> None:
        """``pin``: page-locked memory, for a fast copy to a GPU."""
        self._pin = pin

    def staging(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)

    def receive(self, staged: Staged, message: Message) -> None:
        staged.write(message.header["offset"], message.buffers[0])


def sending_plane(backend: str, chunk_bytes: int) -> SendingPlane:
    """The publisher's half of ``weights.backend``."""
    match backend:
        case "ipc":
            from asyncrl.weights.ipc import IpcSending

            return IpcSending()
        case "nccl":
            from asyncrl.weights.groups import GroupSending
            from asyncrl.weights.nccl import NcclGroup

            return GroupSending(NcclGroup)
    return ZmqSending(chunk_bytes)


def receiving_plane(backend: str, device: torch.device, rank: int, workers: int, deadline_s: float) -> ReceivingPlane:
    """The half of worker ``rank`` of ``workers``, whose model is on ``device``."""
    match backend:
        case "ipc":
            from asyncrl.weights.ipc import IpcReceiving

            return IpcReceiving(device)
        case "nccl":
            from asyncrl.weights.groups import GroupReceiving
            from asyncrl.weights.nccl import NcclGroup

            return GroupReceiving(NcclGroup, device, rank, workers, deadline_s)
    return ZmqReceiving(pin=device.type == "cuda")
