"""Linear layers whose products run in 8-bit floating point, on GPUs that have it.

Forward and the gradient of the input are products of fp8 operands, each scaled by its own largest value (one scale a
tensor, found anew every time); accumulation and results are not fp8. The gradient of the weight stays in the dtype of
the activations: it goes into the master weights, and its long sums over tokens suffer most from 8 bits. Weights and
activations have 3 bits of mantissa (e4m3), gradients 2 and more range (e5m2): Micikevicius et al. 2022, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncrl.training.errors import ModelError
from asyncrl.training.lora import LoraLinear
from asyncrl.weights.gather import local_of

MULTIPLE = 16  # both sizes of a weight, as the hardware wants them
CAPABILITY = (8, 9)  # Ada, Hopper and later


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with fp8 products: (..., K), (N, K), (N,) -> (..., N) in the dtype of ``x``.

    K and N are multiples of 16.
    """
    out: Tensor = Float8Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


def convert(layer: nn.Module) -> None:
    """Has the linear layers in a decoder layer compute by :func:`linear`."""
    for module in layer.modules():
        if isinstance(module, LoraLinear):
            module.product = linear  # its own two are too thin
        elif type(module) is nn.Linear:
            module.forward = _Forward(module)  # type: ignore


def check_sizes(layer: nn.Module) -> None:
    """Raises :class:`ModelError` for a linear layer whose part on this rank has no size for fp8 products."""
    for name, module in layer.named_modules():
        if type(module) in (nn.Linear, LoraLinear):
            rows, columns = local_of(name, module.weight).tensor.shape
            if rows % MULTIPLE or columns % MULTIPLE:
                size = f"{rows} x {columns} on a rank"
                raise ModelError(f"model.compute_dtype=float8: {name} is {size}, and fp8 products need multiples of 16")


def check_device(device: torch.device) -> None:
    """Raises :class:`ModelError` for a GPU without fp8. On a CPU the products are emulated, for tests."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ModelError(f"model.compute_dtype=float8: {name} has no fp8 products; set it to bfloat16")


class _Forward:
    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._module.weight, self._module.bias)


class Float8Linear(torch.autograd.Function):
    """(M, K), (N, K) -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)  # not their fp8 forms: the weight is FSDP2's to free and gather
        return product(x, weight, torch.float8_e4m3fn, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad
        d_x = product(grad, weight.t(), torch.float8_e5m2, x.dtype) if need_x else None
        return d_x, grad.t() @ x if need_weight else None


def product(a: Tensor, b: Tensor, a_dtype: torch.dtype, out_dtype: torch.dtype) -> Tensor:
    """``a @ b.t()`` of fp8 operands, (M, K) in ``a_dtype`` and (N, K) in e4m3."""
    (a8, a_scale), (b8, b_scale) = to_float8(a, a_dtype), to_float8(b, torch.float8_e4m3fn)
    if a.is_cuda:
        return torch._scaled_mm(a8.contiguous(), b8.contiguous().t(), a_scale, b_scale, out_dtype=out_dtype)
    return F.linear(a8.float() * a_scale, b8.float() * b_scale).to(out_dtype)


def to_float8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(values in ``dtype``, fp32 scale to multiply them by): the largest value becomes the largest of ``dtype``."""
    most = torch.finfo(dtype).max
    scale = x.detach().abs().amax().float().clamp(min=1e-12) / most
    return (x.float() / scale).clamp(-most, most).to(dtype), scale
