"""Copies of tensors in host memory, pinned for a GPU, in slabs that are kept for the next copy.

Fresh memory costs more than the copy into it: a page fault every 4 KiB, or a registration with the driver. Slabs, not a
buffer a tensor: torch's pinned allocator rounds every request up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SLAB_BYTES = 256 << 20
ALIGNMENT = 64


class HostMemory:
    """The slabs of one rank. ``copy`` is for the thread that trains, ``Copies.release`` for any other."""

    def __init__(self, device: torch.device, slab_bytes: int = SLAB_BYTES) -> None:
        self.device, self.slab_bytes = device, slab_bytes
        self.pinned = device.type == "cuda"
        self._free: list[Tensor] = []

    def copy(self, live: Mapping[str, Tensor]) -> Copies:
        """Returns when nothing of the copy depends on ``live`` any more; a GPU is waited for once."""
        copies = Copies(self)
        left = sum(map(_aligned, live.values()))
        slab, begin = torch.empty(0, dtype=torch.uint8), 0
        for key, tensor in live.items():
            size = _aligned(tensor)
            if begin + size > slab.numel():
                slab, begin = self._slab(max(size, min(left, self.slab_bytes))), 0
                copies.slabs.append(slab)
            place = slab[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.tensors[key] = place.copy_(tensor.detach(), non_blocking=self.pinned)
            begin += size
            left -= size
        if self.pinned:
            torch.cuda.current_stream(self.device).synchronize()
        return copies

    def _slab(self, size: int) -> Tensor:
        """One of exactly ``size`` bytes. Others that are free are of a state that has changed since: they go."""
        while self._free:
            slab = self._free.pop(0)
            if slab.numel() == size:
                return slab
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)

    def put_back(self, slabs: list[Tensor]) -> None:
        self._free += slabs


class Copies:
    """``tensors`` by key, until ``release``."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.tensors: dict[str, Tensor] = {}
        self.slabs: list[Tensor] = []

    def release(self) -> None:
        """The next copy may use the memory; a second call does nothing."""
        self.tensors.clear()
        slabs, self.slabs = self.slabs, []
        self.memory.put_back(slabs)


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
