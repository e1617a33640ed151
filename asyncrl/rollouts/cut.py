"""From taken groups to what a trainer rank receives, and back.

A payload is a small header (numbers and lists only, for msgpack) and nine buffers: per sample its ordinal, index and
two lengths, then all prompts, token ids, log-probs, versions and advantages, each concatenated in the order of the
micro-batches. ``decode`` returns views into the received buffers and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollouts.packing import PackingPlan
from asyncrl.rollouts.types import Group, TrainSample

# (name, dtype) of each buffer; the first four have one entry a sample
_PER_SAMPLE = (("ordinal", "<i8"), ("index", "<i4"), ("prompt_length", "<i4"), ("length", "<i4"))
_PER_TOKEN = (
    ("prompt_ids", "<i4"),
    ("token_ids", "<i4"),
    ("logprobs", "<f4"),
    ("versions", "<i4"),
    ("advantages", "<f4"),
)


def train_samples(groups: Sequence[Group], advantages: Sequence[Sequence[float | None]]) -> list[TrainSample]:
    """The samples of a batch, in order.

    Args:
        advantages: ``advantages[g][i]`` belongs to ``groups[g].samples[i]``; None leaves the sample out (it failed).

    Raises:
        ValueError: an advantage is not finite, or the shapes differ.
    """
    samples = []
    for group, row in zip(groups, advantages, strict=True):
        for sample, advantage in zip(group.samples, row, strict=True):
            if advantage is None:
                continue
            if not np.isfinite(advantage):
                raise ValueError(f"sample {sample.ordinal}/{sample.index} has the advantage {advantage}")
            samples.append(
                TrainSample(
                    prompt_ids=group.prompt.token_ids,
                    token_ids=sample.token_ids,
                    logprobs=sample.logprobs,
                    versions=sample.versions,
                    advantages=np.full(len(sample.token_ids), advantage, np.float32),
                    ordinal=sample.ordinal,
                    index=sample.index,
                )
            )
    return samples


def encode(
    plan: PackingPlan, rank: int, samples: Sequence[TrainSample], version: int
) -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """What ``rank`` trains at ``version``: a header that msgpack can carry and buffers of bytes.

    Raises:
        ValueError: the plan was made for other samples, or a sample's arrays differ in length.
    """
    if plan.lengths != [len(sample) for sample in samples]:
        raise ValueError(f"the plan is for {len(plan.lengths)} samples of other lengths than these {len(samples)}")
    micro = plan.rank[rank].micro
    chosen = [samples[index] for batch in micro for index in batch]
    for sample in chosen:
        count = len(sample.token_ids)
        if not count == len(sample.logprobs) == len(sample.versions) == len(sample.advantages):
            raise ValueError(f"sample {sample.ordinal}/{sample.index} has arrays of different lengths")
    columns = [
        np.array([sample.ordinal for sample in chosen], "<i8"),
        np.array([sample.index for sample in chosen], "<i4"),
        np.array([len(sample.prompt_ids) for sample in chosen], "<i4"),
        np.array([len(sample.token_ids) for sample in chosen], "<i4"),
    ]
    for name, dtype in _PER_TOKEN:
        parts = [np.asarray(getattr(sample, name), dtype) for sample in chosen]
        columns.append(np.concatenate(parts) if parts else np.zeros(0, dtype))
    header = {"version": version, "rank": rank, "micro": [len(batch) for batch in micro]}
    return header, [column.view(np.uint8) for column in columns]


def decode(header: dict[str, Any], buffers: Sequence[Any]) -> list[list[TrainSample]]:
    """The micro-batches of one rank; arrays are read-only views if the buffers are.

    Args:
        buffers: anything with the buffer protocol, in the order of ``encode``.

    Raises:
        ValueError: the frame contradicts itself; nothing is trained on it.
    """
    fields = _PER_SAMPLE + _PER_TOKEN
    if len(buffers) != len(fields):
        raise ValueError(f"a batch has {len(fields)} buffers, not {len(buffers)}")
    columns = {
        name: np.frombuffer(buffer, dtype) if len(buffer) else np.zeros(0, dtype)
        for (name, dtype), buffer in zip(fields, buffers, strict=True)
    }
    if len({len(columns[name]) for name, _ in _PER_SAMPLE}) != 1:
        raise ValueError("the columns of a batch hold different numbers of samples")
    prompt_ends = _ends(columns, "prompt_length", ("prompt_ids",))
    ends = _ends(columns, "length", ("token_ids", "logprobs", "versions", "advantages"))
    counts = [int(count) for count in header["micro"]]
    if sum(counts) != len(ends) or any(count < 0 for count in counts):
        raise ValueError(f"micro-batches of {counts} samples do not add up to {len(ends)} samples")
    samples = []
    start = prompt_start = 0
    for number, (end, prompt_end) in enumerate(zip(ends, prompt_ends, strict=True)):
        samples.append(
            TrainSample(
                prompt_ids=columns["prompt_ids"][prompt_start:prompt_end],
                **{name: columns[name][start:end] for name, _ in _PER_TOKEN[1:]},
                ordinal=int(columns["ordinal"][number]),
                index=int(columns["index"][number]),
            )
        )
        start, prompt_start = end, prompt_end
    micro, first = [], 0
    for count in counts:
        micro.append(samples[first : first + count])
        first += count
    return micro


def _ends(columns: dict[str, NDArray], lengths: str, names: tuple[str, ...]) -> list[int]:
    """Where each sample ends in the concatenated columns ``names``."""
    if len(columns[lengths]) and columns[lengths].min() < 0:
        raise ValueError(f"negative {lengths}")
    ends = np.cumsum(columns[lengths], dtype=np.int64).tolist()
    total = ends[-1] if ends else 0
    for name in names:
        if len(columns[name]) != total:
            raise ValueError(f"{name} holds {len(columns[name])} tokens, not {total}")
    return ends
