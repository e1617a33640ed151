"""Many adapters trained at once on one frozen base, each exactly as if it were alone.

One forward and one backward for the documents of all adapters that learn in a step (asyncrl/lora/row.py). Of each
adapter is its own: the micro-batches, the number of learnt tokens that its loss is a mean over, the keys of its
dropout, gradients, norm, clipping, learning rate and moments. A step that is refused - its loss or its gradient is not
finite, or over a limit - changes no bit of that adapter and none of another.

``packing.deterministic``: every adapter's tokens go through the model as a row of their own, so that each product,
attention and head is the call that it would be without others, and so are its bits. Nothing is gained by packing then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config.lora import held_dtype
from asyncrl.config.schema import Config
from asyncrl.data.tokens import Conversation
from asyncrl.lora.bank import Bank
from asyncrl.lora.row import join, passes
from asyncrl.lora.slot import Slot
from asyncrl.rollouts.packing import PackingPlan
from asyncrl.training.dropout import token_keys
from asyncrl.training.exact import exact
from asyncrl.training.fingerprint import fingerprint
from asyncrl.training.levers import pull
from asyncrl.training.mesh import Mesh, open_mesh
from asyncrl.training.metrics import StepReport
from asyncrl.training.model import DTYPES, load_policy
from asyncrl.training.optim import learning_rate
from asyncrl.training.packing import PackedBatch
from asyncrl.training.sft import Counts, filled, likelihood, pack_conversations, share
from asyncrl.training.update import reason_to_skip
from kernels.slot_adamw import SlotHyper, slot_adamw


@dataclass
class Lesson:
    """What one slot learns in a step: its micro-batches as it would cut them alone, and what was counted of them."""

    slot: Slot
    batch: Sequence[Conversation]
    packing: PackingPlan
    micro: list[list[Conversation]]
    counts: Counts = field(default_factory=lambda: Counts(()))

    @classmethod
    def of(cls, slot: Slot, batch: Sequence[Conversation]) -> Lesson:
        packing = slot._plan(batch)
        return cls(slot, batch, packing, share(batch, packing, 0))

    @property
    def tokens(self) -> int:
        return self.slot.denominator(self.batch)


@dataclass(frozen=True)
class Piece:
    """One lesson's micro-batch in a row. ``weight_M``: what the loss multiplies each token's log-prob by, negated."""

    lesson: Lesson
    packed: PackedBatch
    weight_M: Tensor


class PackTrainer:
    """The frozen base of ``cfg`` and the slots on it; of ``cfg`` only what all slots share is read.

    Raises :class:`ModelError` for a model that cannot be loaded.
    """

    def __init__(self, cfg: Config, mesh: Mesh | None = None) -> None:
        self.cfg = cfg
        self.mesh = mesh or open_mesh(0, 1)
        if self.mesh.device.type == "cpu":
            torch.set_num_threads(cfg.trainer.threads)
        self.compute = DTYPES[cfg.model.compute_dtype]
        self.policy = load_policy(cfg.model.path, DTYPES[held_dtype(cfg)], cfg.trainer.logprob_chunk)
        self.policy.vocab_chunk = cfg.trainer.vocab_chunk
        self.policy.requires_grad_(False)
        self.policy.to(self.mesh.device)
        self.base = fingerprint(Path(cfg.model.path))
        master = DTYPES[cfg.trainer.master_dtype]
        self.bank = Bank(self.compute, master, self.mesh.device, cfg.packing.deterministic)
        self.slots: list[Slot] = []
        pull(self.policy.lm, cfg.trainer, self.compute, self.mesh.device, self._remember)

    def _remember(self) -> AbstractContextManager[None]:
        """Called in a forward: the context in which the same forward can be computed again."""
        return self.bank.reads(self.bank.reading)

    def admit(self, slot: Slot) -> None:
        """Gives it a place, with weights of zero; :class:`Slot` calls this itself."""
        self.bank.admit(slot.resident)
        self.slots.append(slot)
        self._bind()

    def release(self, slot: Slot) -> None:
        """Takes it out; what it has learnt is gone with it unless it was saved."""
        self.slots.remove(slot)
        self.bank.release(slot.resident)
        self._bind()

    def _bind(self) -> None:
        for slot in self.slots:
            slot.bind()

    def learn(self, batches: Mapping[Slot, Sequence[Conversation]]) -> dict[Slot, StepReport]:
        """One step of each of these slots on its own batch; the others do not change."""
        lessons = {slot: Lesson.of(slot, batch) for slot, batch in batches.items()}
        sizes = {slot: [sum(len(c) for c in micro) for micro in lesson.micro] for slot, lesson in lessons.items()}
        self.bank.slots.fresh.fill_(True)
        cap = 0 if self.cfg.packing.deterministic else self.cfg.packing.token_cap
        with exact(self.compute):
            for chosen in passes(sizes, cap):
                self._pass([self._piece(lessons[slot], number) for slot, number in chosen])
        return self._close(list(lessons.values()))

    def _piece(self, lesson: Lesson, number: int) -> Piece:
        packed = pack_conversations(lesson.micro[number], self.mesh.device)
        weight_M = packed.mask.trained_M.to(lesson.slot._loss_dtype) / max(1, lesson.tokens)
        return Piece(lesson, packed, weight_M)

    def _pass(self, pieces: Sequence[Piece]) -> None:
        """Forward and backward of one row; adds to the gradients and counts of the slots in it."""
        row, weight_M = join([p.packed for p in pieces]), torch.cat([p.weight_M for p in pieces])
        places = [self.bank.index(p.lesson.slot.resident) for p in pieces]
        lengths = [p.packed.input_1T.shape[1] for p in pieces]
        slot_T = torch.tensor(places, device=self.mesh.device).repeat_interleave(
            torch.tensor(lengths, device=self.mesh.device), output_size=sum(lengths)
        )
        with self.bank.reads(self.bank.reading_of(slot_T, self._keys(pieces))):
            loss, logp_M = self._loss(row, weight_M)
        loss.backward()
        self.bank.slots.fresh[places] = False
        for piece, logp in zip(pieces, logp_M.split([len(p.weight_M) for p in pieces]), strict=True):
            mine = -(piece.weight_M * torch.where(piece.weight_M > 0, logp, 0.0)).sum()
            piece.lesson.counts.add(mine, piece.packed)

    def _loss(self, row: PackedBatch, weight_M: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of all slots' losses, and each token's log-prob (M,) without its graph."""
        if self.cfg.algorithm.loss_head == "logprob":
            logp_M, _ = self.policy(row, 1.0)
            return -(weight_M * torch.where(weight_M > 0, logp_M, 0.0)).sum(), logp_M.detach()
        loss, logp_M, _ = self.policy(row, 1.0, likelihood(weight_M, self.cfg.trainer.loss_chunk_bytes))
        return loss, logp_M

    def _keys(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Of each token's dropout, as its slot alone would make them."""
        slots = [p.lesson.slot for p in pieces]
        if not any(slot.settings.dropout for slot in slots):
            return None
        keys = [token_keys(p.packed, s.cfg.seed, s.version) for p, s in zip(pieces, slots, strict=True)]
        return torch.cat(keys)

    def _close(self, lessons: Sequence[Lesson]) -> dict[Slot, StepReport]:
        """New weights of each slot, or a reason why not; new versions."""
        found: dict[Slot, StepReport] = {}
        for lesson in lessons:
            slot, counts = lesson.slot, lesson.counts
            report = found[slot] = counts.report(counts.row())
            report.lr = learning_rate(slot.version, slot.cfg.trainer.steps, slot.cfg.optim)
            report.tokens, report.samples = lesson.tokens, len(lesson.batch)
            report.skipped = reason_to_skip(report.tokens, report, slot.cfg.optim)
            report.micro_batches = lesson.packing.micro_batches
            report.packing_efficiency = filled(lesson.packing, slot.cfg.trainer.token_budget)
        norm_S, stepped_S = slot_adamw(self.bank.buffers, self._hyper(found))
        for slot, norm, stepped in zip(self.slots, norm_S.tolist(), stepped_S.tolist(), strict=True):
            if slot not in found:
                continue
            report = found[slot]
            report.grad_norm = norm if report.tokens else 0.0
            if report.skipped is None and not stepped:
                report.skipped = "gradient_not_finite"
            if report.skipped is not None:
                slot.skipped[report.skipped] += 1
            # A step may have been finite and what it led to not (too high a learning rate).
            well = bool(self.bank.part(slot.resident, self.bank.buffers.master).isfinite().all())
            well = well and not (report.skipped or "").endswith("not_finite")
            slot.strikes = 0 if well else slot.strikes + 1
            slot.version += 1
            report.version = slot.version
        return found

    def _hyper(self, found: Mapping[Slot, StepReport]) -> SlotHyper:
        optims = [slot.cfg.optim for slot in self.slots]

        def numbers(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device=self.mesh.device)

        def flags(values: Iterable[bool]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.bool, device=self.mesh.device)

        return SlotHyper(
            lr=numbers(found[slot].lr if slot in found else 0.0 for slot in self.slots),
            beta1=numbers(o.beta1 for o in optims),
            beta2=numbers(o.beta2 for o in optims),
            eps=numbers(o.eps for o in optims),
            weight_decay=numbers(o.weight_decay for o in optims),
            clip=numbers(o.clip_norm if o.clip_norm > 0 else math.inf for o in optims),
            grad_scale=numbers(1.0 for _ in optims),
            step=self.bank.step,
            skipped=torch.zeros(len(optims), dtype=torch.int64, device=self.mesh.device),
            active=flags(slot in found and found[slot].skipped is None for slot in self.slots),
            finite=flags(True for _ in optims),
        )
