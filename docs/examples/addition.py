"""A task of one's own: sums of two numbers below 100, rewarded by how many digits are right.

python -m torch.distributed.run launch/train.py +experiment=grpo \\
    env=function env.function=docs/examples/addition.py:task env.size=7500
"""

from __future__ import annotations

import random

# Every pair once, in a fixed order; the first are for training, the last 2500 are held out.
PAIRS = [(left, right) for left in range(100) for right in range(100)]
random.Random(0).shuffle(PAIRS)
HELDOUT = 2500


def task(split: str, index: int, completion: str | None = None):
    """The question (a dict) without a completion, its reward (a number from 0 to 1) with one."""
    training = len(PAIRS) - HELDOUT
    left, right = PAIRS[index % training] if split == "train" else PAIRS[training + index % HELDOUT]
    if completion is None:
        return {"prompt": f"{left} + {right} = ", "sum": left + right}
    answer, given = str(left + right), completion.strip()
    if len(given) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(answer, given, strict=True)) / len(answer)
