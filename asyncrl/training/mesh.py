"""Where this trainer rank runs: its device, its place among the ranks and its process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.schema import Config
from asyncrl.training.errors import BatchError


@dataclass(frozen=True)
class Mesh:
    """``control`` is a gloo group (None in a world of one): small facts travel there, never over NCCL."""

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    devices: DeviceMesh | None = None

    def gather_rows(self, row: Tensor) -> Tensor:
        """This rank's vector (K,) -> all ranks' (R, K) on the CPU, the same on every rank."""
        row = row.detach().to("cpu")
        if self.world_size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self.control)
        return torch.stack(rows)

    def agree(self, value: int, what: str) -> None:
        """Raises :class:`BatchError` on every rank unless all have the same ``value``."""
        values = self.gather_rows(torch.tensor([value]))[:, 0].tolist()
        if len(set(values)) > 1:
            raise BatchError(f"ranks disagree on {what}: {values}")


def needed_backend(cfg: Config, world_size: int) -> str | None:
    """The ``torch.distributed`` backend to initialise before :func:`open_mesh`; None if the trainer needs none."""
    if torch.cuda.is_available():
        return "cpu:gloo,cuda:nccl"
    mixed = cfg.model.compute_dtype != cfg.trainer.master_dtype  # FSDP2 does mixed precision, on one rank too
    return "gloo" if world_size > 1 or mixed else None


def open_mesh(rank: int, world_size: int, device: torch.device | None = None) -> Mesh:
    """The mesh of a torchrun rank. In a world of more than one the default process group must exist.

    ``device`` defaults to this local rank's GPU, or the CPU. A world of one has a device mesh only if there is a
    default process group (see :func:`needed_backend`).
    """
    if device is None:
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready = dist.is_available() and dist.is_initialized()
    if world_size > 1 and not ready:
        raise RuntimeError("init_process_group must come before open_mesh when there is more than one trainer rank")
    devices = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",)) if ready else None
    control = None
    if world_size > 1:
        on_cpu = device.type == "cpu" and dist.get_backend() == "gloo"
        control = dist.group.WORLD if on_cpu else dist.new_group(backend="gloo")
    return Mesh(rank, world_size, device, control, devices)
