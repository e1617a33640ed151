"""Seconds, tokens and peak memory of one process, from the moment it has loaded; imports torch for a GPU only.

Used by the processes that benchmarks start, the peer's too, so that both sides are measured by the same lines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Meter:
    """``start`` when model and data are loaded, ``step`` after each optimizer step, then ``result``.

    On a GPU memory is what tensors take there (``torch.cuda.max_memory_allocated``); without one the high-water mark
    of the process's resident memory, which ``start`` resets.
    """

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu
        self.loaded = self.peak = 0
        self.rows: list[dict[str, float]] = []
        self._began = self._began_cpu = 0.0

    def start(self) -> None:
        """Raises ``OSError`` where the system does not let a process reset its high-water mark."""
        if self.gpu:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.loaded = torch.cuda.memory_allocated()
        else:
            CLEAR.write_text("5")
            self.loaded = resident_bytes("VmRSS")
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def step(self, **figures: float) -> None:
        """One optimizer step has ended, of which ``figures`` are known."""
        self.peak = self._peak()
        now, cpu = time.perf_counter() - self._began, time.process_time() - self._began_cpu
        self.rows.append({"time_s": now, "cpu_s": cpu, **figures})

    def add(self, **figures: float) -> None:
        """More figures of the newest step."""
        self.rows[-1] |= figures

    def result(self) -> dict[str, Any]:
        return {"steps": self.rows, "loaded_bytes": self.loaded, "peak_bytes": self.peak}

    def _peak(self) -> int:
        if not self.gpu:
            return resident_bytes("VmHWM")
        import torch

        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (most since it was reset) of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def digest(conversations: Iterable[tuple[list[int], list[bool]]]) -> str:
    """Of conversations in order: their tokens, and which of them are learnt."""
    found = hashlib.sha256()
    for ids, learnt in conversations:
        found.update(json.dumps([ids, [place for place, wanted in enumerate(learnt) if wanted]]).encode())
    return found.hexdigest()
