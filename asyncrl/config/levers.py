"""Levers of memory and speed that do not work together, or not on this machine; refused before anything starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.errors import Problem
from asyncrl.config.lora import linear_shapes
from asyncrl.config.machine import compute_capability
from asyncrl.config.schema import Config

FLOAT8_CAPABILITY = (8, 9)
FLOAT8_MULTIPLE = 16
# Tensor parallelism splits the columns of these layers and the rows of all others.
ROWWISE = ("o_proj", "down_proj", "dense", "fc2")
COMPILERS = ("g++", "c++", "clang++")


def recomputed_every(choice: str) -> int:
    """Of how many layers one is recomputed whole: ``full`` 1, ``every_K`` K, otherwise 0. Raises ``ValueError``."""
    if choice in ("none", "selective"):
        return 0
    if choice == "full":
        return 1
    kind, _, number = choice.partition("_")
    if kind != "every" or not number.isdigit() or int(number) < 1:
        raise ValueError(f"{choice!r} is not a choice")
    return int(number)


def check_levers(config: Config, gpus: int) -> Iterator[Problem]:
    """Each lever where it works, and with what it works."""
    trainer, model = config.trainer, config.model
    key = "trainer.activation_checkpointing"
    try:
        recomputed_every(trainer.activation_checkpointing)
    except ValueError as error:
        yield Problem(key, str(error), "none, full, every_2 (any number) or selective")
    if gpus == 0:
        yield from _without_gpu(config)
    if model.compute_dtype == "float8":
        yield from _float8(config, gpus)
    if trainer.compile:
        yield from _compiled(config)
    if trainer.cpu_offload:
        yield from _offloaded(config)


def _without_gpu(config: Config) -> Iterator[Problem]:
    for name, what in (("activation_offload", "activations"), ("cpu_offload", "weights and optimizer state")):
        if getattr(config.trainer, name):
            yield Problem(
                f"trainer.{name}", f"without a GPU {what} are in host memory already", f"trainer.{name}=false"
            )


def _float8(config: Config, gpus: int) -> Iterator[Problem]:
    capability = compute_capability() if gpus else None
    if gpus == 0 or (capability is not None and capability < FLOAT8_CAPABILITY):
        here = "this machine has no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        yield Problem(
            "model.compute_dtype",
            f"float8 products need a GPU of compute capability 8.9 or more (Ada, Hopper and later), and {here}",
            "model.compute_dtype=bfloat16" if gpus else "model.compute_dtype=float32",
        )
    if config.trainer.master_dtype != "float32":
        yield Problem(
            "trainer.master_dtype", "float8 products keep their weights in float32", "trainer.master_dtype=float32"
        )
    odd = _odd_size(config)
    if odd:
        yield Problem(
            "model.compute_dtype",
            f"float8 products need sizes that are multiples of {FLOAT8_MULTIPLE}, and {odd}",
            "model.compute_dtype=bfloat16" + (", or a smaller parallel.tp" if config.parallel.tp > 1 else ""),
        )


def _odd_size(config: Config) -> str:
    """The first layer of the model's folder whose part on a rank has no size for fp8 products, in words; or ""."""
    if not config.model.path:
        return ""
    folder, tp = Path(config.model.path), config.parallel.tp
    for name, (rows, columns) in linear_shapes(folder).items():
        ending = name.rpartition(".")[2]
        here = (rows, -(-columns // tp)) if ending in ROWWISE else (-(-rows // tp), columns)
        if here[0] % FLOAT8_MULTIPLE or here[1] % FLOAT8_MULTIPLE:
            return f"{name} is {here[0]} x {here[1]}" + (" on a rank" if tp > 1 else "")
    return ""


def _compiled(config: Config) -> Iterator[Problem]:
    trainer = config.trainer
    if config.model.compute_dtype == "float64":
        yield Problem(
            "trainer.compile",
            "float64 replaces the fp32 parts of transformers' layers call by call, which compiled code does not see",
            "trainer.compile=false",
        )
    if trainer.activation_checkpointing == "selective":
        yield Problem(
            "trainer.activation_checkpointing",
            "selective keeps single products, which compiled code fuses with what is around them",
            "full or every_2 with trainer.compile=true, or trainer.compile=false",
        )
    if config.parallel.tp > 1:
        yield Problem(
            "trainer.compile",
            "torch.compile has not been tried on layers that are split over ranks",
            "parallel.tp=1, or trainer.compile=false",
        )
    compiler = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([compiler] if compiler else COMPILERS)):
        yield Problem("trainer.compile", "torch.compile needs a C++ compiler and none is found", "install g++")


def _offloaded(config: Config) -> Iterator[Problem]:
    if not config.trainer.shard:
        yield Problem(
            "trainer.cpu_offload", "it is FSDP2 that offloads, and trainer.shard is false", "trainer.shard=true"
        )
    if config.parallel.tp > 1:
        yield Problem(
            "trainer.cpu_offload",
            "FSDP2's offload has not been tried on layers that are split over ranks",
            "parallel.tp=1, or trainer.cpu_offload=false",
        )
    if config.optim.in_backward:
        yield Problem(
            "trainer.cpu_offload",
            "optim.in_backward has not been tried on gradients that go to host memory while the backward pass goes on",
            "optim.in_backward=false, or trainer.cpu_offload=false",
        )
    if config.optim.name == "muon":
        yield Problem(
            "trainer.cpu_offload",
            "optim.name=muon gathers whole matrices between GPUs, and they would be in host memory",
            "optim.name=adamw or sgd, or trainer.cpu_offload=false",
        )
    if config.mode == "grpo" and config.weights.backend != "zmq":
        yield Problem(
            "trainer.cpu_offload",
            f"weights.backend={config.weights.backend} sends weights from the GPU, and they would be in host memory",
            "weights.backend=zmq, or trainer.cpu_offload=false",
        )
