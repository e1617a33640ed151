"""Checkpoints between meshes, and the optimizer in the backward pass on each of them: four real gloo ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl.training.opening import build_trainer
from asyncrl.training.step import Trainer
from tests.training.ranks import run_ranks
from tests.training.test_ranks import all_weights
from tests.training.tiny import make_samples, tiny_folder, tiny_run

pytestmark = pytest.mark.slow

MESHES = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp x tp": {"dp_shard": 2, "tp": 2},
    "copies x tp": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}
# The rule of clipping in the backward pass knows units, which a mesh changes: limits that nothing reaches.
IN_BACKWARD = {"in_backward": True, "clip_norm": 1e9, "clip_guard": 0.0}


def learn(trainer: Trainer, first: int, last: int) -> None:
    for i in range(first, last):
        samples = make_samples(groups=5, size=4, seed=i)
        trainer.step([samples[trainer.mesh.data_rank :: trainer.mesh.data_ranks]])


def job(rank: int, world: int, path: str, root: str) -> dict:
    """Weights after four steps: on each mesh, on each after resuming from each other one, and in the backward."""
    out: dict = {}
    for name, mesh in MESHES.items():
        trainer = build_trainer(tiny_run(path, parallel=mesh), rank, world)
        learn(trainer, 0, 2)
        trainer.save(Path(root) / name)
        learn(trainer, 2, 4)
        out[name] = all_weights(trainer)
        trainer = build_trainer(tiny_run(path, parallel=mesh, optim=IN_BACKWARD), rank, world)
        learn(trainer, 0, 4)
        out["in backward", name] = all_weights(trainer)
    for saved in MESHES:
        for name, mesh in MESHES.items():
            trainer = build_trainer(tiny_run(path, parallel=mesh), rank, world)
            trainer.load_latest(Path(root) / saved)
            learn(trainer, 2, 4)
            out[saved, name] = all_weights(trainer)
    return out


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_goes_on_on_any_other_mesh(tmp_path, tied):
    path = tiny_folder(tmp_path / "model", tied=tied)
    out = run_ranks(4, job, path, str(tmp_path / "checkpoints"))
    one = build_trainer(tiny_run(path), 0, 1)
    learn(one, 0, 4)
    unclipped = build_trainer(tiny_run(path, optim=IN_BACKWARD), 0, 1)
    learn(unclipped, 0, 4)
    for key, weights in out[0].items():
        want = unclipped if key[0] == "in backward" else one
        assert relative(weights, all_weights(want)) < 1e-9, key
        if isinstance(key, tuple) and key[0] == key[1]:
            assert (weights == out[0][key[0]]).all(), f"{key}: the same mesh goes on bit for bit"
    for name in MESHES:
        alone = build_trainer(tiny_run(path), 0, 1)
        alone.load_latest(tmp_path / "checkpoints" / name)
        learn(alone, 2, 4)
        assert relative(all_weights(alone), all_weights(one)) < 1e-9, name
