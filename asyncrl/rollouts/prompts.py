"""The order of prompts: a different permutation every epoch, resumable from two numbers.

The permutation of [0, n) is a Feistel network over the next power of four, walked until the value is below n ("cycle
walking", Black and Rogaway 2002, section 4). It costs no memory and no set-up, position k is found without the k
before it, and it depends on nothing but (seed, epoch, n): not on the version of numpy, so a run resumes on the same
prompts after an upgrade.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.rollouts.types import Prompt

_MASK = 2**64 - 1
_ROUNDS = 6


class PromptError(RuntimeError):
    """No prompt can be served; the message says why."""


def mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits to 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(position: int, size: int, seed: int, epoch: int) -> int:
    """Element ``position`` of the permutation of range(size) that (seed, epoch) name."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = mix(mix(seed & _MASK) ^ epoch)
    keys = [mix(key + number) for number in range(_ROUNDS)]
    value = position
    while True:
        left, right = value >> half, value & low
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & low)
        value = left << half | right
        if value < size:
            return value


@dataclass
class PromptCursor:
    """Where the run is in its data. ``size`` items an epoch."""

    size: int
    seed: int
    epoch: int = 0
    position: int = 0
    too_long: int = 0  # prompts skipped so far because they exceed the limit, counted each time

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a prompt order needs at least one item, not {self.size}")

    def next(self) -> tuple[int, int]:
        """(epoch, index) of the next item."""
        epoch, index = self.epoch, permuted(self.position, self.size, self.seed, self.epoch)
        self.position += 1
        if self.position == self.size:
            self.epoch, self.position = epoch + 1, 0
        return epoch, index

    def next_prompt(self, load: Callable[[int], Prompt], max_tokens: int) -> tuple[int, Prompt]:
        """(epoch, prompt) of the next item whose prompt has at most ``max_tokens`` tokens; longer ones are counted.

        A prompt is never cut: half a question has another answer.

        Raises:
            PromptError: a whole epoch's worth of items in a row is too long.
        """
        for _ in range(self.size):
            epoch, index = self.next()
            prompt = load(index)
            if len(prompt.token_ids) <= max_tokens:
                return epoch, prompt
            self.too_long += 1
        raise PromptError(
            f"all {self.size} prompts have more than {max_tokens} tokens "
            "(generator.max_model_len - sampling.max_tokens); raise the first or lower the second"
        )

    def state(self) -> dict[str, Any]:
        """JSON-able; for :meth:`restore`."""
        return {name: getattr(self, name) for name in ("size", "seed", "epoch", "position", "too_long")}

    @classmethod
    def restore(cls, size: int, seed: int, state: dict[str, Any]) -> PromptCursor:
        """Go on where ``state`` was taken.

        Raises:
            PromptError: size or seed differ from the state's, so the order would be another one.
        """
        if (state["size"], state["seed"]) != (size, seed):
            raise PromptError(
                f"the prompts were {state['size']} items in the order of seed {state['seed']}, "
                f"now {size} in the order of seed {seed}: resume with the same data"
            )
        return cls(size, seed, state["epoch"], state["position"], state["too_long"])
