"""``batch_size``, accumulation and epochs: torchtune counts for a rank and an epoch, a run here over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.data.torchtune.datasets import Data
from asyncrl.data.torchtune.leaves import UNKNOWN, Reading, RecipeError
from asyncrl.data.torchtune.recipes import Launch


@dataclass(frozen=True)
class Batch:
    """Of torchtune: sequences of a micro-batch, its data ranks, micro-batches of a step."""

    size: int
    ranks: int
    accumulation: int

    @property
    def sequences(self) -> int:
        """Of one optimizer step."""
        return self.size * self.ranks * self.accumulation

    def steps(self, sequences: int) -> int:
        """Of an epoch: each rank gets as many ``sequences``, rounded up; what fills no batch or step is left out."""
        return math.ceil(sequences / self.ranks) // self.size // self.accumulation


def batch_of(reading: Reading, launch: Launch) -> Batch:
    """Raises ``RecipeError`` for ranks that do not divide."""
    names = ("batch_size", "gradient_accumulation_steps", "tensor_parallel_dim")
    size, accumulation, tp = (reading.number(name, 1) for name in names)
    for name, value in zip(names, (size, accumulation, tp), strict=True):
        if value < 1:
            raise RecipeError(f"{name} is {value}\n    -> 1 or more")
    if launch.ranks % tp:
        raise RecipeError(
            f"tensor_parallel_dim={tp} does not divide {launch.ranks} ranks\n    -> --ranks with a multiple"
        )
    return Batch(size, launch.ranks // tp, accumulation)


def read_batch(reading: Reading, batch: Batch, data: Data, length: int | None, mean: int) -> int | None:
    """Fills ``sft.batch_size``; returns the number of sequences of an epoch, None if it is not known.

    ``length``: tokens of a packed sequence. ``mean``: of a conversation, if the user knows it; or 0.
    """
    said = f"{batch.size} x {batch.ranks} ranks x {batch.accumulation} micro-batches"
    reading.also("gradient_accumulation_steps", "sft.batch_size; micro-batches hold trainer.token_budget tokens")
    if not data.packed:
        reading.translate("batch_size", {"sft.batch_size": batch.sequences}, f"conversations a step: {said}")
        return data.samples
    if not mean or not length:
        what = f"{batch.sequences} packs of {length or 'max_seq_len'} tokens ({said})"
        reading.translate(
            "batch_size", {"sft.batch_size": UNKNOWN}, f"conversations a step, where torchtune has {what}"
        )
        reading.todo.append(
            f"sft.batch_size: as many conversations as fill {what}; --mean-tokens M computes it from the mean length "
            "of a conversation"
        )
        return None
    count = max(1, round(batch.sequences * length / mean))
    why = f"conversations of {mean} tokens that fill {said} of {length} tokens"
    reading.translate("batch_size", {"sft.batch_size": count}, why)
    return None if data.samples is None else math.ceil(data.samples * mean / length)


def read_steps(reading: Reading, batch: Batch, sequences: int | None) -> None:
    """Fills ``trainer.steps`` and ``checkpoint.every``."""
    epochs = reading.number("epochs", 1)
    most = None if reading.get("max_steps_per_epoch") is None else reading.number("max_steps_per_epoch", 0)
    per_epoch = None if sequences is None else batch.steps(sequences)
    if most is not None:
        per_epoch = most if per_epoch is None else min(per_epoch, most)
        if sequences is None:
            reading.assumed.append(f"an epoch has at least max_steps_per_epoch={most} steps")
    if per_epoch is not None and per_epoch < 1:
        reading.assumed.append(f"one step, where torchtune takes none: {sequences} sequences, {batch.sequences} a step")
        per_epoch = 1
    formula = f"{epochs} x floor(ceil(N / {batch.ranks}) / {batch.size} / {batch.accumulation})"
    if per_epoch is None:
        reading.translate("epochs", {"trainer.steps": UNKNOWN}, formula)
        reading.todo.append(
            f"trainer.steps: {formula} for N sequences (packs, if packed) in the data; run this again when the data is "
            "here, or with --samples N"
        )
    else:
        reading.translate("epochs", {"trainer.steps": epochs * per_epoch}, f"{epochs} x {per_epoch} steps")
    if most is None:
        reading.meaningless("max_steps_per_epoch", "null: whole epochs")
    else:
        reading.also("max_steps_per_epoch", "trainer.steps")
    _checkpoints(reading, epochs, per_epoch)


def _checkpoints(reading: Reading, epochs: int, per_epoch: int | None) -> None:
    if every := reading.get("save_every_n_steps"):
        reading.translate("save_every_n_steps", {"checkpoint.every": every})
        return
    reading.meaningless("save_every_n_steps", "null: after each epoch")
    value = 0 if epochs == 1 else per_epoch or UNKNOWN
    reading.translate("", {"checkpoint.every": value}, "after each epoch" if epochs > 1 else "at the end, one epoch")
    if epochs > 1 and "checkpoint.keep" not in reading.keys:
        reading.translate("", {"checkpoint.keep": epochs}, "all of them are kept")
