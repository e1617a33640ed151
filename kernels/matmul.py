"""Matrix products that are accumulated, and returned, in fp32 (float64 for float64 operands)."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums over products of ``x`` are kept: float64 for float64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """``x`` as an operand: as it is on a GPU, whose tensor cores do not round the sums; in fp32 on a CPU."""
    return x if x.is_cuda else x.to(sum_dtype(x))


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``a @ b``, (n, k) @ (k, m) -> (n, m) in :func:`sum_dtype`; into ``out`` if given.

    ``out`` may also have the operands' dtype: then only the finished sums are rounded. On a GPU both operands have one
    dtype; on a CPU they are made fp32 if they are not.
    """
    wide = sum_dtype(a)
    wanted = wide if out is None else out.dtype
    if not a.is_cuda:
        a, b = a.to(wide), b.to(wide)
        if out is None or wanted == wide:
            return torch.mm(a, b, out=out)
        return out.copy_(torch.mm(a, b))
    if a.dtype == wanted:
        return torch.mm(a, b, out=out)
    if out is None:
        return torch.mm(a, b, out_dtype=wanted)
    return torch.ops.aten.mm.dtype_out(a, b, wanted, out=out)


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` in place. A ``total`` in a narrower dtype than fp32 is rounded once a call."""
    if not a.is_cuda:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def chunks(total: int, size: int) -> list[slice]:
    """Consecutive slices of at most ``size`` that cover ``range(total)``."""
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]
