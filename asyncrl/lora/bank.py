"""The adapters that are resident on one base: flat buffers of their weights, gradients and moments, slot by slot.

Of a slot everything lies together (:class:`Layout`): A (R, K) and B transposed (R, N) of each layer it adapts, as
:mod:`kernels.multi_lora` reads them. Who comes or goes has the buffers made anew; the numbers of those that stay are
copied, and no number says where a slot lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.training.lora import salt_of
from kernels.multi_lora import ALIGNMENT, Adapters, Slots, multi_lora_linear, rank_class
from kernels.multi_lora_segments import Segments, segments
from kernels.slot_adamw import SlotBuffers

Shape = tuple[int, int]
NOWHERE = -1


@dataclass(frozen=True)
class Layout:
    """Where the matrices of an adapter begin, counted from the first element of its slot.

    ``shapes``: adapted layer -> (N, K) of its weight, in model order.
    """

    rank: int
    shapes: Mapping[str, Shape]
    a: Mapping[str, int]
    b: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, rank: int, shapes: Mapping[str, Shape]) -> Layout:
        sizes = [_aligned(rank * side) for n, k in shapes.values() for side in (k, n)]
        begin = [0, *accumulate(sizes)]
        a, b = (dict(zip(shapes, begin[i:-1:2], strict=True)) for i in (0, 1))
        return cls(rank, shapes, a, b, begin[-1])

    def views(self, slot_P: Tensor) -> Iterator[tuple[str, Tensor]]:
        """PEFT's name and shape, A (R, K) and B (N, R), of each matrix in a slot's part of a buffer."""
        for name, (n, k) in self.shapes.items():
            a, b = self.a[name], self.b[name]
            yield f"{name}.lora_A.weight", slot_P[a : a + self.rank * k].view(self.rank, k)
            yield f"{name}.lora_B.weight", slot_P[b : b + self.rank * n].view(self.rank, n).t()


@dataclass(frozen=True, eq=False)
class Resident:
    """An adapter of a bank. ``seed`` and a layer's name are what its dropout and its first weights depend on."""

    layout: Layout
    scale: float
    dropout: float
    seed: int


@dataclass(frozen=True)
class Reading:
    """Which adapter each token of a packed row reads, and the keys of its dropout (T,); None drops nothing."""

    segments: Segments
    keys_T: Tensor | None = None


class Bank:
    """``base``: dtype of the frozen weights; ``master``: that in which adapters are updated.

    ``deterministic``: of the kernels, see :mod:`kernels.multi_lora`.
    """

    def __init__(
        self, base: torch.dtype, master: torch.dtype, device: torch.device, deterministic: bool = False
    ) -> None:
        self.dtype, self.master, self.device, self.deterministic = base, master, device, deterministic
        self.residents: list[Resident] = []
        self.layers: dict[str, Adapters] = {}
        self.reading: Reading | None = None  # None: the base alone
        none = torch.zeros(0, dtype=master, device=device)
        self.buffers = SlotBuffers((0,), none, none, none, none, none)
        self.step = torch.zeros(0, dtype=torch.int64, device=device)  # optimizer steps of each

    def index(self, resident: Resident) -> int:
        return self.residents.index(resident)

    def admit(self, resident: Resident) -> None:
        """Gives ``resident`` the last slot; all its numbers are zero."""
        self._make([*self.residents, resident])

    def release(self, resident: Resident) -> None:
        """Takes it out; slots behind it move up."""
        self._make([other for other in self.residents if other is not resident])

    def part(self, resident: Resident, flat_P: Tensor) -> Tensor:
        """The slot's part of one of the ``buffers``."""
        i = self.index(resident)
        return flat_P[self.buffers.bounds[i] : self.buffers.bounds[i + 1]]

    def refresh(self) -> None:
        """The kernels read the masters as they are now."""
        if self.buffers.weight is not self.buffers.master:
            self.buffers.weight.copy_(self.buffers.master)

    @contextmanager
    def reads(self, reading: Reading | None) -> Iterator[None]:
        """Around a forward."""
        before, self.reading = self.reading, reading
        try:
            yield
        finally:
            self.reading = before

    def reading_of(self, slot_T: Tensor, keys_T: Tensor | None = None) -> Reading:
        """``slot_T``: the slot of each token, -1 for none."""
        return Reading(segments(slot_T, len(self.residents)), keys_T)

    def alone(self, resident: Resident, tokens: int) -> Reading:
        """All ``tokens`` are of ``resident``."""
        return self.reading_of(torch.full((tokens,), self.index(resident), device=self.device))

    def _make(self, residents: Sequence[Resident]) -> None:
        old = {r: (self.part(r, self.buffers.master), *self._moments(r)) for r in self.residents if r in residents}
        bounds = (0, *accumulate(r.layout.size for r in residents))

        def empty(dtype: torch.dtype) -> Tensor:
            return torch.zeros(bounds[-1], dtype=dtype, device=self.device)

        master, grad, exp_avg, exp_avg_sq = (empty(self.master) for _ in range(4))
        weight = master if self.dtype == self.master else empty(self.dtype)
        steps = {r: int(self.step[i]) for i, r in enumerate(self.residents)}
        self.residents = list(residents)
        self.buffers = SlotBuffers(bounds, weight, master, grad, exp_avg, exp_avg_sq)
        self.step = torch.tensor([steps.get(r, 0) for r in residents], dtype=torch.int64, device=self.device)
        for resident, values in old.items():
            now = self.part(resident, master), *self._moments(resident)
            for place, value in zip(now, values, strict=True):
                place.copy_(value)
        self.refresh()
        self.slots = self._slots(weight, grad)
        names = dict.fromkeys(name for r in residents for name in r.layout.shapes)
        self.layers = {name: self._adapters(name) for name in names}

    def _moments(self, resident: Resident) -> tuple[Tensor, Tensor]:
        return self.part(resident, self.buffers.exp_avg), self.part(resident, self.buffers.exp_avg_sq)

    def _slots(self, weight: Tensor, grad: Tensor) -> Slots:
        vector = partial(torch.tensor, device=self.device)
        ranks = [r.layout.rank for r in self.residents]
        return Slots(
            weight=weight.detach().requires_grad_(),
            grad=grad,
            rank=vector(ranks, dtype=torch.int32),
            scale=vector([r.scale for r in self.residents], dtype=torch.float64),
            dropout=vector([r.dropout for r in self.residents], dtype=torch.float64),
            fresh=torch.ones(len(ranks), dtype=torch.bool, device=self.device),
            classes=tuple(sorted({rank_class(rank) for rank in ranks})),
        )

    def _adapters(self, name: str) -> Adapters:
        def row(values: list[int]) -> Tensor:
            return torch.tensor([values], dtype=torch.int64, device=self.device)

        starts = list(zip(self.buffers.bounds, self.residents, strict=False))
        a, b = (
            [start + places[name] if name in (places := getattr(r.layout, side)) else NOWHERE for start, r in starts]
            for side in ("a", "b")
        )
        return Adapters(self.slots, row(a), row(b), row([salt_of(r.seed, name) for r in self.residents]))


class PackedLinear(nn.Linear):
    """A frozen linear layer whose tokens may each have another adapter; takes over the parameters of ``base``."""

    def __init__(self, base: nn.Linear, name: str, bank: Bank) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.name, self.bank = name, bank

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)"""
        reading, adapters = self.bank.reading, self.bank.layers.get(self.name)
        if reading is None or adapters is None:
            return F.linear(x, self.weight, self.bias)
        out_TN = multi_lora_linear(
            x.flatten(0, -2),
            self.weight,
            self.bias,
            adapters,
            reading.segments,
            reading.keys_T,
            deterministic=self.bank.deterministic,
        )
        return out_TN.view(*x.shape[:-1], self.out_features)


def wrap(lm: nn.Module, linears: Mapping[str, nn.Linear], bank: Bank) -> None:
    """Makes those of ``linears`` (name -> layer of ``lm``) that are not yet packed ones, packed."""
    for name, linear in linears.items():
        if not isinstance(linear, PackedLinear):
            parent, _, leaf = name.rpartition(".")
            setattr(lm.get_submodule(parent), leaf, PackedLinear(linear, name, bank))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
