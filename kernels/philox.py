"""Philox4x32 (Salmon et al., SC 2011): random bits as a function of a key and a counter, without any state.

Seven rounds are the fewest that pass BigCrush (the paper, table 2). The same numbers come from the Triton function and
from plain torch, so a kernel that uses them can be compared with its reference bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDS = 7
_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


@triton.jit
def philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four words of uint32 for counter (c0, c1, c2, c3) and key (k0, k1), all uint32 tensors or scalars."""
    for _ in tl.static_range(ROUNDS):
        high0, high1 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


def philox_reference(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = ROUNDS
) -> list[Tensor]:
    """The same in plain torch: int64 tensors that hold values below 2^32, of any device."""
    c0, c1, c2, c3 = counter
    k0, k1 = (k & _MASK for k in key)
    for _ in range(rounds):
        a, b = c0 * _M0, c2 * _M1  # modulo 2^64: the sign bit is a bit like any other
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return [c0, c1, c2, c3]


def rounding_bits(count: int, seed: int, step: int, tensor: int, first: int, device: torch.device) -> Tensor:
    """16 random bits for each of ``count`` elements, int32 in [0, 65535]; one Philox call serves eight elements.

    Element i of a shard whose bits begin at ``first`` in those of the whole tensor takes half ``i % 2`` (low first) of
    word ``i % 8 // 2`` of the call with counter ``(group, tensor, step, group >> 32)``, where ``group = first // 8 +
    i // 8``, and key ``seed``.
    """
    group = torch.arange(-(-count // 8), device=device) + first // 8
    c1, c2 = (torch.full_like(group, value & _MASK) for value in (tensor, step))
    words = philox_reference((group & _MASK, c1, c2, group >> 32), (seed, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=1).flatten()[:count].to(torch.int32)
