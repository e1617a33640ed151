"""Held-out accuracy, measured by the engines that also serve training.

An evaluation is one greedy completion of every held-out item at one weight version. Its requests carry negative
ordinals, so the generator treats them as any other request and they never touch a staleness slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.rollouts.types import Prompt, Sample


@dataclass
class Evaluation:
    """Progress of one evaluation. ``accuracy`` is the share of items with reward 1.

    An item whose reward failed counts as not solved and is counted in ``failures``.
    """

    version: int
    prompts: dict[int, Prompt]  # by ordinal, all negative
    too_long: int = 0  # items left out because their prompts do not fit the engine
    results: dict[int, float] = field(default_factory=dict)
    failures: int = 0
    unreadable: int = 0  # of the results, answers that the task's scorer could not read

    @classmethod
    def of(cls, version: int, prompts: list[Prompt], too_long: int = 0) -> Evaluation:
        return cls(version, {-(i + 1): prompt for i, prompt in enumerate(prompts)}, too_long)

    def record(self, sample: Sample) -> None:
        self.results[sample.ordinal] = sample.reward if sample.reward is not None else 0.0
        self.failures += sample.failure is not None

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.prompts)

    @property
    def accuracy(self) -> float:
        return sum(r >= 1.0 for r in self.results.values()) / len(self.results)
