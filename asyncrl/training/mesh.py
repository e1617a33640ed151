"""Where this trainer rank runs: its device, its place among the ranks and its process groups.

Ranks form a mesh ``dp_replicate x dp_shard x tp``, ``tp`` innermost. The ``tp`` peers of a data rank train the same
micro-batches: what is counted over data is counted on the first of them (:meth:`Mesh.data_rows`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.lora import held_dtype
from asyncrl.config.parallel import MeshSizes, mesh_sizes
from asyncrl.config.schema import Config, ParallelConfig
from asyncrl.training.errors import BatchError

ONE_RANK = MeshSizes()


@dataclass(frozen=True)
class Mesh:
    """``control`` is a gloo group (None in a world of one): small facts travel there, never over NCCL.

    ``devices`` has the dimension ``dp_shard``, and ``dp_replicate`` before and ``tp`` after it if they are used.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    devices: DeviceMesh | None = None
    sizes: MeshSizes = ONE_RANK

    @property
    def data_rank(self) -> int:
        """Number of this rank among those that train different micro-batches; its ``tp`` peers have the same."""
        return self.rank // self.sizes.tp

    @property
    def data_ranks(self) -> int:
        return self.sizes.data

    @property
    def data_devices(self) -> DeviceMesh | None:
        """The mesh that FSDP2 shards over (1-D), or copies and shards over (2-D)."""
        if self.devices is None or self.sizes.tp == 1:
            return self.devices
        return self.devices[("dp_replicate", "dp_shard") if self.sizes.replicate > 1 else "dp_shard"]

    @property
    def tp_devices(self) -> DeviceMesh | None:
        """The 1-D mesh of this rank and its tensor-parallel peers; None if nothing is split."""
        return None if self.devices is None or self.sizes.tp == 1 else self.devices["tp"]

    def gather_rows(self, row: Tensor) -> Tensor:
        """This rank's vector (K,) -> all ranks' (R, K) on the CPU, the same on every rank."""
        row = row.detach().to("cpu")
        if self.world_size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row, group=self.control)
        return torch.stack(rows)

    def data_rows(self, row: Tensor) -> Tensor:
        """Like :meth:`gather_rows`, one row a data rank: ``tp`` peers, who see the same data, count once."""
        return self.gather_rows(row)[:: self.sizes.tp]

    def agree(self, value: int, what: str) -> None:
        """Raises :class:`BatchError` on every rank unless all have the same ``value``."""
        values = self.gather_rows(torch.tensor([value]))[:, 0].tolist()
        if len(set(values)) > 1:
            raise BatchError(f"ranks disagree on {what}: {values}")


def needed_backend(cfg: Config, world_size: int) -> str | None:
    """The ``torch.distributed`` backend to initialise before :func:`open_mesh`; None if the trainer needs none."""
    if torch.cuda.is_available():
        return "cpu:gloo,cuda:nccl"
    mixed = cfg.model.compute_dtype != held_dtype(cfg)  # FSDP2 does mixed precision, on one rank too
    return "gloo" if world_size > 1 or mixed else None


def open_mesh(
    rank: int, world_size: int, device: torch.device | None = None, parallel: ParallelConfig | None = None
) -> Mesh:
    """The mesh of a torchrun rank. In a world of more than one the default process group must exist.

    ``parallel`` gives its sizes (default: everything is sharded over all ranks); raises ``ValueError`` if they do not
    multiply to ``world_size``. ``device`` defaults to this local rank's GPU, or the CPU. A world of one has a device
    mesh only if there is a default process group (see :func:`needed_backend`).
    """
    if device is None:
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready = dist.is_available() and dist.is_initialized()
    if world_size > 1 and not ready:
        raise RuntimeError("init_process_group must come before open_mesh when there is more than one trainer rank")
    sizes = mesh_sizes(parallel or ParallelConfig(), world_size)
    devices = _device_mesh(device, sizes) if ready else None
    control = None
    if world_size > 1:
        on_cpu = device.type == "cpu" and dist.get_backend() == "gloo"
        control = dist.group.WORLD if on_cpu else dist.new_group(backend="gloo")
    return Mesh(rank, world_size, device, control, devices, sizes)


def _device_mesh(device: torch.device, sizes: MeshSizes) -> DeviceMesh:
    every = {"dp_replicate": sizes.replicate, "dp_shard": sizes.shard, "tp": sizes.tp}
    used = {name: size for name, size in every.items() if size > 1 or name == "dp_shard"}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
