"""FSDP2 over the data ranks of the mesh, and the plain alternatives.

===========  =============================================================================================
``sharded``  FSDP2, one unit a decoder layer and a root unit: master weights, gradients and optimizer state
             are sharded over ``dp_shard`` and copied over ``dp_replicate`` (HSDP), each layer split over
             ``tp`` before; compute may be bf16 (gathered in bf16, gradients reduced in fp32)
``whole``    every rank holds everything; gradients are summed once a step in one flat buffer
===========  =============================================================================================

Gradients are *summed* over ranks, never averaged: the loss is divided by a global denominator already.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from asyncrl.config.lora import held_dtype
from asyncrl.config.schema import Config
from asyncrl.training import float8
from asyncrl.training.errors import ModelError
from asyncrl.training.levers import pull
from asyncrl.training.loading import read_weights
from asyncrl.training.mesh import Mesh
from asyncrl.training.model import DTYPES, Policy, layers
from asyncrl.training.tensor_parallel import split


def distribute(policy: Policy, mesh: Mesh, cfg: Config) -> bool:
    """Moves the policy to the mesh in place: splits, shards, and reads its weights if it has none yet.

    True if FSDP2 shards it. A world of one that computes in the dtype of its weights stays a plain module, where FSDP2
    only costs time. Raises :class:`ModelError` for a model that cannot be laid over this mesh.
    """
    compute, held = DTYPES[cfg.model.compute_dtype], next(policy.parameters()).dtype
    master = next((p.dtype for p in policy.parameters() if p.requires_grad), held)
    sharded = shards(cfg, mesh)
    eight_bits = cfg.model.compute_dtype == "float8"
    if eight_bits:
        float8.check_device(mesh.device)
        for layer in layers(policy.lm):
            float8.convert(layer)
    if mesh.tp_devices is not None:
        split(policy.lm, mesh.tp_devices, float8.linear if eight_bits else F.linear)
    if eight_bits:
        for layer in layers(policy.lm):
            float8.check_sizes(layer)
    pull(policy.lm, cfg.trainer, compute, mesh.device, policy.adapters.remember if policy.adapters else nullcontext)
    if not sharded:
        if policy.unread is not None:
            raise ModelError("a policy without weights is only read in shards; load it with load_policy")
        policy.to(mesh.device)
        if compute != held:
            raise ModelError(
                f"compute dtype {compute} with {held} masters needs FSDP2: trainer.shard=true if there are several "
                "ranks, and a process group"
            )
        return False
    # Frozen weights are held in the compute dtype, and adapters take part in it by themselves.
    precision = MixedPrecisionPolicy(param_dtype=compute if compute != held else None, reduce_dtype=master)
    options: dict[str, Any] = {"mesh": mesh.data_devices, "mp_policy": precision}
    if cfg.trainer.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in layers(policy.lm):
        fully_shard(layer, **options)  # moves one unit at a time: the whole model never lies on one device
    # What goes into the policy is token ids, and log-probs, advantages and weights for the loss, which stay exact.
    fully_shard(policy, **options | {"mp_policy": replace(precision, cast_forward_inputs=False)})
    register_fsdp_forward_method(policy, "next_tokens")
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if mesh.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            module.set_gradient_divide_factor(1.0)
    if policy.unread is not None:
        read_weights(policy, mesh.device, torch.device("cpu") if cfg.trainer.cpu_offload else mesh.device)
    return True


def shards(cfg: Config, mesh: Mesh) -> bool:
    """Whether FSDP2 holds the parameters of a trainer of ``cfg`` on ``mesh``."""
    several = mesh.world_size > 1
    alone = DTYPES[cfg.model.compute_dtype] != DTYPES[held_dtype(cfg)] or cfg.trainer.cpu_offload
    wanted = cfg.trainer.shard if several else alone
    return wanted and mesh.devices is not None


def local(x: Tensor) -> Tensor:
    """The part of a tensor that lives on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def sum_gradients(parameters: list[nn.Parameter], mesh: Mesh) -> None:
    """All-reduces whole gradients in one flat buffer (``whole`` mode). A missing gradient counts as zero."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dist.all_reduce(flat)
    offset = 0
    for p in parameters:
        p.grad = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
