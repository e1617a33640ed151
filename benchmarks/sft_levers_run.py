"""One configuration of the ladder on one JSON job: our trainer, or the same without what it cannot switch off.

    python -m benchmarks.sft_levers_run job.json result.json

``job``: ``shape`` (of a Llama with random weights), ``batch``, ``stretch``, ``budget``, ``steps``, ``gpu`` and the
levers that are on, by the names of ``sft_levers.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as runs have it; OpenMP reads it when torch loads

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.schema import Config
from asyncrl.data.tokens import Conversation
from asyncrl.training.mesh import open_mesh
from asyncrl.training.metrics import StepReport
from asyncrl.training.model import Policy, prepare
from asyncrl.training.packing import PackedBatch
from asyncrl.training.sft import SftTrainer
from benchmarks.meter import Meter
from benchmarks.talks import Shape, as_tokens, draw


class DensePolicy(Policy):
    """All logits at once, of every position, in the dtype of the activations, as transformers makes them."""

    def forward(self, batch: PackedBatch, temperature: float, objective: Any = None) -> Tensor:  # type: ignore[override]
        """The sum of the learnt tokens' negative log-likelihood, in fp32."""
        logits_1TV = self.lm(
            input_ids=batch.input_1T, position_ids=batch.position_1T, use_cache=False, documents=batch.documents
        ).logits
        label_T = torch.full_like(batch.input_1T[0], -100)
        label_T[batch.predict_M] = torch.where(batch.mask.trained_M, batch.target_M, -100)
        return F.cross_entropy(logits_1TV[0].float(), label_T, ignore_index=-100, reduction="sum")


class LadderTrainer(SftTrainer):
    """``padded``: conversations filled up to the longest of the batch, so that a packed row is rows of one length."""

    padded = False

    def learn(self, batch: Sequence[Conversation]) -> StepReport:
        return super().learn(fill(batch) if self.padded else batch)

    def _loss(
        self, packed: PackedBatch, samples: Sequence[Conversation], denominator: int
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(self.policy, DensePolicy):
            return super()._loss(packed, samples, denominator)
        return self.policy(packed, 1.0) / denominator, None


def fill(batch: Sequence[Conversation]) -> list[Conversation]:
    """Every conversation as long as the longest, with tokens behind it that nobody learns."""
    longest = max(map(len, batch))
    return [
        Conversation(*(np.pad(values, (0, longest - len(c))) for values in (c.ids, c.learnt)))  # zeros, False
        for c in batch
    ]


def config(levers: Sequence[str], gpu: bool, budget: int) -> Config:
    """``packing`` and ``chunked loss`` are no keys: they decide which policy and which batch."""
    cfg = Config(mode="sft")
    cfg.trainer.master_dtype = cfg.model.compute_dtype = "bfloat16" if gpu else "float32"
    cfg.trainer.token_budget = budget
    cfg.trainer.loss_chunk_bytes = (256 if gpu else 16) * 2**20
    cfg.trainer.compile = "compile" in levers
    cfg.trainer.activation_checkpointing = "full" if "activation checkpointing" in levers else "none"
    cfg.trainer.activation_offload = "offload" in levers
    cfg.optim.in_backward = "in-backward" in levers
    cfg.optim.lr, cfg.optim.warmup_steps, cfg.optim.clip_norm = 1e-5, 0, 1e9  # delayed clipping is another algorithm
    return cfg


def build(levers: Sequence[str], shape: Shape, gpu: bool, budget: int) -> LadderTrainer:
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    cfg = config(levers, gpu, budget)
    dtype = torch.bfloat16 if gpu else torch.float32
    torch.manual_seed(0)
    with device:
        lm = LlamaForCausalLM(LlamaConfig(**asdict(shape), max_position_embeddings=8192, tie_word_embeddings=True))
    policy = prepare(lm.to(dtype), dtype)
    if "chunked loss" not in levers:
        policy = DensePolicy(policy.lm)
    trainer = LadderTrainer(cfg, policy, open_mesh(0, 1, device))
    trainer.padded = "packing" not in levers
    if "8-bit" in levers:
        from torchao.optim import AdamW8bit

        trainer.optimizer = AdamW8bit(trainer.parameters, lr=cfg.optim.lr, betas=(cfg.optim.beta1, cfg.optim.beta2))
    return trainer


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if not job["gpu"]:
        torch.set_num_threads(job["threads"])
    shape, meter = Shape(**job["shape"]), Meter(job["gpu"])
    trainer = build(job["levers"], shape, job["gpu"], job["budget"])
    talks = draw(job["steps"] * job["batch"], stretch=job["stretch"])
    conversations = as_tokens(talks, shape.vocab_size)
    meter.start()
    total = 0
    for start in range(0, len(conversations), job["batch"]):
        batch = conversations[start : start + job["batch"]]
        report = trainer.learn(batch)
        if report.skipped is not None:
            raise SystemExit(f"a step was skipped: {report.skipped}")
        total += sum(map(len, batch))
        meter.step(loss=report.loss, all_tokens=total, micro_batches=report.micro_batches)
    Path(sys.argv[2]).write_text(json.dumps(meter.result(), indent=1))


if __name__ == "__main__":
    main()
