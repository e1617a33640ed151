"""What a model learns from: tokens and a mask of those that are targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Conversation:
    """``learnt[t]`` says whether token t is a target. Token 0 never is: nothing predicts it."""

    ids: NDArray[np.int32]  # (T,)
    learnt: NDArray[np.bool_]  # (T,)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Pair:
    """Two conversations that both begin with the same ``prompt`` tokens, of which neither learns any."""

    chosen: Conversation
    rejected: Conversation
    prompt: int

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)
