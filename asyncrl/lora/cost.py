"""How long one step of a pack takes: a model with five coefficients, fitted to steps that were timed.

A pack is a set of jobs whose adapters are trained in one pass over the frozen base. A step of it costs

    T = max(floor, fixed + per_token * tokens + per_square * squares) + per_rank_token * rank_tokens + per_job * jobs

``floor`` is the time to read the base's weights (on a CPU: to call its layers), which few tokens cannot go below;
``squares`` are the squared lengths of the documents, which attention pays for; ``rank_tokens`` the tokens times the
ranks of their adapters; ``per_job`` what an adapter costs however few tokens it has (its optimizer step).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Load:
    """What one step of a pack has to do; loads of jobs add up to the load of their pack."""

    tokens: float = 0.0
    squares: float = 0.0  # sum of the squared lengths of the documents
    rank_tokens: float = 0.0  # sum of tokens times the rank of the adapter they go through
    jobs: float = 0.0

    def __add__(self, other: Load) -> Load:
        return Load(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Load:
        return Load(*(factor * a for a in astuple(self)))


def job_load(lengths: Sequence[int], rank: int) -> Load:
    """Of a job's step on documents of ``lengths`` tokens."""
    tokens = float(sum(lengths))
    return Load(tokens, float(sum(n * n for n in lengths)), tokens * rank, 1.0)


def total(loads: Iterable[Load]) -> Load:
    return sum(loads, Load())


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by the formula above. ``floor`` is never below ``fixed``."""

    floor: float
    fixed: float
    per_token: float
    per_square: float = 0.0
    per_rank_token: float = 0.0
    per_job: float = 0.0

    def __call__(self, load: Load) -> float:
        return max(self.floor, self.base(load)) + self.extra(load)

    def base(self, load: Load) -> float:
        """Seconds in the base's layers when they are not at their floor."""
        return self.fixed + self.per_token * load.tokens + self.per_square * load.squares

    def extra(self, load: Load) -> float:
        """Seconds that adapters add."""
        return self.per_rank_token * load.rank_tokens + self.per_job * load.jobs


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> StepTime:
    """The model with the least squared relative error on the timed steps; no coefficient is negative.

    Which steps are at the floor is not known: every cut of them, in the order of their tokens, is tried.

    Raises ``ValueError`` without a step, or for times that are not positive.
    """
    if not loads or min(seconds) <= 0:
        raise ValueError("a model of step times is fitted to steps that took time")
    order = sorted(range(len(loads)), key=lambda i: loads[i].tokens)
    times = np.array([seconds[i] for i in order])
    found: list[tuple[float, int, StepTime]] = []
    for at_floor in range(len(order)):
        rows = np.array([_row(loads[i], place < at_floor) for place, i in enumerate(order)])
        floor, fixed, *rest = nonnegative_least_squares(rows / times[:, None], np.ones(len(order)))
        model = StepTime(max(floor, fixed), fixed, *rest)
        error = sum((model(loads[i]) / seconds[i] - 1) ** 2 for i in order)
        found.append((error, at_floor, model))
    return min(found, key=lambda entry: entry[:2])[2]


def _row(load: Load, at_floor: bool) -> list[float]:
    base = [1.0, 0.0, 0.0, 0.0] if at_floor else [0.0, 1.0, load.tokens, load.squares]
    return [*base, load.rank_tokens, load.jobs]


def nonnegative_least_squares(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """``argmin |rows x - wanted|`` over ``x >= 0``.

    The minimum is the unbounded one on its own support, so with few columns all supports are tried.
    """
    columns = rows.shape[1]
    scale = np.linalg.norm(rows, axis=0)
    scaled = rows / np.where(scale > 0, scale, 1.0)
    best, best_error = np.zeros(columns), float(wanted @ wanted)
    for support in itertools.chain.from_iterable(
        itertools.combinations(range(columns), size) for size in range(1, columns + 1)
    ):
        chosen = list(support)
        if not scale[chosen].all():
            continue
        found = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)[0]
        if (found < 0).any():
            continue
        left = scaled[:, chosen] @ found - wanted
        if (error := float(left @ left)) < best_error * (1 - 1e-9):
            best, best_error = np.zeros(columns), error
            best[chosen] = found / scale[chosen]
    return best


class OnlineFit:
    """The model that the last ``memory`` timed steps give; fitted anew when it has become wrong.

    ``residual`` is the running mean of its relative errors. Above ``limit`` it is fitted to what was seen last.
    """

    def __init__(self, model: StepTime, limit: float = 0.05, memory: int = 64) -> None:
        self.model, self.limit = model, limit
        self.residual = 0.0
        self._seen: deque[tuple[Load, float]] = deque(maxlen=memory)
        self._since = 0

    def see(self, load: Load, seconds: float) -> bool:
        """Takes in a timed step; whether the model has changed."""
        self._seen.append((load, seconds))
        self._since += 1
        error = abs(self.model(load) / seconds - 1)
        self.residual += (error - self.residual) / min(self._since, 16)
        if self._since < 8 or self.residual <= self.limit:
            return False
        loads, times = zip(*self._seen, strict=True)
        self.model, self._since, self.residual = fit(loads, times), 0, 0.0
        return True
