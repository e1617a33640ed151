"""Forks real gloo ranks from one process that has imported torch once, which is most of what ranks cost.

``python -m tests.training.forks MODULE:FUNCTION WORLDS OUT ARGUMENT...`` runs ``FUNCTION(rank, world, *ARGUMENT)`` on
each of the comma-separated worlds in turn and pickles {world: [result by rank]} to OUT.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 280.0


def run_group(command: list[str], limit_s: float) -> None:
    """Runs a command that starts ranks. Fails with its output; kills all of them after ``limit_s``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"no end within {limit_s:g} s:\n{process.communicate()[0][-6000:]}") from None
    assert process.returncode == 0, output[-6000:]


def run_forks(function: str, worlds: tuple[int, ...], folder: Path, *arguments: str) -> dict[int, list[Any]]:
    """The results by world and rank. Fails with the output of a rank that fails."""
    out = folder / "results.pickle"
    command = [sys.executable, "-m", "tests.training.forks", function, ",".join(map(str, worlds)), str(out), *arguments]
    run_group(command, LIMIT_S)
    return pickle.loads(out.read_bytes())


def _rank(call: Any, rank: int, world: int, store: str, results: Any, arguments: list[str]) -> None:
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    results.send(call(rank, world, *arguments))  # a failure closes the pipe and is printed
    results.close()
    dist.destroy_process_group()


def main(function: str, worlds: str, out: str, arguments: list[str]) -> int:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    context = multiprocessing.get_context("fork")
    found: dict[int, list[Any]] = {}
    for world in map(int, worlds.split(",")):
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(call, r, world, f"{out}.store{world}", pipes[r][1], arguments))
            for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        for _, sending in pipes:
            sending.close()
        try:
            found[world] = [receiving.recv() for receiving, _ in pipes]
        except EOFError:
            for rank in ranks:
                rank.kill()
            return 1
        for rank in ranks:
            rank.join()
    Path(out).write_bytes(pickle.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
