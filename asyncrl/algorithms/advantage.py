"""Advantages from rewards, in numpy, on the controller.

Groups are segments named by an id, with their real size; nothing assumes a fixed stride. Rewards that differ by
no more than float noise count as equal: they carry no signal, and dividing by their standard deviation would
turn the noise into advantages of size one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Formula = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # rewards of one group -> its advantages

NOISE = 1e-9  # relative to the largest reward of the group


def has_variance(rewards: ArrayLike) -> bool:
    """True if a group's rewards differ by more than float noise. A group of one has none.

    >>> has_variance([1.0, 1.0, 0.0]), has_variance([0.1 + 0.2, 0.3]), has_variance([1.0])
    (True, False, False)
    """
    r = np.asarray(rewards, dtype=np.float64)
    if r.size < 2:
        return False
    return bool(np.ptp(r) > NOISE * max(1.0, float(np.abs(r).max())))


def group_mean(rewards: ArrayLike, group_ids: ArrayLike) -> NDArray[np.float64]:
    """``R_i - mean of its group`` (Dr.GRPO, arXiv 2503.20783). Shapes (n,), (n,) -> (n,).

    >>> group_mean([1.0, 0.0, 0.5], [7, 7, 9]).tolist()
    [0.5, -0.5, 0.0]
    """
    return _by_group(rewards, group_ids, lambda r: r - r.mean())


def group_norm(rewards: ArrayLike, group_ids: ArrayLike, eps: float = 1e-6) -> NDArray[np.float64]:
    """``(R_i - mean) / (std + eps)`` of its group (GRPO, arXiv 2402.03300), std with divisor n. (n,), (n,) -> (n,).

    >>> group_norm([1.0, 0.0], [0, 0], eps=0.0).tolist()
    [1.0, -1.0]
    """
    return _by_group(rewards, group_ids, lambda r: (r - r.mean()) / (r.std() + eps))


ADVANTAGES = {"group_norm": group_norm, "group_mean": group_mean}


def _by_group(rewards: ArrayLike, group_ids: ArrayLike, formula: Formula) -> NDArray[np.float64]:
    r, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids)
    if r.ndim != 1 or r.shape != ids.shape:
        raise ValueError(f"rewards {r.shape} and group ids {ids.shape} must be vectors of one length")
    if not np.isfinite(r).all():
        raise ValueError("a reward is not finite; a failed sample must not reach the advantage")
    out = np.zeros_like(r)
    _, segment = np.unique(ids, return_inverse=True)
    for g in range(int(segment.max(initial=-1)) + 1):
        members = segment == g
        if has_variance(r[members]):
            out[members] = formula(r[members])
    return out
