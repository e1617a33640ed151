"""One optimizer step of GRPO on packed micro-batches.

Invariants:

- every rank runs the same number of micro-batches (checked before the first collective of the step); an empty one
  still runs forward and backward on a dummy whose mask is zero;
- one denominator, added over all ranks before backward, from the masks that also make the numerators;
- a step whose loss, ratio or KL is not finite or over its limit, or with nothing to train, changes no weight on any
  rank, is counted with its reason, and still makes a new version; so does a non-finite gradient, but in the backward
  pass (see :mod:`asyncrl.training.update`);
- ``before_update`` returns before any weight changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.rollouts.types import TrainSample
from asyncrl.training import checkpoint, restoring
from asyncrl.training.adapter import equip
from asyncrl.training.errors import BatchError, ModelError
from asyncrl.training.exact import exact
from asyncrl.training.in_backward import UnitOptimizer, build_unit_optimizer
from asyncrl.training.keeping import Keep
from asyncrl.training.lora import merged_weights
from asyncrl.training.mesh import Mesh
from asyncrl.training.metrics import StepReport, StepSums
from asyncrl.training.model import DTYPES, Policy
from asyncrl.training.noise import noise_floor, score_in_halves
from asyncrl.training.objective import batch_loss
from asyncrl.training.optim import build_optimizer
from asyncrl.training.packing import PackedBatch, pack
from asyncrl.training.rules import AdamWRule
from asyncrl.training.saver import Saver
from asyncrl.training.sharding import distribute
from asyncrl.training.update import Update, check_budget
from asyncrl.weights.gather import Local


class Trainer:
    """The policy of one rank with its optimizer. ``version`` counts consumed batches, skipped ones included."""

    def __init__(self, cfg: Config, policy: Policy, mesh: Mesh) -> None:
        """Raises :class:`ModelError` if something would be trained that ``named_parameters_hf`` does not list."""
        self.cfg, self.mesh, self.policy = cfg, mesh, policy
        self.compute = DTYPES[cfg.model.compute_dtype]
        policy.vocab_chunk = cfg.trainer.vocab_chunk
        self.version = 0
        self.skipped: Counter[str] = Counter()
        # What the run's position counts in, JSON-able; a checkpoint of other data is refused.
        self.data: dict[str, Any] = {}
        self.position: dict[str, Any] = {}  # where in it the checkpoint was that this trainer was restored from
        self.saves = Saver(self.mesh, self.cfg.checkpoint.copies, self.cfg.deadline.checkpoint_s)
        self.partial_steps = 0  # steps that updated only a part of the model
        self._clip_state: dict[str, Any] = {}  # of a checkpoint, kept for a run that clips by it again
        self._lay_out()

    def _lay_out(self) -> None:
        """Adapters, shards, and the optimizer of what learns."""
        cfg, policy = self.cfg, self.policy
        equip(policy, cfg, self.mesh)
        self.sharded = distribute(policy, self.mesh, cfg)
        if policy.adapters and not cfg.model.adapter:
            policy.adapters.start_magnitudes()
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.parameters = list(trained.values())
        sent = {id(p) for _, p in self.named_parameters_hf()}
        unsent = [name for name, p in trained.items() if id(p) not in sent]
        if unsent:
            raise ModelError(f"{len(unsent)} trained parameters would never reach an engine, e.g. {unsent[0]}")
        self.optimizer = self._build_optimizer()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optim = self.cfg.optim
        plain = optim.name == "adamw" and not optim.delayed_clip and self.cfg.trainer.master_dtype != "bfloat16"
        if plain:
            return build_optimizer(self.parameters, optim)
        return build_unit_optimizer(self.policy, optim, self.mesh, self.sharded, self.cfg.seed)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors of a parameter, beside ``step``."""
        unit = isinstance(self.optimizer, UnitOptimizer)
        return self.optimizer.rule.moments if unit else AdamWRule.moments  # type: ignore[attr-defined]

    def named_parameters_hf(self) -> list[tuple[str, Tensor]]:
        """(Hugging Face name, tensor or DTensor) in model order; a tied weight appears once. What a checkpoint holds.

        If adapters are trained, theirs alone (PEFT's name without its prefix).
        """
        adapters = self.policy.adapters
        return list(adapters.parameters() if adapters else self.policy.lm.named_parameters())

    def published(self) -> list[tuple[str, Tensor | Local]]:
        """What engines get: all weights by Hugging Face name, adapters merged into them when they are read.

        Collective if adapters are sharded.
        """
        adapters = self.policy.adapters
        return merged_weights(self.policy) if adapters else list(self.named_parameters_hf())

    def dropout(self) -> AbstractContextManager[None]:
        """Around the forwards of a step that are trained: the adapters' inputs are dropped."""
        adapters = self.policy.adapters
        return adapters.dropping(self.version) if adapters else nullcontext()

    def save(self, root: str | Path, keep: int = 0) -> Path:
        """Collective. Writes ``root/step_<version>`` and waits for it; keeps the ``keep`` newest (0: all).

        Raises :class:`CheckpointError`. Training need not wait: :func:`checkpoint.begin`.
        """
        saved: list[Path] = []
        checkpoint.begin(self, Path(root), Keep(keep), on_saved=saved.append)
        self.saves.wait()
        return saved[0]

    def end(self) -> None:
        """After the last step: waits for the last checkpoint; raises :class:`PartialSteps` as :meth:`step` does."""
        self.saves.close()
        check_budget(self.partial_steps, self.cfg.optim)

    def load(self, folder: str | Path) -> None:
        """Collective. Restores one checkpoint, or raises and changes nothing; see :func:`restoring.load`."""
        restoring.load(self, Path(folder))

    def load_latest(self, root: str | Path) -> Path | None:
        """Collective. Restores the newest checkpoint in ``root`` and returns its folder; None if there is none."""
        folder = checkpoint.latest(Path(root))
        self.mesh.agree(-1 if folder is None else int(folder.name.rpartition("_")[2]), "the newest checkpoint")
        if folder is not None:
            self.load(folder)
        return folder

    def step(
        self, micro_batches: Sequence[Sequence[TrainSample]], before_update: Callable[[], Any] = lambda: None
    ) -> StepReport:
        """Trains this rank's ``micro_batches`` (each possibly empty) together with all other ranks.

        ``before_update`` is called once, just before weights may change (with ``optim.in_backward`` before the last
        backward); not on a step that is refused before. Raises :class:`BatchError` for samples that cannot be trained
        or ranks with different numbers of micro-batches, :class:`PartialSteps` if too many steps were partial.
        """
        began = time.perf_counter()
        batches = self._pack(micro_batches)
        tokens, samples = self._totals(batches)
        sums = StepSums(self.mesh.device)
        update = Update(self, tokens, samples, lambda square: sums.reduce(self.mesh, square, samples), before_update)
        if tokens:
            denominator = tokens if self.cfg.algorithm.aggregation == "token_mean" else samples
            with exact(self.compute):
                again = score_in_halves(micro_batches[0], self._score_otherwise) if self._measures_noise() else None
                for batch in batches:
                    loss, logp_M = self._forward(batch, denominator, sums)
                    if again is not None and batch is batches[0]:
                        sums.add_floor(noise_floor(batch, logp_M, again))
                    update.backward(loss, last=batch is batches[-1])
        computed = time.perf_counter()
        report = update.close()
        report.micro_batches, report.gather_wait_s = len(batches), update.waited_s
        ended = time.perf_counter()
        report.seconds, waited = ended - began, update.waited_s
        inside, after = (waited, 0.0) if update.hooked else (0.0, waited)
        report.forward_backward_s, report.optimizer_s = computed - began - inside, ended - computed - after
        return report

    def update_state(self) -> dict[str, Any]:
        """What a step needs from the steps before, beside the optimizer's state; JSON-able, part of a checkpoint."""
        clip = self.optimizer.clip if isinstance(self.optimizer, UnitOptimizer) else None
        return {"partial_steps": self.partial_steps, "clip": clip.state() if clip else self._clip_state}

    def load_update_state(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`update_state` gave, in a run with another optimizer mode as well."""
        self.partial_steps, self._clip_state = state.get("partial_steps", 0), state.get("clip", {})
        if isinstance(self.optimizer, UnitOptimizer) and self.optimizer.clip is not None:
            self.optimizer.clip.load(self._clip_state)

    def _measures_noise(self) -> bool:
        every = self.cfg.report.noise_floor_every
        return every > 0 and self.version % every == 0

    def _score_otherwise(self, samples: Sequence[TrainSample]) -> tuple[PackedBatch, Tensor]:
        """``samples`` packed as plain documents, where training may share prompts, and their log-probs."""
        packed = pack(samples, self.version, self.mesh.device, self._loss_dtype, share=False)
        return packed, self.policy(packed, self.cfg.sampling.temperature)[0]

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def _pack(self, micro_batches: Sequence[Sequence[TrainSample]]) -> list[PackedBatch]:
        # Variable-length flash attention knows plain documents only.
        share = not (self.mesh.device.type == "cuda" and self.compute == torch.bfloat16)
        return [pack(m, self.version, self.mesh.device, self._loss_dtype, share) for m in micro_batches]

    def _totals(self, batches: list[PackedBatch]) -> tuple[int, int]:
        """Trained tokens and samples of all ranks; checks that ranks agree on the number of micro-batches."""
        mine = [len(batches), sum(b.tokens for b in batches), sum(b.samples for b in batches)]
        rows = self.mesh.gather_rows(torch.tensor(mine))
        if len(set(rows[:, 0].tolist())) > 1:
            raise BatchError(f"ranks have different numbers of micro-batches: {rows[:, 0].tolist()}")
        peers = rows.unflatten(0, (-1, self.mesh.sizes.tp))
        if not torch.equal(peers, peers[:, :1].expand_as(peers)):
            raise BatchError(f"tensor-parallel peers differ in (micro-batches, tokens, samples): {rows.tolist()}")
        return int(peers[:, 0, 1].sum()), int(peers[:, 0, 2].sum())

    def _forward(self, batch: PackedBatch, denominator: int, sums: StepSums) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss, and its log-probs (M,) without their graph."""
        loss, logp_M, entropy_M, metrics = batch_loss(self.policy, batch, self.cfg, denominator)
        sums.add(batch, loss, logp_M, entropy_M, metrics)
        return loss, logp_M.detach()
