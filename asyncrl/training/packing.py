"""Collation: the samples of one micro-batch become one packed row and the vectors of its predicted tokens.

A prompt of P tokens and a completion of T tokens give a stem of ``prompt[:-1]`` and a branch of
``[prompt[-1], *completion[:-1]]``: the T inputs that predict the T completion tokens. The last completion token
predicts nothing and is not an input. Two layouts hold the same mathematics:

- *shared*: equal prompts in a micro-batch have one stem (a GRPO group of 16 pays for its prompt once);
- *plain*: each sample is one causal document, stem and branch in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.loss import LossMask
from asyncrl.rollouts.types import TrainSample
from asyncrl.training.documents import Documents
from asyncrl.training.errors import BatchError

SHARE_BELOW = 0.75  # share prompts if that leaves at most this part of the tokens


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the device. ``predict_M`` is the row position whose hidden state predicts ``target_M``."""

    input_1T: Tensor
    position_1T: Tensor
    documents: Documents
    predict_M: Tensor
    target_M: Tensor
    behaviour_M: Tensor
    advantage_M: Tensor
    mask: LossMask
    age_M: Tensor  # current version minus the token's; -1 in samples made under several versions
    tokens: int  # trained tokens
    samples: int  # samples with a trained token
    order: list[int] = field(default_factory=list)  # for each packed sample, its place among those that have tokens


def pack(
    samples: Sequence[TrainSample],
    version: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    share: bool = True,
) -> PackedBatch:
    """Packs ``samples``; if there are none, a dummy document with a zero mask keeps the graph.

    ``version`` is the trainer's, ``dtype`` that of the loss. A sample without completion tokens has no gradient and
    counts in no denominator: it is left out. Raises :class:`BatchError` for an empty prompt, unequal lengths, or a
    behaviour log-prob or advantage that is not finite.
    """
    for s in samples:
        _check(s)
    samples = [s for s in samples if len(s.token_ids)]
    dummy = not samples
    if dummy:
        token, value = np.zeros(1, np.int32), np.zeros(1, np.float32)
        samples = [TrainSample(token, token, logprobs=value, versions=token, advantages=value)]
    layout = _shared_layout(samples) if share else None
    lists, order, inputs, positions, predict = layout or _plain_layout(samples)
    ordered = [samples[i] for i in order]
    lengths = np.asarray([len(s.token_ids) for s in ordered])

    def vector(values: list[np.ndarray], kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=kind)

    trained = torch.full((int(lengths.sum()),), not dummy, dtype=torch.bool, device=device)
    sample_M = torch.from_numpy(np.repeat(np.arange(len(ordered)), lengths)).to(device)
    return PackedBatch(
        input_1T=vector(inputs, torch.int64)[None],
        position_1T=vector(positions, torch.int64)[None],
        documents=Documents(*lists, device=device),
        predict_M=vector(predict, torch.int64),
        target_M=vector([s.token_ids for s in ordered], torch.int64),
        behaviour_M=vector([s.logprobs for s in ordered], dtype),
        advantage_M=vector([s.advantages for s in ordered], dtype),
        mask=LossMask(trained, sample_M, len(ordered)),
        age_M=vector([_ages(s, version) for s in ordered], torch.int64),
        tokens=0 if dummy else int(lengths.sum()),
        samples=0 if dummy else len(ordered),
        order=order,
    )


def _check(s: TrainSample) -> None:
    name = f"sample {s.index} of group {s.ordinal}"
    n = len(s.token_ids)
    if len(s.prompt_ids) == 0:
        raise BatchError(f"{name} has an empty prompt: nothing predicts its first token")
    if not (len(s.logprobs) == len(s.versions) == len(s.advantages) == n):
        found = f"{len(s.logprobs)} log-probs, {len(s.versions)} versions and {len(s.advantages)} advantages"
        raise BatchError(f"{name} has {n} tokens but {found}")
    if not (np.isfinite(s.logprobs).all() and np.isfinite(s.advantages).all()):
        raise BatchError(f"{name} has a behaviour log-prob or advantage that is not finite; reject it before training")


def _ages(s: TrainSample, version: int) -> np.ndarray:
    mixed = bool((s.versions != s.versions[0]).any())
    return np.full(len(s.versions), -1) if mixed else version - np.asarray(s.versions, dtype=np.int64)


def _branch(s: TrainSample) -> np.ndarray:
    return np.concatenate([s.prompt_ids[-1:], s.token_ids[:-1]])


Layout = tuple[tuple[list[int], list[int], list[int]], list[int], list[np.ndarray], list[np.ndarray], list[np.ndarray]]


def _plain_layout(samples: Sequence[TrainSample]) -> Layout:
    order = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
    inputs, positions, predict, lengths, start = [], [], [], [], 0
    for i in order:
        s = samples[i]
        row = np.concatenate([s.prompt_ids[:-1], _branch(s)])
        inputs.append(row)
        positions.append(np.arange(len(row)))
        predict.append(start + np.arange(len(s.prompt_ids) - 1, len(row)))
        lengths.append(len(row))
        start += len(row)
    return (lengths, [], []), order, inputs, positions, predict


def _shared_layout(samples: Sequence[TrainSample]) -> Layout | None:
    """None if too few tokens would be saved."""
    stems: dict[bytes, np.ndarray] = {}
    keys = [np.asarray(s.prompt_ids, dtype=np.int32).tobytes() for s in samples]
    for key, s in zip(keys, samples, strict=True):
        stems.setdefault(key, s.prompt_ids[:-1])
    stem_tokens = sum(map(len, stems.values()))
    branch_tokens = sum(len(s.token_ids) for s in samples)
    if stem_tokens + branch_tokens > SHARE_BELOW * sum(len(s) - 1 for s in samples):
        return None
    by_length = sorted(stems, key=lambda key: -len(stems[key]))
    index = {key: i for i, key in enumerate(by_length)}
    # Within one length branches of a prompt stay together, so that a bucket meets few distinct stems.
    order = sorted(range(len(samples)), key=lambda i: (-len(samples[i].token_ids), index[keys[i]]))
    branches = [_branch(samples[i]) for i in order]
    inputs = [stems[key] for key in by_length] + branches
    positions = [np.arange(len(stems[key])) for key in by_length]
    positions += [len(samples[i].prompt_ids) - 1 + np.arange(len(b)) for i, b in zip(order, branches, strict=True)]
    predict = [stem_tokens + np.arange(branch_tokens)]
    lists = [len(stems[key]) for key in by_length], [len(b) for b in branches], [index[keys[i]] for i in order]
    return lists, order, inputs, positions, predict
