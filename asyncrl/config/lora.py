"""Which adapters a run trains, from its keys or from a PEFT folder, and whether they fit the model.

Answered from file headers, without torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.errors import Problem
from asyncrl.config.model_folder import read_safetensors_header, weight_files
from asyncrl.config.schema import Config, LoraConfig

ALL_LINEAR = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every key in a PEFT folder
_LAYER = re.compile(r"\.\d+\.")  # decoder layers are numbered, embeddings and heads are not
_SHARED = ("rank", "alpha", "dora", "rslora")  # what a PEFT folder fixes, beside the targets
# Fields of PEFT's LoraConfig that change the function, with the values of an adapter that they leave as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "use_bdlora": (None,),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "lora_ga_config": (None,),
    "velora_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
}


def lora_of(config: Config) -> LoraConfig | None:
    """The adapters of a run, None if everything learns; those of ``model.adapter`` where it is set.

    Raises ``ValueError`` for a folder that cannot be continued from.
    """
    if not config.model.adapter:
        return config.lora if config.lora.rank else None
    return replace(read_adapter_config(Path(config.model.adapter)), dropout=config.lora.dropout)


def held_dtype(config: Config) -> str:
    """In which dtype the model's weights are held: as masters if they learn, else as they are computed with."""
    return config.model.compute_dtype if lora_of(config) else config.trainer.master_dtype


def read_adapter_config(folder: Path) -> LoraConfig:
    """What a PEFT folder fixes, the targets by their whole names.

    Raises ``ValueError`` for one that is not LoRA or DoRA as it is here, or whose keys are not PEFT's.
    """
    path = folder / ADAPTER_CONFIG
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        rank, alpha = int(told["r"]), float(told["lora_alpha"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error
    for name, neutral in _NEUTRAL.items():
        if told.get(name, neutral[0]) not in neutral:
            raise ValueError(f"{path}: {name}={told[name]!r} is not supported")
    if rank < 1 or alpha <= 0:
        raise ValueError(f"{path}: r={rank} and lora_alpha={alpha:g} must be positive")
    dora, rslora = bool(told.get("use_dora")), bool(told.get("use_rslora"))
    return LoraConfig(rank=rank, alpha=alpha, targets=_adapted(folder / ADAPTER_WEIGHTS), dora=dora, rslora=rslora)


def _adapted(path: Path) -> list[str]:
    """Names of the layers that the file holds adapters of."""
    try:
        keys = read_safetensors_header(path).keys() - {"__metadata__"}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    odd = sorted(key for key in keys if not key.startswith(PREFIX) or ".lora_" not in key)
    if odd or not keys:
        what = f"{odd[0]} is no weight of an adapter" if odd else "it holds no adapter"
        raise ValueError(f"{path}: {what}; keys are {PREFIX}<layer>.lora_A.weight and so on")
    return sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in keys})


def chosen(targets: Iterable[str], names: Iterable[str]) -> dict[str, list[str]]:
    """target -> those of ``names`` (linear layers in decoder layers) that it means; PEFT's rule: a name or its end."""
    names = list(names)
    return {t: [n for n in names if t == ALL_LINEAR or n == t or n.endswith(f".{t}")] for t in targets}


def endings(names: Iterable[str]) -> list[str]:
    """Last parts of names, each once."""
    return sorted({name.rpartition(".")[2] for name in names})


def linear_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Name -> (out, in) of the matrices in a model's decoder layers; empty if the files cannot be read."""
    found: dict[str, tuple[int, int]] = {}
    try:
        headers: list[Mapping[str, Any]] = [read_safetensors_header(path) for path in weight_files(folder)]
    except (OSError, ValueError):
        return {}  # the check of the folder says what is wrong with it
    for header in headers:
        for key, entry in header.items():
            name = key.removesuffix(".weight")
            if name != key and len(entry["shape"]) == 2 and _LAYER.search(name):
                found[name] = (entry["shape"][0], entry["shape"][1])
    return found


def check_lora(config: Config) -> Iterator[Problem]:
    """Adapters that fit the model, and settings that work with them."""
    try:
        lora = lora_of(config)
    except ValueError as error:
        yield Problem("model.adapter", str(error), "give a PEFT folder with a LoRA or DoRA adapter")
        return
    if lora is None:
        return
    if config.model.adapter:
        yield from _check_adapter(config, lora)
    yield from _check_combinations(config, lora)
    if config.model.path:
        yield from _check_targets(lora, linear_shapes(Path(config.model.path)), bool(config.model.adapter))


def _check_adapter(config: Config, lora: LoraConfig) -> Iterator[Problem]:
    if not config.model.path:
        yield Problem("model.adapter", "an adapter needs the model that it was made for", "set model.path to it")
    if config.lora.rank == 0:
        return
    odd = [n for n in _SHARED if getattr(config.lora, n) != getattr(lora, n)]
    if odd:
        said = ", ".join(f"lora.{n}={getattr(config.lora, n)} (the folder has {getattr(lora, n)})" for n in odd)
        yield Problem("model.adapter", f"the adapter was made with other settings than {said}", "leave lora.rank out")


def _check_combinations(config: Config, lora: LoraConfig) -> Iterator[Problem]:
    if config.parallel.tp > 1:
        yield Problem(
            "parallel.tp",
            "a layer that is split by rows or columns would need A and B split to match, which is not part of this "
            "version",
            "parallel.tp=1: frozen weights take little memory, and parallel.dp_shard divides them",
        )
    if config.trainer.master_dtype == "bfloat16":
        yield Problem(
            "trainer.master_dtype",
            "adapters are small: in bfloat16 they would save little and lose digits",
            "trainer.master_dtype=float32 (frozen weights are in model.compute_dtype all the same)",
        )
    if config.mode == "grpo" and lora.dropout:
        yield Problem(
            "lora.dropout",
            "engines sample without dropout, so the ratio of trainer to engine log-probabilities would be noise",
            "lora.dropout=0",
        )


def _check_targets(lora: LoraConfig, shapes: Mapping[str, tuple[int, int]], from_folder: bool) -> Iterator[Problem]:
    if not shapes:
        return
    if not lora.targets:
        yield Problem("lora.targets", "no target is named", f"lora.targets=[{ALL_LINEAR}], or names of linear layers")
    found = chosen(lora.targets, shapes)
    if unknown := [target for target, names in found.items() if not names]:
        layers = "no such linear layer in the decoder layers"
        yield Problem(
            "model.adapter" if from_folder else "lora.targets",
            f"{', '.join(unknown[:4])}: {layers}" + (f" ({len(unknown)} such)" if len(unknown) > 4 else ""),
            "give the model.path that the adapter was made for"
            if from_folder
            else f"choose {ALL_LINEAR}, or from {', '.join(endings(shapes))}",
        )
    sizes = {name: min(shapes[name]) for names in found.values() for name in names}
    smallest = min(sizes, key=lambda name: sizes[name], default="")
    if smallest and lora.rank > sizes[smallest] and not from_folder:
        rows, columns = shapes[smallest]
        yield Problem(
            "lora.rank",
            f"{lora.rank} is more than {smallest}, a matrix of {rows} x {columns}, can have",
            f"lora.rank={sizes[smallest]} or less, or other lora.targets",
        )
