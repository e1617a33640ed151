"""One optimizer step of preference learning: the mean over pairs of a loss of the log-probs of both answers.

The two sides of a pair are documents of the same packed row: one forward and one backward for both. Their log-probs
come from the chunked head, which never holds the logits of all tokens; from there on there are two numbers a pair,
added in float64. The denominator is the number of pairs of the global batch: how it is cut into ranks and micro-batches
changes no gradient.

The reference is the policy that the run starts from. If adapters are new, that is the model without them: the same
micro-batch is scored once more with the adapters switched off, without dropout. Otherwise its log-probs are read from
what was recorded before the first step (:mod:`asyncrl.training.reference`). Either way a pair is scored in the packing
in which it is learnt, so that at the first step policy and reference agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.preference import preference_loss, ranked_rightly
from asyncrl.config.lora import lora_of
from asyncrl.config.schema import Config
from asyncrl.data.tokens import Conversation, Pair
from asyncrl.training.exact import exact
from asyncrl.training.metrics import StepReport
from asyncrl.training.packing import PackedBatch
from asyncrl.training.sft import Learner, pack_conversations, share


class Reference(Protocol):
    """What the reference makes of pairs."""

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """Log-probs (P, 2) of chosen and rejected answers, float64."""
        ...


def must_be_recorded(cfg: Config) -> bool:
    """Whether the reference is not simply the model without its adapters: without any, or when old ones go on."""
    return lora_of(cfg) is None or bool(cfg.model.adapter)


class DpoTrainer(Learner[Pair]):
    """``recorded``: the reference's log-probs; None: those of the model without its adapters."""

    recorded: Reference | None = None
    figures = (
        "dpo/reward_chosen",
        "dpo/reward_rejected",
        "dpo/margin",
        "dpo/accuracy",
        "dpo/logp_chosen",
        "dpo/logp_rejected",
        "dpo/likelier",
    )

    def conversations(self, samples: Sequence[Pair]) -> list[Conversation]:
        return [side for pair in samples for side in (pair.chosen, pair.rejected)]

    def denominator(self, batch: Sequence[Pair]) -> int:
        return len(batch)

    def _loss(self, packed: PackedBatch, samples: Sequence[Pair], denominator: int) -> tuple[Tensor, Tensor | None]:
        reference_P2 = self._reference(packed, samples)
        logp_M, _ = self.policy(packed, temperature=1.0)
        if not samples:  # the dummy: a graph, and nothing in it
            return packed.mask.sum(logp_M), None
        policy_P2, tokens_P2 = by_pair(logp_M, packed)
        loss_P, reward_P2 = preference_loss(policy_P2, reference_P2, tokens_P2, self.cfg.dpo)
        return loss_P.sum() / denominator, measured(policy_P2.detach(), reward_P2).sum(0) / denominator

    @torch.no_grad()
    def _reference(self, packed: PackedBatch, samples: Sequence[Pair]) -> Tensor:
        """(P, 2). With adapters all ranks take part in it, with or without samples: it is a forward."""
        if self.recorded is not None:
            return self.recorded.scores(samples).to(self.mesh.device)
        adapters = self.policy.adapters
        assert adapters is not None, "without adapters the reference is recorded before the first step"
        with adapters.disabled():
            logp_M, _ = self.policy(packed, temperature=1.0)
        return by_pair(logp_M, packed)[0] if samples else logp_M.new_zeros(0, 2)

    @torch.no_grad()
    def scores(self, batch: Sequence[Pair]) -> Tensor:
        """Collective. Log-probs (P, 2) of the global ``batch`` under the policy as it is, float64, on every rank."""
        packing, found = self._plan(batch), torch.zeros(len(batch), 2, dtype=torch.float64)
        micro_batches = share(batch, packing, self.mesh.data_rank)
        with exact(self.compute):
            for places, micro in zip(packing.rank[self.mesh.data_rank].micro, micro_batches, strict=True):
                packed = pack_conversations(self.conversations(micro), self.mesh.device)
                logp_M, _ = self.policy(packed, temperature=1.0)
                if micro:
                    found[places] = by_pair(logp_M, packed)[0].cpu()
        return self.mesh.data_rows(found.flatten()).sum(0).view(-1, 2)

    def _evaluated(self, report: StepReport) -> dict[str, float]:
        found = {f"eval/{name}": report.figures[f"dpo/{name}"] for name in ("accuracy", "margin", "likelier")}
        return {"eval/loss": report.loss, **found}


def by_pair(logp_M: Tensor, packed: PackedBatch) -> tuple[Tensor, Tensor]:
    """(sums of log-probs (P, 2) in float64, numbers of learnt tokens (P, 2)) of the pairs of a micro-batch."""
    lengths_D = packed.mask.lengths()
    sums_D = torch.segment_reduce(logp_M.double(), "sum", lengths=lengths_D)  # in order, the same on every device
    place_S = torch.empty(len(packed.order), dtype=torch.int64, device=sums_D.device)
    place_S[torch.tensor(packed.order, device=sums_D.device)] = torch.arange(len(packed.order), device=sums_D.device)
    return sums_D[place_S].view(-1, 2), lengths_D[place_S].view(-1, 2)


def measured(policy_P2: Tensor, reward_P2: Tensor) -> Tensor:
    """(P, number of ``DpoTrainer.figures``)."""
    margin_P = reward_P2[:, 0] - reward_P2[:, 1]
    columns = [*reward_P2.T, margin_P, ranked_rightly(reward_P2), *policy_P2.T, ranked_rightly(policy_P2)]
    return torch.stack(columns, dim=1)
