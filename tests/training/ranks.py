"""Runs a function on real ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def _rank(
    function: Callable[..., Any], rank: int, world: int, backend: str, store: str, results: Any, args: tuple[Any, ...]
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    try:
        results.put((rank, True, function(rank, world, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise
    dist.destroy_process_group()


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo", timeout_s: float = 200.0
) -> list[Any]:
    """``function(rank, world, *args)`` on ``world`` ranks; the results (picklable, no tensors) by rank."""
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            spawn.Process(
                target=_rank, args=(function, r, world, backend, f"{folder}/store", results, args), daemon=True
            )
            for r in range(world)
        ]
        for w in workers:
            w.start()
        out: dict[int, Any] = {}
        try:
            while len(out) < world:
                rank, ok, value = results.get(timeout=timeout_s)
                assert ok, f"rank {rank} of {world} failed:\n{value}"
                out[rank] = value
        except queue.Empty:
            raise AssertionError(f"ranks {set(range(world)) - set(out)} of {world} gave no result") from None
        finally:
            for w in workers:
                w.join(timeout=20)
                if w.is_alive():
                    w.kill()
    return [out[r] for r in range(world)]
