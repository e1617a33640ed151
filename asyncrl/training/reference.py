"""The reference's log-probs of all pairs that a run will learn, computed before its first step.

Which pairs those are is known: the stream is a function of the configuration, so the steps' batches are drawn once
ahead of training and scored by the weights that the run starts from, each batch in the packing in which it will be
learnt. That costs a forward of each distinct pair and 60 bytes of disk; a second model in memory, the alternative,
costs its weights during the whole run and a forward of each pair in every epoch.

All ranks share each batch. What is scored is committed every few steps with how far the stream was drawn: a run that is
killed goes on there, one that is resumed with more steps scores what is new. A resumed run therefore does this before
it loads its checkpoint, while it still has the starting weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.lora import ADAPTER_WEIGHTS
from asyncrl.data.mixture import Mixture
from asyncrl.data.tokens import Pair
from asyncrl.training.agreement import Agreement
from asyncrl.training.dpo import DpoTrainer
from asyncrl.training.errors import CheckpointError
from asyncrl.training.files import digest
from asyncrl.training.fingerprint import fingerprint
from asyncrl.training.reference_store import ReferenceStore

COMMIT_EVERY = 32  # steps


@dataclass
class Upcoming:
    """The batches of a run before it begins. ``draw`` takes the next step's pairs from ``stream``."""

    stream: Mixture
    draw: Callable[[], list[Pair]]
    steps: int


def record(
    trainer: DpoTrainer, folder: Path, upcoming: Upcoming, heldout: Sequence[Pair], say: Callable[[str], None]
) -> None:
    """Collective. Gives ``trainer``, which has the weights that the run starts from, what they make of all pairs.

    Scores what ``folder`` lacks of ``heldout`` and of all steps; leaves the stream where it was. The trainer's
    checkpoints are bound to those weights. ``say`` is told how far it is, on every rank. Raises
    :class:`CheckpointError` on all ranks if what is there is damaged, of other weights, or cannot be written.
    """
    pass_, begin, weights = _Pass(trainer, folder), upcoming.stream.position(), starting_weights(trainer)
    try:
        pass_.open(weights)
        pass_.score(heldout)
        step = pass_.go_on(upcoming.stream)
        if step < upcoming.steps:
            say(f"reference: scoring the pairs of steps {step + 1} to {upcoming.steps} by the starting weights")
        while step < upcoming.steps:
            pass_.score(upcoming.draw())
            step += 1
            if step % COMMIT_EVERY == 0 or step == upcoming.steps:
                pass_.commit(step, upcoming.stream.position())
            if step * 10 // upcoming.steps > (step - 1) * 10 // upcoming.steps:
                say(f"reference: {step} of {upcoming.steps} steps scored")
        trainer.recorded = pass_.close(step, upcoming.stream.position())
    finally:
        upcoming.stream.seek(begin)
    trainer.data = trainer.data | {f"reference.{name}": value for name, value in weights.items()}


def starting_weights(trainer: DpoTrainer) -> dict[str, str]:
    """Collective. What tells the weights that the run starts from from others."""
    model = trainer.cfg.model
    found = {"model": fingerprint(Path(model.path), trainer.mesh)}
    if model.adapter:
        found["adapter"] = digest(Path(model.adapter) / ADAPTER_WEIGHTS)["sha256"]
    return found


class _Pass:
    """One pass over the pairs; rank 0 has the ``store``."""

    def __init__(self, trainer: DpoTrainer, folder: Path) -> None:
        mesh = trainer.mesh
        self.trainer, self.folder, self.mesh = trainer, folder, mesh
        self.agreement = Agreement(mesh.rank, mesh.world_size, mesh.control)
        self.store: ReferenceStore | None = None
        self.facts: dict[str, Any] = {}

    def open(self, weights: dict[str, str]) -> None:
        def make() -> None:
            if self.mesh.rank == 0:
                self.store = ReferenceStore(self.folder, writes=True)
                if not self.store.facts():
                    self.store.commit(weights=weights, data=self.trainer.data, steps=0, position={})

        def read() -> None:
            store = self.store or ReferenceStore(self.folder)
            self.facts = store.facts()
            if self.store is None:
                store.close()
            if self.facts["weights"] != weights:
                raise CheckpointError(
                    f"{self.folder} holds log-probs of other weights than those of {self.trainer.cfg.model.path}. Give "
                    "the model.path (and model.adapter) that the run began with, or begin a new run"
                )

        self.agreement.together("open the reference's log-probs", make)
        self.agreement.together("read the reference's log-probs", read)

    def go_on(self, stream: Mixture) -> int:
        """Seeks to the first batch that was not scored yet and returns its step, from 0."""
        if self.facts["data"] != self.trainer.data or not self.facts["steps"]:
            return 0  # of other data; pairs that occur in both are known all the same
        stream.seek(self.facts["position"])
        return int(self.facts["steps"])

    def score(self, batch: Sequence[Pair]) -> None:
        """Scores the pairs of ``batch`` that are not known yet."""
        missing = torch.ones(len(batch), dtype=torch.bool)
        if self.store is not None:
            missing = ~torch.tensor(self.store.known(batch), dtype=torch.bool)
        new = [batch[i] for i in self.mesh.gather_rows(missing)[0].nonzero()[:, 0].tolist()]
        if not new:
            return
        scores_P2 = self.trainer.scores(new)
        if self.store is not None:
            self.store.add(new, scores_P2)

    def commit(self, steps: int, position: dict[str, Any]) -> None:
        def write() -> None:
            if self.store is not None:
                self.store.commit(steps=steps, position=position, data=self.trainer.data)

        self.agreement.together("write the reference's log-probs", write)

    def close(self, steps: int, position: dict[str, Any]) -> ReferenceStore:
        """The complete store, for reading on every rank."""
        self.commit(steps, position)
        if self.store is not None:
            self.store.close()
        opened: list[ReferenceStore] = []
        self.agreement.together("open the reference", lambda: opened.append(ReferenceStore(self.folder)))
        return opened[0]
