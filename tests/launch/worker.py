"""Run by torchrun in test_context.py: two jobs, each with a process group of its own over torchrun's store."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.config.context import Place, RunContext, lead_context


def main(root: Path, jobs: int) -> None:
    place = Place.from_environment()
    for job in range(jobs):
        if place.rank == 0:
            context = lead_context(place, root / f"job{job}", job, 60.0, {"folder": f"job{job}"})
            assert "torch" not in sys.modules or job > 0, "rank 0 can start children before it imports torch"
        else:
            context = RunContext(place, Path(), job, 60.0)
        context.init_process_group("gloo", timeout_s=60.0)

        import torch
        import torch.distributed as dist

        total = torch.tensor([float(10**place.rank)])
        dist.all_reduce(total)
        folder = context.await_published("folder", 60.0)
        print(f"rank {place.rank} job {job} folder {folder} sum {total.item():g}", flush=True)
        context.close()
        assert not dist.is_initialized()


main(Path(sys.argv[1]), int(sys.argv[2]))
