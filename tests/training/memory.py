"""Counts the memory of tensors, without a clock and without the operating system."""

from __future__ import annotations

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes of storages that live at once; those mapped from a file are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = (t.to_local() if isinstance(t, DTensor) else t for t in tree_leaves((args, kwargs)))
        inputs = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            t = t.to_local() if isinstance(t, DTensor) else t
            if isinstance(t, torch.Tensor) and t.device.type != "meta":
                self._note(t.untyped_storage(), inputs)
        return out

    def _note(self, storage, inputs) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in inputs or key in self._known or not size:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
