"""One adapter of a pack, to whom it belongs: what a training loop, its evaluations and its checkpoints need.

A slot is a trainer with an adapter of its own, and looks on disk like one (asyncrl/training/adapter.py): either can go
on from the other's checkpoint. Only its steps are made elsewhere, together with those of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl.config.lora import lora_of
from asyncrl.config.schema import Config
from asyncrl.data.tokens import Conversation
from asyncrl.lora.bank import Layout, Resident, wrap
from asyncrl.training import restoring
from asyncrl.training.adapter import stored_weights
from asyncrl.training.lora import Adapters, fill, first_a, salt_of, targets_of
from asyncrl.training.metrics import StepReport
from asyncrl.training.model import Policy
from asyncrl.training.packing import PackedBatch
from asyncrl.training.sft import SftTrainer

if TYPE_CHECKING:
    from asyncrl.lora.pack import PackTrainer
    from asyncrl.training.generation import Cache


class SlotAdapters(Adapters):
    """The adapters of one slot: within ``reading`` the whole row is its own, and nothing is dropped."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.settings, slot.cfg.seed)
        self.base, self.slot = slot.pack.base, slot

    @property
    def names(self) -> list[str]:
        return list(self.slot.resident.layout.shapes)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.slot.weights.items())

    def reading(self, batch: PackedBatch) -> AbstractContextManager[None]:
        return self.alone(batch.input_1T.shape[1])

    def alone(self, tokens: int) -> AbstractContextManager[None]:
        """Around a forward of ``tokens`` that are all this slot's."""
        bank = self.slot.pack.bank
        return bank.reads(bank.alone(self.slot.resident, tokens))

    def disabled(self) -> AbstractContextManager[None]:
        return self.slot.pack.bank.reads(None)


class SlotPolicy(Policy):
    """The pack's model, read with one slot's adapters."""

    adapters: SlotAdapters

    def next_tokens(self, input_T: Tensor, cache: Cache, draw: tuple[float, Tensor] | None = None) -> Tensor:
        with self.adapters.alone(len(input_T)):
            return super().next_tokens(input_T, cache, draw)


class SlotMoments:
    """The optimizer of a slot as checkpoints see it: AdamW's state of each parameter."""

    def __init__(self) -> None:
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)


class Slot(SftTrainer):
    """An adapter with the settings ``cfg``. ``weights``: its matrices by name, as PEFT shapes them.

    Raises :class:`ModelError` for an adapter that does not fit the model.
    """

    def __init__(self, pack: PackTrainer, cfg: Config) -> None:
        settings = lora_of(cfg)
        assert settings is not None, "a pack trains adapters"
        self.pack, self.settings = pack, settings
        self.strikes = 0
        super().__init__(cfg, SlotPolicy(pack.policy.lm, pack.cfg.trainer.logprob_chunk), pack.mesh)

    def _lay_out(self) -> None:
        pack, cfg = self.pack, self.cfg
        linears = targets_of(pack.policy.lm, self.settings)
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears.items()}
        layout = Layout.of(self.settings.rank, shapes)
        self.sharded = False
        self.policy.adapters = adapters = SlotAdapters(self)
        self.resident = Resident(layout, adapters.scale, self.settings.dropout, cfg.seed)
        stored = stored_weights(cfg, pack.base)
        pack.admit(self)
        wrap(pack.policy.lm, linears, pack.bank)
        with torch.no_grad():
            for name, (_, k) in shapes.items():
                a = self.weights[f"{name}.lora_A.weight"]
                a.copy_(first_a(self.settings.rank, k, salt_of(cfg.seed, name)))
        if stored is not None:
            try:
                fill(adapters, stored)
            except BaseException:
                pack.release(self)
                raise
        pack.bank.refresh()

    def bind(self) -> None:
        """The views of this slot in the bank's buffers, which have been made anew."""
        bank, layout = self.pack.bank, self.resident.layout
        buffers, step = bank.buffers, bank.step[bank.index(self.resident)]

        def views(flat_P: Tensor) -> dict[str, Tensor]:
            return dict(layout.views(bank.part(self.resident, flat_P)))

        self.weights, first, second = (views(x) for x in (buffers.master, buffers.exp_avg, buffers.exp_avg_sq))
        self.optimizer: Any = SlotMoments()
        for name, p in self.weights.items():
            self.optimizer.state[p] = {"step": step, "exp_avg": first[name], "exp_avg_sq": second[name]}
        self.parameters: Any = list(self.weights.values())

    def learn(self, batch: Sequence[Conversation]) -> StepReport:
        """A step of this slot alone."""
        return self.pack.learn({self: batch})[self]

    def load(self, folder: str | Path) -> None:
        """Restores the checkpoint of a slot, or of a run with one adapter; raises as ``Trainer.load`` does."""
        held = dict(self.optimizer.state)
        restoring.load(self, Path(folder))
        steps = [0]
        with torch.no_grad():
            for p, mine in held.items():
                read = self.optimizer.state.get(p, {})
                for kind in self.moments:
                    mine[kind].copy_(read[kind]) if kind in read else mine[kind].zero_()
                steps.append(int(read.get("step", 0)))
            self.pack.bank.step[self.pack.bank.index(self.resident)] = max(steps)
        self.bind()
        self.pack.bank.refresh()
        self.strikes = 0

    def close(self) -> None:
        """Leaves the pack."""
        self.pack.release(self)
