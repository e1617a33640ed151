"""Low-rank adapters on the linear layers of a transformers model.

    LoRA   y = W x + b + scale * B A dropout(x)             Hu et al. 2021 (arXiv 2106.09685), section 4.1
    DoRA   y = g * (W x + scale * B A dropout(x)) + b       Liu et al. 2024 (arXiv 2402.09353), sections 4.1 and 4.3
           g = magnitude / |W + scale * B A|, row by row; the norm is a constant in backward

``scale`` is alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732). As in PEFT, A is drawn uniformly within
1 / sqrt(in) (Kaiming, a = sqrt 5), B is zero and the magnitude is the length of W's row: at first y is the base's.

An adapted layer keeps its name and its weight's name; beside it lie ``<layer>.lora_A.weight`` (R, K),
``<layer>.lora_B.weight`` (N, R) and, with DoRA, ``<layer>.lora_magnitude_vector`` (N,), which are PEFT's names. They
are in ``trainer.master_dtype`` and take part in ``model.compute_dtype``, in which W, frozen, is held.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.lora import chosen, endings
from asyncrl.config.schema import LoraConfig
from asyncrl.training.dropout import DroppedLinear, token_keys
from asyncrl.training.errors import ModelError
from asyncrl.training.model import Policy, layers
from asyncrl.weights.gather import Local, local_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncrl.training.packing import PackedBatch

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_PARAMETER = re.compile(r"\.lora_(A\.weight|B\.weight|magnitude_vector)$")
_NORM_ELEMENTS = 1 << 22  # of W + scale * B A that exist at a time


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return _PARAMETER.search(name) is not None


def scale_of(settings: LoraConfig) -> float:
    """What B A is multiplied by."""
    return settings.alpha / (math.sqrt(settings.rank) if settings.rslora else settings.rank)


@dataclass(frozen=True)
class Use:
    """How the adapters take part in a forward: at all, and with which keys of its tokens (T,) if inputs are dropped."""

    enabled: bool = True
    keys_T: Tensor | None = None


class Adapters:
    """All adapters of a policy.

    ``layers``: name of the adapted layer -> the layer, in model order; ``base``: fingerprint of the frozen weights.
    """

    def __init__(self, settings: LoraConfig, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.base = ""
        self.scale = scale_of(settings)
        self.layers: dict[str, LoraLinear] = {}
        self.use = Use()
        self._step: int | None = None

    def disabled(self) -> AbstractContextManager[None]:
        """Within it the policy is the base, bit for bit: the reference of DPO or of a KL penalty, for no memory."""
        return self._using(replace(self.use, enabled=False))

    @contextmanager
    def dropping(self, step: int) -> Iterator[None]:
        """Within it inputs are dropped; everywhere else (evaluation, reference) nothing is."""
        self._step, before = step, self._step
        try:
            yield
        finally:
            self._step = before

    def reading(self, batch: PackedBatch) -> AbstractContextManager[None]:
        """Around the forward of ``batch``."""
        dropped = self._step is not None and self.settings.dropout and self.use.enabled
        keys_T = token_keys(batch, self.seed, self._step or 0) if dropped else None
        return self._using(replace(self.use, keys_T=keys_T))

    def remember(self) -> AbstractContextManager[None]:
        """Called in a forward: the context in which the same forward can be computed again."""
        return self._using(self.use)

    @contextmanager
    def _using(self, use: Use) -> Iterator[None]:
        before, self.use = self.use, use
        try:
            yield
        finally:
            self.use = before

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, in model order."""
        for name, layer in self.layers.items():
            yield f"{name}.lora_A.weight", layer.lora_A.weight
            yield f"{name}.lora_B.weight", layer.lora_B.weight
            if layer.lora_magnitude_vector is not None:
                yield f"{name}.lora_magnitude_vector", layer.lora_magnitude_vector

    @property
    def names(self) -> list[str]:
        """Of the adapted layers, in model order."""
        return list(self.layers)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the function that the weights of the adapters stand for; JSON-able."""
        s = self.settings
        return {"base": self.base, "rank": s.rank, "alpha": s.alpha, "rslora": s.rslora, "dora": s.dora}

    @torch.no_grad()
    def start_magnitudes(self) -> None:
        """The lengths of W's rows, once the weights are there. W and the magnitudes are sharded alike, by rows."""
        for layer in self.layers.values():
            if layer.lora_magnitude_vector is not None:
                weight, magnitude = _held(layer.weight), _held(layer.lora_magnitude_vector)
                none = magnitude.new_zeros(len(weight), 1), magnitude.new_zeros(1, weight.shape[1])
                magnitude.copy_(row_norms(weight, *none, self.scale))


class Factor(nn.Module):
    """Holds one of the two small matrices, under PEFT's name."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; takes over the parameters of ``base``. ``product`` computes ``x W^T + b``."""

    lora_salt: Tensor
    lora_dropout: Tensor

    def __init__(self, base: nn.Linear, name: str, adapters: Adapters, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.adapters = adapters
        self.product: Product = F.linear
        rank, salt = adapters.settings.rank, salt_of(adapters.seed, name)
        self.lora_A = Factor(first_a(rank, self.in_features, salt).to(dtype))
        self.lora_B = Factor(torch.zeros(self.out_features, rank, dtype=dtype))
        dora = adapters.settings.dora
        self.lora_magnitude_vector = nn.Parameter(torch.ones(self.out_features, dtype=dtype)) if dora else None
        dropout = torch.tensor(adapters.settings.dropout, dtype=torch.float64)
        for key, value in (("lora_salt", torch.tensor(salt)), ("lora_dropout", dropout)):
            self.register_buffer(key, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        use = self.adapters.use
        if not use.enabled:
            return self.product(x, self.weight, self.bias)
        magnitude = self.lora_magnitude_vector
        base = self.product(x, self.weight, self.bias if magnitude is None else None)
        b_NR = self.lora_B.weight.to(x.dtype)
        # One product that adds to the base's in its accumulator: written once, rounded once.
        out = torch.addmm(base.flatten(0, -2), self._shrink(x, use.keys_T), b_NR.t(), alpha=self.adapters.scale)
        if magnitude is not None:
            norms = row_norms(self.weight, self.lora_B.weight, self.lora_A.weight, self.adapters.scale)
            out = out * (magnitude / norms).to(x.dtype)
            out = out if self.bias is None else out + self.bias
        return out.view(base.shape)

    def _shrink(self, x: Tensor, keys_T: Tensor | None) -> Tensor:
        x_TK, a_RK = x.flatten(0, -2), self.lora_A.weight.to(x.dtype)
        if keys_T is None:
            return F.linear(x_TK, a_RK)
        if len(keys_T) != len(x_TK):
            raise ModelError(f"a layer sees {len(x_TK)} of {len(keys_T)} tokens: lora.dropout needs all; set it to 0")
        return DroppedLinear.apply(x_TK, a_RK, keys_T, self.lora_salt, self.lora_dropout)


@torch.no_grad()
def row_norms(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """Lengths (N,) of the rows of ``W + scale * B A``, a constant in backward; in fp32, of float64 in float64."""
    wide = torch.promote_types(b.dtype, torch.float32)
    a = a.to(wide)
    rows = max(1, _NORM_ELEMENTS // weight.shape[1])
    pieces = zip(weight.split(rows), b.split(rows), strict=True)
    norms = [torch.addmm(w.to(wide), n.to(wide), a, alpha=scale).norm(dim=1) for w, n in pieces]
    return torch.cat(norms).clamp_min(torch.finfo(torch.float32).eps ** 2)  # a row of zeros stays one


@torch.no_grad()
def merged(weight: Tensor, b: Tensor, a: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """The weight that makes a plain layer compute what the adapted one does: (N, K) in fp32, of float64 in float64.

    ``weight``, ``b`` and ``magnitude`` may be some of the rows.
    """
    wide = torch.promote_types(torch.promote_types(weight.dtype, b.dtype), torch.float32)
    out = torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)
    if magnitude is not None:
        out *= (magnitude.to(wide) / row_norms(weight, b, a, scale).to(wide))[:, None]
    return out


def merged_weights(policy: Policy) -> list[tuple[str, Tensor | Local]]:
    """All weights by Hugging Face name; an adapted one is merged when it is read, from copies of its adapter as it is.

    Collective if adapters are sharded: A is gathered, while W, B and the magnitudes are sharded alike, by rows.
    """
    adapters = policy.adapters
    assert adapters is not None, "a policy without adapters has nothing to merge"
    found: list[tuple[str, Tensor | Local]] = []
    for name, p in policy.lm.named_parameters():
        if is_adapter(name):
            continue
        layer = adapters.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is None:
            found.append((name, p))
            continue
        a = layer.lora_A.weight.detach()
        magnitude = layer.lora_magnitude_vector
        change = partial(
            merged,
            b=_held(layer.lora_B.weight.detach()).clone(),
            a=a.full_tensor() if isinstance(a, DTensor) else a.clone(),
            scale=adapters.scale,
            magnitude=None if magnitude is None else _held(magnitude.detach()).clone(),
        )
        found.append((name, replace(local_of(name, p), change=change)))
    return found


def attach(
    policy: Policy,
    settings: LoraConfig,
    dtype: torch.dtype,
    seed: int = 0,
    stored: Mapping[str, Tensor] | None = None,
) -> Adapters:
    """Freezes the policy and puts adapters on its ``settings.targets``, before it is sharded; weights may be missing.

    ``stored``: values of the adapters by name, to go on from; they name the targets then. Raises :class:`ModelError`
    for a target that does not exist or that the rank does not fit.
    """
    policy.requires_grad_(False)
    adapters = Adapters(settings, seed)
    for name, linear in targets_of(policy.lm, settings).items():
        parent, _, leaf = name.rpartition(".")
        adapters.layers[name] = layer = LoraLinear(linear, name, adapters, dtype)
        setattr(policy.lm.get_submodule(parent), leaf, layer)
    if stored is not None:
        fill(adapters, stored)
    policy.adapters = adapters
    return adapters


def linear_layers(lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """The plain linear layers of the decoder layers, by name in model order."""
    inside = {id(module) for layer in layers(lm) for module in layer.modules()}
    return {
        name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear) and id(module) in inside
    }


def targets_of(lm: PreTrainedModel, settings: LoraConfig) -> dict[str, nn.Linear]:
    """The layers that ``settings`` names, in model order.

    Raises :class:`ModelError` for a name without a layer, and a layer that the rank does not fit.
    """
    linears = linear_layers(lm)
    found = chosen(settings.targets, linears)
    if unknown := [target for target, names in found.items() if not names]:
        raise ModelError(
            f"lora.targets: {', '.join(unknown)} is no linear layer of {type(lm).__name__}'s decoder layers; there are "
            + ", ".join(endings(linears))
        )
    wanted = {name for names in found.values() for name in names}
    if not wanted:
        raise ModelError("lora.targets is empty")
    targets = {name: linear for name, linear in linears.items() if name in wanted}
    for name, linear in targets.items():
        if settings.rank > min(linear.weight.shape):
            raise ModelError(f"lora.rank={settings.rank} is more than {name} of {tuple(linear.weight.shape)} can have")
    return targets


@torch.no_grad()
def fill(adapters: Adapters, stored: Mapping[str, Tensor]) -> None:
    """Gives the adapters the values ``stored`` by name. Raises :class:`ModelError` unless these are all and fit."""
    held = dict(adapters.parameters())
    if odd := sorted(held.keys() ^ stored.keys()):
        raise ModelError(f"model.adapter: {len(odd)} weights do not fit the model, e.g. {odd[0]}")
    for name, p in held.items():
        if p.shape != stored[name].shape:
            raise ModelError(f"model.adapter: {name} is {tuple(stored[name].shape)}, the model needs {tuple(p.shape)}")
        p.copy_(stored[name])


def salt_of(seed: int, name: str) -> int:
    """What tells one layer's random numbers from another's; fits an int64."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def first_a(rank: int, columns: int, salt: int) -> Tensor:
    """A (rank, columns) as training begins, in fp32: a function of its arguments."""
    bound = 1.0 / math.sqrt(columns)
    return torch.empty(rank, columns).uniform_(-bound, bound, generator=torch.Generator().manual_seed(salt))


def _held(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x
