"""Adapters on disk, in PEFT's format: loads as it is in PEFT, and (LoRA, not DoRA) in vLLM.

===============================  ====================================================================================
``adapter_config.json``          PEFT's ``LoraConfig``: rank, alpha, targets, dora, rslora and the base's folder
``adapter_model.safetensors``    ``base_model.model.<layer>.lora_A.weight`` and so on; the metadata hold the base's
                                 fingerprint, so that it is not put on another one
===============================  ====================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, chosen, endings, lora_of, read_adapter_config
from asyncrl.config.schema import Config, LoraConfig
from asyncrl.training.errors import CheckpointError, ModelError
from asyncrl.training.files import write_json
from asyncrl.training.fingerprint import fingerprint
from asyncrl.training.lora import attach, linear_layers
from asyncrl.training.mesh import Mesh
from asyncrl.training.model import DTYPES, Policy
from asyncrl.training.tensor_files import Spec, write_tensors

FINGERPRINT = "base_fingerprint"


@dataclass(frozen=True)
class StoredAdapter:
    """``tensors``: by the names of the model's parameters. ``fingerprint``: empty if the folder does not say."""

    settings: LoraConfig
    tensors: dict[str, Tensor]
    base: str
    fingerprint: str

    def check_base(self, folder: Path, fingerprint: str) -> None:
        """Raises :class:`ModelError` if the adapter was made for other weights than those of ``folder``."""
        if self.fingerprint and self.fingerprint != fingerprint:
            raise ModelError(
                f"the adapter was trained on other weights than {folder} holds: on those of {self.base}, with "
                f"fingerprint {self.fingerprint[:12]}, and these have {fingerprint[:12]}"
            )


def equip(policy: Policy, cfg: Config, mesh: Mesh) -> None:
    """Collective. Puts the adapters that ``cfg`` wants on the policy, before it is sharded; none if it wants none.

    Raises :class:`ModelError` for adapters that do not fit the model.
    """
    settings = lora_of(cfg)
    if settings is None:
        return
    base = fingerprint(Path(cfg.model.path), mesh)
    stored = stored_weights(cfg, base)
    attach(policy, settings, DTYPES[cfg.trainer.master_dtype], cfg.seed, stored).base = base


def stored_weights(cfg: Config, base: str) -> dict[str, Tensor] | None:
    """Of ``model.adapter``, by name; None if it is empty.

    ``base``: fingerprint of the model. Raises :class:`ModelError` for a folder that cannot be read or is not its.
    """
    if not cfg.model.adapter:
        return None
    found = read_adapter(Path(cfg.model.adapter))
    found.check_base(Path(cfg.model.path), base)
    return found.tensors


def read_adapter(folder: Path) -> StoredAdapter:
    """Raises :class:`ModelError` for a folder that cannot be read, or whose adapter is of another kind."""
    try:
        settings = read_adapter_config(folder)
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            tensors = {key.removeprefix(PREFIX): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is no adapter that can be used: {error}") from error
    told = json.loads((folder / ADAPTER_CONFIG).read_text())
    base = str(told.get("base_model_name_or_path") or "")
    return StoredAdapter(settings, tensors, base, metadata.get(FINGERPRINT, ""))


@dataclass(frozen=True)
class AdapterExport:
    """The ``adapter`` folder of a checkpoint: a PEFT folder. ``targets``: see :func:`shortest`."""

    settings: LoraConfig
    targets: list[str]
    base: str
    fingerprint: str
    dtype: torch.dtype | None = None  # None: as they are
    folder = "adapter"

    @classmethod
    def of(cls, policy: Policy, cfg: Config) -> AdapterExport:
        adapters = policy.adapters
        assert adapters is not None, "a policy without adapters exports its weights"
        dtype: torch.dtype | None = getattr(torch, cfg.checkpoint.hf_dtype) if cfg.checkpoint.hf_dtype else None
        targets = shortest(adapters.names, list(linear_layers(policy.lm)))
        return cls(adapters.settings, targets, cfg.model.path, adapters.base, dtype)

    def prepare(self, weights: Mapping[str, Spec]) -> None:
        """Nothing is needed from the model's source."""

    def write(
        self, folder: Path, weights: Mapping[str, Spec], read: Callable[[str], Tensor], rank: int, world_size: int
    ) -> dict[str, dict[str, Any]]:
        """Rank 0 writes the parameters ``weights``, which ``read`` gives whole. Returns its files' digests.

        Raises :class:`CheckpointError` for values that are not finite: such an adapter would only be found out where
        it is used.
        """
        if rank != 0:
            return {}

        def value(key: str) -> Tensor:
            name = key.removeprefix(PREFIX)
            tensor = read(name)
            if not tensor.isfinite().all():
                raise CheckpointError(f"{name} has values that are not finite, which no adapter may have")
            return tensor if self.dtype is None else tensor.to(self.dtype)

        specs = {f"{PREFIX}{name}": (self.dtype or held, shape) for name, (held, shape) in weights.items()}
        metadata = {"format": "pt", FINGERPRINT: self.fingerprint}
        return {
            ADAPTER_CONFIG: write_json(folder / ADAPTER_CONFIG, describe(self.settings, self.targets, self.base)),
            ADAPTER_WEIGHTS: write_tensors(folder / ADAPTER_WEIGHTS, specs, value, metadata),
        }


def describe(settings: LoraConfig, targets: Sequence[str], base: str) -> dict[str, Any]:
    """``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(targets),
        "use_dora": settings.dora,
        "use_rslora": settings.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }


def shortest(adapted: Sequence[str], linears: Sequence[str]) -> list[str]:
    """The ends of names that mean exactly the layers ``adapted`` among ``linears``, or else their whole names."""
    short = endings(adapted)
    meant = {name for names in chosen(short, linears).values() for name in names}
    return short if meant == set(adapted) else list(adapted)
