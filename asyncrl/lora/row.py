"""Micro-batches of several adapters in one packed row: their documents slot by slot, each attended to by itself."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from asyncrl.algorithms.loss import LossMask
from asyncrl.training.attention import attend_documents
from asyncrl.training.documents import Documents
from asyncrl.training.packing import PackedBatch

K = TypeVar("K", bound=Hashable)


def passes(sizes: Mapping[K, Sequence[int]], cap: int) -> list[list[tuple[K, int]]]:
    """Which micro-batches go through the base together: (key, number) of each, pass by pass.

    ``sizes``: tokens of each one's micro-batches. They are taken in their order, at most one of each key a pass, and
    together at most ``cap`` tokens, unless a single one has more. Those without tokens are left out.
    """
    waiting = {key: [i for i, tokens in enumerate(mine) if tokens] for key, mine in sizes.items()}
    found: list[list[tuple[K, int]]] = []
    while any(waiting.values()):
        here: list[tuple[K, int]] = []
        room = cap
        for key, numbers in waiting.items():
            if numbers and (not here or sizes[key][numbers[0]] <= room):
                room -= sizes[key][numbers[0]]
                here.append((key, numbers.pop(0)))
        found.append(here)
    return found


class PackDocuments(Documents):
    """The documents of several batches in one row; stands where those of a batch do in attention."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self.parts = list(parts)
        self.sizes = [sum(part.stem_lengths) for part in parts]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """(T, H, D), (T, Hk, D) twice -> (T, H, D): one call a batch, as if it were alone."""
        pieces = zip(q.split(self.sizes), k.split(self.sizes), v.split(self.sizes), self.parts, strict=True)
        return torch.cat([attend_documents(*piece, scale, window) for piece in pieces])


def join(parts: Sequence[PackedBatch]) -> PackedBatch:
    """The batches behind each other. ``order`` is each one's own."""
    if len(parts) == 1:
        return parts[0]
    tokens = _begins([part.input_1T.shape[1] for part in parts])
    samples = _begins([part.mask.samples for part in parts])

    def cat(name: str, dim: int = 0) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts], dim)

    mask = LossMask(
        torch.cat([part.mask.trained_M for part in parts]),
        torch.cat([part.mask.sample_M + begin for part, begin in zip(parts, samples, strict=True)]),
        sum(part.mask.samples for part in parts),
    )
    return PackedBatch(
        input_1T=cat("input_1T", 1),
        position_1T=cat("position_1T", 1),
        documents=PackDocuments([part.documents for part in parts]),
        predict_M=torch.cat([part.predict_M + begin for part, begin in zip(parts, tokens, strict=True)]),
        target_M=cat("target_M"),
        behaviour_M=cat("behaviour_M"),
        advantage_M=cat("advantage_M"),
        mask=mask,
        age_M=cat("age_M"),
        tokens=sum(part.tokens for part in parts),
        samples=sum(part.samples for part in parts),
        order=[place for part in parts for place in part.order],
    )


def _begins(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]
