"""One optimizer step of supervised fine-tuning: mean negative log-likelihood of the learnt tokens.

Each conversation is one causal document of a packed row, so none attends to another and nothing is padded but the
attention's buckets. The denominator is the number of learnt tokens of the global batch: how the batch is cut into
ranks and micro-batches changes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.loss import LossMask
from asyncrl.data.chat import Conversation
from asyncrl.training.documents import Documents
from asyncrl.training.exact import exact
from asyncrl.training.metrics import StepReport
from asyncrl.training.packing import PackedBatch
from asyncrl.training.step import Trainer
from asyncrl.training.update import Update

# What takes the place of a micro-batch that a rank does not have: one token to predict, masked.
_DUMMY = Conversation(np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.bool_))


class SftTrainer(Trainer):
    """The trainer of ``grpo`` with another loss: same sharding, optimizer, schedule and checkpoints."""

    def learn(self, batch: Sequence[Conversation]) -> StepReport:
        """One step on the global ``batch``, the same on every rank; each data rank takes its share of it."""
        tokens = sum(int(c.learnt.sum()) for c in batch)
        losses: list[float] = []

        def measure(square: Tensor) -> StepReport:
            row = torch.tensor([sum(losses), float(square)], dtype=torch.float64)
            rows = self.mesh.gather_rows(row)
            loss, norm = float(rows[:: self.mesh.sizes.tp, 0].sum()), float(rows[:, 1].sum())
            return StepReport(loss=loss, grad_norm=math.sqrt(norm) if norm >= 0 else math.nan)

        update = Update(self, tokens, len(batch), measure)
        self._likelihood(batch, tokens, losses, update.backward)
        return update.close()

    def loss(self, batch: Sequence[Conversation]) -> float:
        """The same mean over ``batch`` without learning it, in nat a token."""
        losses: list[float] = []
        with torch.no_grad():
            self._likelihood(batch, sum(int(c.learnt.sum()) for c in batch), losses)
        return float(self.mesh.data_rows(torch.tensor([sum(losses)], dtype=torch.float64)).sum())

    def _likelihood(
        self,
        batch: Sequence[Conversation],
        tokens: int,
        losses: list[float],
        backward: Callable[[Tensor, bool], None] | None = None,
    ) -> None:
        """Appends the loss of each of this rank's micro-batches to ``losses``, then gives it to ``backward``."""
        micro_batches = share(batch, self.mesh.data_rank, self.mesh.data_ranks, self.cfg.trainer.token_budget)
        with exact(self.compute):
            for i, micro in enumerate(micro_batches):
                packed = pack_conversations(micro, self.mesh.device)
                logp_M, _ = self.policy(packed, temperature=1.0)
                loss = -packed.mask.sum(logp_M) / max(1, tokens)
                losses.append(float(loss.detach()))
                if backward is not None:
                    backward(loss, i == len(micro_batches) - 1)


def share(batch: Sequence[Conversation], rank: int, ranks: int, budget: int) -> list[list[Conversation]]:
    """The micro-batches of data rank ``rank``: as many as every other one has, the last ones possibly empty.

    A micro-batch holds at most ``budget`` tokens, or one longer conversation.
    """
    cuts = [_cut(batch[r::ranks], budget) for r in range(ranks)]
    most = max(map(len, cuts))
    return cuts[rank] + [[] for _ in range(most - len(cuts[rank]))]


def _cut(conversations: Sequence[Conversation], budget: int) -> list[list[Conversation]]:
    cut: list[list[Conversation]] = []
    room = 0
    for c in sorted(conversations, key=len, reverse=True):  # equal lengths together: less padding in a bucket
        if not cut or len(c) > room:
            cut.append([])
            room = budget
        cut[-1].append(c)
        room -= len(c)
    return cut


def pack_conversations(conversations: Sequence[Conversation], device: torch.device) -> PackedBatch:
    """One row of causal documents. Behaviour, advantage and age are of no meaning here and zero."""
    documents = sorted(conversations or [_DUMMY], key=len, reverse=True)
    lengths = [len(c) - 1 for c in documents]  # the last token predicts nothing
    starts = np.cumsum([0, *lengths[:-1]])
    learnt = [np.flatnonzero(c.learnt[1:]) for c in documents]
    if not conversations:
        learnt = [np.zeros(1, dtype=np.int64)]
    counts = [len(places) for places in learnt]

    def vector(values: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=torch.int64)

    count = sum(counts)
    nothing = torch.zeros(count, device=device)
    sample_M = torch.from_numpy(np.repeat(np.arange(len(documents)), counts)).to(device)
    trained = torch.full((count,), bool(conversations), dtype=torch.bool, device=device)
    return PackedBatch(
        input_1T=vector([c.ids[:-1] for c in documents])[None],
        position_1T=vector([np.arange(n) for n in lengths])[None],
        documents=Documents(lengths, device=device),
        predict_M=vector([start + places for start, places in zip(starts, learnt, strict=True)]),
        target_M=vector([c.ids[1:][places] for c, places in zip(documents, learnt, strict=True)]),
        behaviour_M=nothing,
        advantage_M=nothing,
        mask=LossMask(trained, sample_M, len(documents)),
        age_M=nothing.to(torch.int64),
        tokens=count if conversations else 0,
        samples=len(conversations),
    )
