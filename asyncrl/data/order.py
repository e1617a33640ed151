"""The order in which one source is learnt: in each epoch a new permutation, and any place of it found in O(1).

Up to ``SMALL`` records a permutation is an array. Above that it is a cipher on the numbers: a balanced Feistel network
permutes range(4**k), the smallest that holds them all, and a number that falls outside is enciphered again until it is
inside (cycle walking; Black and Rogaway 2002), less than four times on average. It needs no memory.

A source of blocks (row groups of Parquet) is permuted by block, and inside each block, so that neighbours in the order
lie together in the file.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SMALL = 1 << 20
_ROUNDS = 6
_MASK = (1 << 64) - 1


class Order:
    """``record(k)`` is the number of the k-th record drawn from source ``source``; epoch follows epoch without a gap.

    A function of its arguments alone, so that a run which is resumed draws what would have come next.
    """

    def __init__(self, total: int, seed: int, source: int = 0, blocks: Sequence[int] = ()) -> None:
        if total < 1:
            raise ValueError("an order needs records")
        self._total, self._seed, self._source = total, seed, source
        self._blocks = np.asarray(blocks, dtype=np.int64) if len(blocks) > 1 else None
        self._block_starts = np.cumsum([0, *blocks]) if len(blocks) > 1 else None

    def record(self, drawn: int) -> int:
        epoch, at = divmod(drawn, self._total)
        if self._blocks is None:
            return permuted(at, self._total, self._key(epoch))
        order, starts = self._layout(epoch)
        place = int(np.searchsorted(starts, at, side="right")) - 1
        block = int(order[place])
        assert self._block_starts is not None
        inside = permuted(at - int(starts[place]), int(self._blocks[block]), (*self._key(epoch), 1, block))
        return int(self._block_starts[block]) + inside

    def _key(self, epoch: int) -> tuple[int, ...]:
        return (self._seed, epoch, self._source) if self._source else (self._seed, epoch)

    @functools.lru_cache(maxsize=2)  # noqa: B019  # lives as long as the run
    def _layout(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the blocks in the order of ``epoch``, where each begins)."""
        assert self._blocks is not None
        order = np.random.default_rng(self._key(epoch)).permutation(len(self._blocks))
        return order, np.cumsum([0, *self._blocks[order][:-1]])


def permuted(at: int, total: int, key: tuple[int, ...]) -> int:
    """Where the permutation of range(``total``) that ``key`` names sends ``at``."""
    return int(_array(total, key)[at]) if total <= SMALL else enciphered(at, total, key)


@functools.lru_cache(maxsize=8)
def _array(total: int, key: tuple[int, ...]) -> NDArray[np.int64]:
    return np.random.default_rng(list(key)).permutation(total)


def enciphered(at: int, total: int, key: tuple[int, ...]) -> int:
    """The same without an array."""
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    rounds = _round_keys(key)
    while True:
        left, right = at >> half, at & ((1 << half) - 1)
        for round_key in rounds:
            left, right = right, left ^ (_mixed(right ^ round_key) & ((1 << half) - 1))
        at = left << half | right
        if at < total:
            return at


@functools.lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(word) for word in np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64))


def _mixed(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
