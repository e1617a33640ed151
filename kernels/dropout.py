"""Dropout masks that are a function of a token's key, a layer's salt and a feature's number: no state, no stored mask.

All arithmetic is of integers, so plain torch and Triton give the same mask on every device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.matmul import sum_dtype

ODD = -7046029254386353131  # 2^64 over the golden ratio, as int64
_MIX = (-4658895280553007687, -7723592293110705685)
_MIX_32 = (0x7FEB352D, -2073254261)


def mix(x: Tensor) -> Tensor:
    """A one-to-one hash of int64 values: SplitMix64's finalizer (Steele, Lea and Flood 2014, figure 16)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX[1]
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@torch.library.custom_op("asyncrl::kept", mutates_args=())
def kept(keys_T: Tensor, salt: Tensor, features: int, p: Tensor) -> Tensor:
    """Boolean (T, features): False with probability ``p``. ``salt``: an int64 that tells layers apart.

    An operator that torch.compile does not look into: inductor's vector code of this arithmetic gets a third of the
    bits wrong on a processor with AVX-512 (torch 2.13).
    """
    row_T = (mix(keys_T ^ salt) >> 32).to(torch.int32)
    column_K = (mix(torch.arange(features, device=keys_T.device) * ODD + salt) >> 32).to(torch.int32)
    bits = row_T[:, None] ^ column_K
    bits *= _MIX_32[0]
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= _MIX_32[1]
    return bits >= threshold(p)


@kept.register_fake
def _(keys_T: Tensor, salt: Tensor, features: int, p: Tensor) -> Tensor:
    return keys_T.new_empty((keys_T.shape[0], features), dtype=torch.bool)  # len() would fix the number of tokens


def threshold(p: Tensor) -> Tensor:
    """int32; hashes below it are dropped."""
    return ((p.double() * 2**32).round() - 2**31).clamp(max=2**31 - 1).to(torch.int32)


def drop(x: Tensor, mask: Tensor, p: Tensor) -> Tensor:
    """Zero where ``mask`` is False, the rest divided by ``1 - p``; the factor is not rounded to a 16-bit dtype of x."""
    factor = (1.0 / (1.0 - p.double())).to(sum_dtype(x)).expand(1)
    return torch.where(mask, (x * factor).to(x.dtype), 0.0)


@triton.jit
def _mix(x):
    """:func:`mix` of uint64 values."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def row_hashes(keys, salt):
    """uint32 of each token; ``keys`` and ``salt`` are int64."""
    return (_mix((keys ^ salt).to(tl.uint64, bitcast=True)) >> 32).to(tl.uint32)


@triton.jit
def column_hashes(columns, salt):
    """uint32 of each feature; ``columns`` is int32."""
    x = columns.to(tl.int64).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return (_mix(x + salt.to(tl.uint64, bitcast=True)) >> 32).to(tl.uint32)


@triton.jit
def kept_tile(rows, columns, threshold):
    """:func:`kept` of a tile whose rows and columns have these hashes."""
    bits = (rows[:, None] ^ columns[None, :]) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits.to(tl.int32, bitcast=True) >= threshold
