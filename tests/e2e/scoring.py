"""The trainer scores what an engine has drawn."""

from __future__ import annotations

import copy

import numpy as np
import torch

from asyncrl.rollouts.types import TrainSample
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.step import Trainer
from tests.e2e.rig import Rig, prompt_of
from tests.training.tiny import tiny_run


def check_scores(rig: Rig, temperature: float) -> None:
    """The engine's log-probs are the trainer's own, as in every step: packed rows, shared prompts, chunked head."""
    cfg = tiny_run(rig.cfg.model.path, "float32", sampling={"temperature": temperature})
    trainer = Trainer(cfg, prepare(copy.deepcopy(rig.model), torch.float32), open_mesh(0, 1, torch.device("cpu")))
    trainer.version = rig.version
    batch = []
    for ordinal, prompt in enumerate((prompt_of(30), prompt_of(17, seed=1))):
        drawn = rig.generate(200 + ordinal + int(10 * temperature), 16, prompt, temperature=temperature, max_tokens=24)
        for s in drawn:
            advantages = np.full(len(s.token_ids), 1.0 - s.index / 8, np.float32)
            ids = np.array(prompt, np.int32)
            batch.append(TrainSample(ids, s.token_ids, s.logprobs, s.versions, advantages, ordinal, s.index))
    report = trainer.step([batch[:20], batch[20:]])
    assert report.mismatch_tokens == sum(len(s.token_ids) for s in batch) > 100
    assert report.mismatch < 1e-5 and report.mismatch_max < 1e-4
    assert abs(report.ratio_mean - 1) < 1e-4
