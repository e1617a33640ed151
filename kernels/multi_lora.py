"""Linear layers with many LoRA adapters over one packed row of tokens, each token with its own adapter or none.

    y_t = W x_t + bias + scale_i B_i A_i dropout(x_t)        i the slot of token t; Hu et al. 2021 (arXiv 2106.09685)

W and bias are frozen. Layers that read the same x (query, key and value; gate and up) are slices of one call. Slots may
differ in rank, scale, dropout and in which layers they adapt; nothing is padded to the largest. No product goes across
adapters: what is not finite in one adapter's rows, weights or gradients changes no bit of another's.

Weights of all adapters lie in one flat tensor, gradients in another of the same layout (:class:`Slots`). B is stored
transposed, (R, N), so that parts of it are read in whole rows whatever the rank. Backward adds to the flat gradient
itself and hands autograd only x's. Saved for it are x, which others keep too, and dropout(x) A^T.

Two implementations: plain torch with products for each adapter (:mod:`kernels.multi_lora_torch`), and Triton
(:mod:`kernels.multi_lora_triton`), whose number of kernels does not depend on the number of adapters. ``deterministic``
makes what is computed for one adapter independent, bit for bit, of what else is in the pack, of its slot and of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import multi_lora_torch
from kernels.matmul import sum_dtype
from kernels.multi_lora_segments import Segments

Backend = Literal["auto", "torch", "triton"]
RANKS = (16, 32, 64, 128)  # a kernel's tile has the smallest of these that holds the adapter's rank
ALIGNMENT = 16  # elements; where a matrix may begin in the flat weights
SLICES = 3  # at most, in one call


@dataclass(frozen=True)
class Slots:
    """All adapter slots, S of them. Tensors lie on one device and may be changed in place between steps.

    - ``weight``: (P,) flat weights in the dtype of x; a leaf that requires grad, though its ``grad`` stays None.
    - ``grad``: (P,) their gradients, in fp32 (float64 for float64).
    - ``rank``: (S,) int32; 0 for an empty slot.
    - ``scale``, ``dropout``: (S,) float64; alpha / rank, say, and the probability with which inputs are dropped.
    - ``fresh``: (S,) bool; gradients of such a slot are written over, the others' are added to. Those of a slot without
      tokens are not touched either way.
    - ``classes``: those of :data:`RANKS` for which there may ever be a slot.
    """

    weight: Tensor
    grad: Tensor
    rank: Tensor
    scale: Tensor
    dropout: Tensor
    fresh: Tensor
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Adapters:
    """The adapters of the layers of one call, L slices: all (L, S) int64 on the device of ``slots``.

    ``a``, ``b``: where A (R, K) and B transposed (R, N) begin in the flat weights, multiples of :data:`ALIGNMENT`; -1
    if the slot does not adapt that layer. ``salt``: tells layers apart in dropout, see :func:`kernels.dropout.kept`.
    """

    slots: Slots
    a: Tensor
    b: Tensor
    salt: Tensor


def rank_class(rank: int) -> int:
    """The smallest of :data:`RANKS` that holds ``rank``. Raises ``ValueError`` if there is none."""
    if not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"an adapter's rank must be from 1 to {RANKS[-1]}, is {rank}")
    return next(r for r in RANKS if rank <= r)


def multi_lora_linear(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    adapters: Adapters,
    segments: Segments,
    keys_T: Tensor | None = None,
    *,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """(T, N) of one layer: :func:`multi_lora_linears` with one slice."""
    options: dict[str, Any] = {"deterministic": deterministic, "backend": backend}
    return multi_lora_linears(x_TK, [weight_NK], [bias_N], adapters, segments, keys_T, **options)[0]


def multi_lora_linears(
    x_TK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Adapters,
    segments: Segments,
    keys_T: Tensor | None = None,
    *,
    deterministic: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """(T, N_l) of each of at most :data:`SLICES` layers with weights (N_l, K), all in the dtype of x.

    Differentiable in x; the gradients of the adapters are added to ``adapters.slots.grad`` when backward runs.
    ``keys_T``: int64 of each token, what its dropout depends on; None drops nothing. ``deterministic``: see the module.

    Raises ``ValueError`` for shapes, dtypes and devices that do not fit, and for weights that require a gradient.
    """
    check(x_TK, weights, biases, adapters, segments, keys_T)
    module = implementation(backend, x_TK)
    call = Call(adapters, segments, keys_T, deterministic, module)
    return _MultiLora.apply(x_TK, adapters.slots.weight, call, *weights, *biases)


@dataclass(frozen=True)
class Call:
    """What both directions of one call read besides activations and weights."""

    adapters: Adapters
    segments: Segments
    keys_T: Tensor | None
    deterministic: bool
    module: ModuleType


class _MultiLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_P: Tensor, call: Call, *layers: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        outputs, shrunk = call.module.forward(x, weights, biases, call)
        ctx.save_for_backward(x, weight_P, *weights, *shrunk)
        ctx.call, ctx.slices = call, len(weights)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, _, *rest = ctx.saved_tensors
        weights, shrunk = rest[: ctx.slices], tuple(rest[ctx.slices :])
        d_x = ctx.call.module.backward(x, weights, shrunk, grads, ctx.call, ctx.needs_input_grad[0])
        return d_x, None, None, *(None for _ in range(2 * ctx.slices))


def implementation(backend: Backend, x: Tensor) -> ModuleType:
    """The module that computes. ``auto`` is Triton on a GPU for 16-bit and fp32 operands.

    Raises ``ValueError`` for an unknown name, or Triton where it is not installed.
    """
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown backend {backend!r}; choose auto, torch or triton")
    installed = find_spec("triton") is not None
    if backend == "triton" and not installed:
        raise ValueError("backend='triton', and triton is not installed; choose auto or torch")
    if backend == "triton" or (backend == "auto" and installed and x.is_cuda and x.dtype != torch.float64):
        from kernels import multi_lora_triton

        return multi_lora_triton
    return multi_lora_torch


def check(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Adapters,
    segments: Segments,
    keys_T: Tensor | None,
) -> None:
    slots = adapters.slots
    if not 1 <= len(weights) <= SLICES or len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights and {len(biases)} biases; a call takes 1 to {SLICES} of each")
    if x.ndim != 2 or len(x) != segments.tokens:
        raise ValueError(f"x is {tuple(x.shape)}, and the segments are of {segments.tokens} tokens")
    for weight, bias in zip(weights, biases, strict=True):
        if weight.ndim != 2 or weight.shape[1] != x.shape[1]:
            raise ValueError(f"weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            raise ValueError("the base is frozen: its weight and bias must not require a gradient")
        if weight.dtype != x.dtype:
            raise ValueError(f"x is {x.dtype} and a weight {weight.dtype}; a call needs one dtype")
    if slots.weight.dtype != x.dtype or slots.grad.dtype != sum_dtype(x):
        raise ValueError(
            f"for x in {x.dtype} slots.weight must be {x.dtype} and slots.grad {sum_dtype(x)}, they are "
            f"{slots.weight.dtype} and {slots.grad.dtype}"
        )
    wanted = (len(weights), segments.slots)
    for name in ("a", "b", "salt"):
        if getattr(adapters, name).shape != wanted:
            raise ValueError(f"adapters.{name} must be {wanted}, is {tuple(getattr(adapters, name).shape)}")
    if slots.rank.shape != (segments.slots,):
        raise ValueError(f"the segments are of {segments.slots} slots, slots.rank is {tuple(slots.rank.shape)}")
    if keys_T is not None and (keys_T.shape != x.shape[:1] or keys_T.dtype != torch.int64):
        raise ValueError(f"keys_T must be ({len(x)},) int64, is {tuple(keys_T.shape)} {keys_T.dtype}")
    if {t.device for t in (x, slots.weight, slots.grad, adapters.a, segments.order_T)} != {x.device}:
        raise ValueError("x, slots, adapters and segments must lie on one device")
