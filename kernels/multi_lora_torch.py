"""Many adapters over a packed row in plain torch: the formulas, one adapter after another.

With s the scale, D the dropped x, S = D A^T and G the gradient of y, for the tokens of one adapter and one layer:

    y = W x + bias + s S B^T        dS = s G B        dB = s G^T S        dA = dS^T D        dx = G W + drop(dS A)

These are the operations, in the order, of a linear layer with one adapter under autograd. ``deterministic`` makes the
product with W one of each adapter's tokens too: every product has the operands it has when the adapter is alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dropout import drop, kept

if TYPE_CHECKING:
    from kernels.multi_lora import Call


@dataclass(frozen=True)
class _Adapted:
    """One adapter in one layer: its tokens, where its matrices begin, and what dropout needs."""

    slot: int
    rows: Tensor
    rank: int
    scale: float
    a: int
    b: int
    salt: Tensor
    p: Tensor


def forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: Call
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Outputs of all layers, and S of every adapter of every layer; in the order of :func:`_adapted`."""
    outputs, saved = [], []
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        out = _product(x, weight.t(), bias, call)
        for each in _adapted(call, layer):
            a, b = _matrices(call, each, x.shape[1], len(weight))
            shrunk = _dropped(x[each.rows], each, call) @ a.t()
            saved.append(shrunk)
            out[each.rows] = torch.addmm(out[each.rows], shrunk, b.t(), alpha=each.scale)
        outputs.append(out)
    return tuple(outputs), tuple(saved)


def backward(
    x: Tensor,
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    call: Call,
    needs_x: bool,
) -> Tensor | None:
    """The gradient of x if it is needed; those of the adapters go to ``call.adapters.slots.grad``."""
    d_x, shrunk_of = None, iter(saved)
    for layer, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        grad = x.new_zeros(len(x), len(weight)) if grad is None else grad
        mine = _product(grad, weight, None, call) if needs_x else None
        for each in _adapted(call, layer):
            a, b = _matrices(call, each, x.shape[1], len(weight))
            g, shrunk = grad[each.rows], next(shrunk_of)
            d_shrunk = (g @ b) * each.scale
            _add(call, each, each.a, d_shrunk.t() @ _dropped(x[each.rows], each, call))
            _add(call, each, each.b, ((g.t() @ shrunk) * each.scale).t())
            if mine is not None:
                mine[each.rows] += _dropped(d_shrunk @ a, each, call)
        if mine is not None:
            d_x = mine if d_x is None else d_x + mine
    return d_x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """x @ weight + bias, of each adapter's tokens by themselves if the call is deterministic."""
    if not call.deterministic:
        return F.linear(x, weight.t(), bias)
    out = x.new_empty(len(x), weight.shape[1])
    for rows in call.segments.rows:
        out[rows] = F.linear(x[rows], weight.t(), bias)
    return out


def _adapted(call: Call, layer: int) -> Iterator[_Adapted]:
    """The adapters with tokens of one layer, in the order of their slots."""
    adapters, slots = call.adapters, call.adapters.slots
    ranks, scales = slots.rank.tolist(), slots.scale.tolist()
    starts_a, starts_b = adapters.a[layer].tolist(), adapters.b[layer].tolist()
    for slot, rows in enumerate(call.segments.rows[:-1]):
        if len(rows) and ranks[slot] and starts_a[slot] >= 0:
            salt, p = adapters.salt[layer, slot], slots.dropout[slot]
            yield _Adapted(slot, rows, ranks[slot], scales[slot], starts_a[slot], starts_b[slot], salt, p)


def _matrices(call: Call, each: _Adapted, k: int, n: int) -> tuple[Tensor, Tensor]:
    """A (R, K) and B (N, R), laid out as PEFT has them: a product's bits depend on the layout of its operands."""
    weight = call.adapters.slots.weight.detach()
    a = weight[each.a : each.a + each.rank * k].view(each.rank, k)
    b = weight[each.b : each.b + each.rank * n].view(each.rank, n)
    return a, b.t().contiguous()


def _dropped(x: Tensor, each: _Adapted, call: Call) -> Tensor:
    if call.keys_T is None:
        return x
    return drop(x, kept(call.keys_T[each.rows], each.salt, x.shape[1], each.p), each.p)


def _add(call: Call, each: _Adapted, start: int, gradient: Tensor) -> None:
    slots = call.adapters.slots
    place = slots.grad[start : start + gradient.numel()].view(gradient.shape)
    if slots.fresh[each.slot]:
        place.copy_(gradient)
    else:
        place += gradient
