"""Random packs of adapters, and each of their adapters by itself as PEFT writes it: modules and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kernels.dropout import kept
from kernels.matmul import sum_dtype
from kernels.multi_lora import ALIGNMENT, Adapters, Slots, multi_lora_linears, rank_class
from kernels.multi_lora_segments import segments


@dataclass(frozen=True)
class One:
    """An adapter and its tokens: A (R, K) and B (N, R) of each layer, None where it is not adapted."""

    matrices: list[tuple[Tensor, Tensor] | None]
    scale: float
    dropout: float
    salts: list[int]
    x: Tensor
    keys: Tensor
    grads: list[Tensor]  # of the outputs

    @property
    def rank(self) -> int:
        return next(len(pair[0]) for pair in self.matrices if pair is not None)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> One:
        matrices = [pair and (pair[0].to(device, dtype), pair[1].to(device, dtype)) for pair in self.matrices]
        grads = [g.to(device, dtype) for g in self.grads]
        return replace(self, matrices=matrices, x=self.x.to(device, dtype), keys=self.keys.to(device), grads=grads)


@dataclass(frozen=True)
class Base:
    weights: list[Tensor]
    biases: list[Tensor | None]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Base:
        biases = [None if b is None else b.to(device, dtype) for b in self.biases]
        return Base([w.to(device, dtype) for w in self.weights], biases)


@dataclass
class Results:
    """Of one adapter: outputs, gradients of its rows of x, and (dA, dB (N, R)) of each adapted layer."""

    outputs: list[Tensor]
    d_x: Tensor | None
    matrices: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        flat = [t for pair in self.matrices if pair is not None for t in pair]
        return [*self.outputs, *([] if self.d_x is None else [self.d_x]), *flat]


def normal(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=g, dtype=torch.float64)


def make_base(k: int, widths: Sequence[int], bias: bool = True, seed: int = 0) -> Base:
    g = torch.Generator().manual_seed(1000 + seed)
    weights = [normal(g, n, k, scale=k**-0.5) for n in widths]
    return Base(weights, [normal(g, n) if bias else None for n in widths])


def make_one(
    base: Base,
    tokens: int,
    rank: int,
    seed: int,
    *,
    dropout: float = 0.0,
    without: Sequence[int] = (),
    alpha: float = 24,
) -> One:
    """An adapter for all layers but those ``without``; in float64."""
    g = torch.Generator().manual_seed(seed)
    k = base.weights[0].shape[1]
    matrices = [
        None if layer in without else (normal(g, rank, k, scale=k**-0.5), normal(g, len(w), rank, scale=rank**-0.5))
        for layer, w in enumerate(base.weights)
    ]
    salts = [int(s) for s in torch.randint(2**62, (len(base.weights),), generator=g)]
    keys = torch.randint(-(2**62), 2**62, (tokens,), generator=g)
    grads = [normal(g, tokens, len(w)) for w in base.weights]
    return One(matrices, alpha / rank, dropout, salts, normal(g, tokens, k), keys, grads)


def alone(base: Base, one: One, drop: bool = True) -> Results:
    """Forward and backward of one adapter, from modules. ``scale * (lora_B(lora_A(x * mask / (1 - p))))`` beside W."""
    x = one.x.clone().requires_grad_()
    total, outputs, modules = x.new_zeros(()), [], []
    for layer, (weight, bias) in enumerate(zip(base.weights, base.biases, strict=True)):
        y = x @ weight.t() + (0.0 if bias is None else bias)
        if (pair := one.matrices[layer]) is None:
            modules.append(None)
        else:
            factors = [nn.Linear(m.shape[1], m.shape[0], bias=False).to(x) for m in pair]
            for module, value in zip(factors, pair, strict=True):
                module.weight.data.copy_(value)
            modules.append(factors)
            inputs = x
            if drop:
                p = torch.tensor(one.dropout, dtype=torch.float64)
                mask = kept(one.keys, torch.tensor(one.salts[layer], device=x.device), x.shape[1], p)
                inputs = x * mask.to(x) * (1 / (1 - one.dropout))
            y = y + one.scale * factors[1](factors[0](inputs))
        outputs.append(y.detach())
        total = total + (y * one.grads[layer]).sum()
    total.backward()
    found = [m and (m[0].weight.grad, m[1].weight.grad) for m in modules]
    return Results(outputs, x.grad, found)


@dataclass
class Pack:
    """Adapters in slots and a row of their tokens. ``slot_T``: the slot of each token, -1 for those of ``loose``."""

    base: Base
    ones: dict[int, One]  # by slot
    adapters: Adapters
    slot_T: Tensor
    x: Tensor
    keys: Tensor
    grads: list[Tensor]
    segment_options: dict[str, int]

    def rows(self, slot: int) -> Tensor:
        return (self.slot_T == slot).nonzero()[:, 0]

    def run(self, *, drop: bool = True, needs_x: bool = True, **options: Any) -> dict[int, Results]:
        """Forward and backward once, by slot; -1 for the tokens without adapter."""
        table = segments(self.slot_T, len(self.adapters.slots.rank), **self.segment_options)
        x = self.x.clone().requires_grad_(needs_x)
        keys = self.keys if drop else None
        outputs = multi_lora_linears(x, self.base.weights, self.base.biases, self.adapters, table, keys, **options)
        torch.autograd.backward(outputs, self.grads)
        found = {}
        for slot in [-1, *self.ones]:
            rows = self.rows(slot)
            d_x = None if x.grad is None else x.grad[rows]
            matrices = [] if slot < 0 else self.gradients(slot)
            found[slot] = Results([y.detach()[rows] for y in outputs], d_x, matrices)
        return found

    def views(self, flat: Tensor, slot: int) -> list[tuple[Tensor, Tensor] | None]:
        """A and B transposed of each layer of a slot within ``flat``."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for layer, pair in enumerate(self.ones[slot].matrices):
            if pair is None:
                found.append(None)
                continue
            starts = [int(t[layer, slot]) for t in (self.adapters.a, self.adapters.b)]
            shapes = pair[0].shape, pair[1].t().shape
            a, b = (flat[i : i + s.numel()].view(s) for i, s in zip(starts, shapes, strict=True))
            found.append((a, b))
        return found

    def gradients(self, slot: int) -> list[tuple[Tensor, Tensor] | None]:
        grads = self.views(self.adapters.slots.grad, slot)
        return [pair and (pair[0].clone(), pair[1].t().clone()) for pair in grads]


def pack(
    base: Base, ones: dict[int, One], slots: int, *, loose: int = 0, seed: int = 0, blocks: int = 1, **options: int
) -> Pack:
    """Tokens of all adapters, and ``loose`` ones without, in shuffled runs of at most ``blocks``."""
    like, g = base.weights[0], torch.Generator().manual_seed(seed)
    k, widths = like.shape[1], [len(w) for w in base.weights]
    runs = [(slot, len(part)) for slot, one in ones.items() for part in one.x.split(blocks)]
    runs += [(-1, min(blocks, loose - i)) for i in range(0, loose, blocks)]
    shuffled = [runs[i] for i in torch.randperm(len(runs), generator=g).tolist()]
    slot_T = torch.tensor([slot for slot, n in shuffled for _ in range(n)], dtype=torch.int32)
    tokens = len(slot_T)
    x = normal(g, tokens, k).to(like)
    keys, grads = torch.zeros(tokens, dtype=torch.int64), [normal(g, tokens, n).to(like) for n in widths]
    slot_T, keys = slot_T.to(like.device), keys.to(like.device)
    found = Pack(base, ones, _adapters(base, ones, slots), slot_T, x, keys, grads, options)
    for slot, one in ones.items():
        rows = found.rows(slot)
        x[rows], keys[rows] = one.x, one.keys
        for grad, mine in zip(grads, one.grads, strict=True):
            grad[rows] = mine
        for layer, views in enumerate(found.views(found.adapters.slots.weight.detach(), slot)):
            if views is not None:
                views[0].copy_(one.matrices[layer][0])
                views[1].copy_(one.matrices[layer][1].t())
    return found


def _adapters(base: Base, ones: dict[int, One], slots: int) -> Adapters:
    """Offsets and tables; gradients start as NaN for fresh slots, which must be written over."""
    like, layers = base.weights[0], len(base.weights)
    a, b = (torch.full((layers, slots), -1, dtype=torch.int64) for _ in range(2))
    salt, end = torch.zeros(layers, slots, dtype=torch.int64), 0
    vectors = {name: torch.zeros(slots, dtype=torch.float64) for name in ("scale", "dropout")}
    rank = torch.zeros(slots, dtype=torch.int32)
    for slot, one in ones.items():
        rank[slot], vectors["scale"][slot], vectors["dropout"][slot] = one.rank, one.scale, one.dropout
        for layer, pair in enumerate(one.matrices):
            salt[layer, slot] = one.salts[layer]
            for starts, matrix in zip((a, b), pair or (), strict=False):
                starts[layer, slot] = end
                end += -(-matrix.numel() // ALIGNMENT) * ALIGNMENT
    weight = torch.zeros(end, dtype=like.dtype, device=like.device).requires_grad_()
    grad = torch.full((end,), torch.nan, dtype=sum_dtype(like), device=like.device)
    fresh = torch.ones(slots, dtype=torch.bool, device=like.device)
    classes = tuple(sorted({rank_class(one.rank) for one in ones.values()}))
    tables = [t.to(like.device) for t in (rank, *vectors.values())]
    state = Slots(weight, grad, *tables, fresh, classes)
    return Adapters(state, *(t.to(like.device) for t in (a, b, salt)))


def error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))


def same(a: Results, b: Results) -> bool:
    """Bit for bit."""
    pairs = list(zip(a.tensors(), b.tensors(), strict=True))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
