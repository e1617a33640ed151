"""The records that travel from a generator to a trainer.

Everything is token ids and numbers from the engine; text is never tokenised again. Shapes: P prompt tokens,
T completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One item of the environment, tokenised once.

    ``item_id`` names it for ever (``"train:17"``); ``entry`` is what the scorer needs and is JSON-able.
    """

    item_id: str
    index: int
    token_ids: NDArray[np.int32]  # (P,)
    entry: dict[str, Any]


@dataclass
class Sample:
    """One completion of one prompt.

    ``logprobs[t]`` is the log-probability with which the engine drew ``token_ids[t]`` (temperature applied) and
    ``versions[t]`` the weight version that drew it. ``finish_reason`` is the engine's own ("stop", "length").
    Exactly one of ``reward`` and ``failure`` is set once the sample is scored.
    """

    ordinal: int  # of its group
    index: int  # in its group
    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,)
    versions: NDArray[np.int32]  # (T,)
    finish_reason: str
    generator: str
    reward: float | None = None
    failure: str | None = None
    text: str = ""


@dataclass
class Group:
    """``group_size`` samples of one prompt. ``ordinal`` is its place in the order of admission."""

    ordinal: int
    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    epoch: int = 0


@dataclass
class TrainSample:
    """What a trainer sees of one sample: everything per completion token, nothing to look up.

    ``advantages`` is constant over a sample in GRPO but is carried per token.
    """

    prompt_ids: NDArray[np.int32]  # (P,)
    token_ids: NDArray[np.int32]  # (T,)
    logprobs: NDArray[np.float32]  # (T,)
    versions: NDArray[np.int32]  # (T,)
    advantages: NDArray[np.float32]  # (T,)
    ordinal: int = 0
    index: int = 0

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)
