"""``mode=multi_lora``: what an adapter of a pack may be, and in what the jobs that share a base may differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import reduce
from itertools import combinations
from typing import Any

from asyncrl.config.context import Place
from asyncrl.config.errors import Problem
from asyncrl.config.files import to_dict
from asyncrl.config.lora import lora_of
from asyncrl.config.schema import Config, PackingConfig

MAX_RANK = 128  # of the kernels' tiles
# Jobs that differ in these train on bases of their own, one pack after another.
BASE = ("model.path", "model.compute_dtype", "trainer.master_dtype")
# There is one of these in a pack.
SHARED = (
    *(f"packing.{field.name}" for field in fields(PackingConfig)),
    "algorithm.loss_head",
    "trainer.threads",
    "trainer.logprob_chunk",
    "trainer.vocab_chunk",
    "trainer.loss_chunk_bytes",
    "trainer.activation_checkpointing",
    "report.console",
    "run.root",
    "run.sweep_root",
)


def value_of(config: Config, key: str) -> Any:
    """What a dotted key is set to."""
    return reduce(getattr, key.split("."), config)


def base_of(config: Config) -> tuple[Any, ...]:
    """Equal for jobs that can share a base."""
    return tuple(value_of(config, key) for key in BASE)


def check_packed(config: Config, place: Place) -> Iterator[Problem]:
    """One job: what a slot can train."""
    try:
        lora = lora_of(config)
    except ValueError:
        return  # the check of model.adapter says what is wrong with it
    if lora is None:
        yield Problem("lora.rank", "is 0, and mode=multi_lora trains adapters", "lora.rank=8,16,32 with -m")
    elif lora.rank > MAX_RANK:
        yield Problem(
            "lora.rank", f"{lora.rank} is more than packed kernels hold", f"lora.rank={MAX_RANK} or less, or mode=sft"
        )
    if place.world_size > 1:
        yield Problem("--nproc-per-node", "a pack trains on one device in this version", "torchrun --nproc-per-node 1")
    if not config.model.path:
        yield Problem("model.path", "is empty, and adapters need a model to adapt", "give a model's folder")
    refused = {
        "lora.dora": lora is not None and lora.dora,
        "sft.loss": config.sft.loss != "likelihood",
        "optim.name": config.optim.name != "adamw",
        "optim.in_backward": config.optim.in_backward,
        "optim.clip": config.optim.clip == "delayed",
        "model.compute_dtype": config.model.compute_dtype == "float8",
        "trainer.compile": config.trainer.compile,
        "trainer.cpu_offload": config.trainer.cpu_offload,
        "trainer.activation_offload": config.trainer.activation_offload,
    }
    for key in (key for key, wanted in refused.items() if wanted):
        yield Problem(
            key,
            f"{str(value_of(config, key)).lower()} is not part of packed training in this version",
            f"leave {key} out, or train the adapters one after another (mode=sft)",
        )
    if config.trainer.master_dtype == "float64" and config.model.compute_dtype != "float64":
        yield Problem(
            "trainer.master_dtype",
            f"float64 adapters on a base in {config.model.compute_dtype}: their gradients would be float32",
            "trainer.master_dtype=float32, or model.compute_dtype=float64 too",
        )


def check_pack(configs: Sequence[Config], numbers: Sequence[int]) -> Iterator[Problem]:
    """All jobs of a sweep together. ``numbers``: theirs in it."""
    for key in SHARED:
        values = list(dict.fromkeys(str(value_of(config, key)) for config in configs))
        if len(values) > 1:
            yield Problem(
                key,
                f"jobs of one pack share it, and here it is {' and '.join(values[:3])}",
                f"one value: {key}={values[0]}",
            )
    for key, why in (("sft.export", "would replace each other's adapter"), ("run.name", "have one name")):
        seen: dict[str, int] = {}
        for number, config in zip(numbers, configs, strict=True):
            value = value_of(config, key)
            if value and value in seen:
                yield Problem(
                    key, f"jobs {seen[value]} and {number} {why}: {value}", f"leave {key} out, or give each its own"
                )
                break
            seen[value] = number
    told = [(number, to_dict(config)) for number, config in zip(numbers, configs, strict=True)]
    alike = [(i, j) for (i, one), (j, other) in combinations(told, 2) if one == other]
    if alike:
        i, j = alike[0]
        yield Problem("-m", f"jobs {i} and {j} are the same in every key", "give each value once")
