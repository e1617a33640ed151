"""Adapters on two gloo ranks equal those on one, however their parameters are held."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.training.loading import empty_policy
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy
from asyncrl.training.sft import SftTrainer
from asyncrl.weights.gather import Gatherer, Local, local_of
from tests.training.in_backward_cases import everything
from tests.training.ranks import run_ranks
from tests.training.test_lora import close, talks
from tests.training.tiny import tiny_folder, tiny_run

CASES = {
    "lora": {"lora": {"rank": 4}},
    "dora": {"lora": {"rank": 3, "dora": True}},
    "dropout": {"lora": {"rank": 4, "dropout": 0.25}},
    "recomputed": {"lora": {"rank": 4, "dropout": 0.25}, "trainer": {"activation_checkpointing": "full"}},
    "in backward": {"lora": {"rank": 4, "dora": True}, "optim": {"in_backward": True, "clip_norm": 1e9}},
    "whole": {"lora": {"rank": 4}, "trainer": {"shard": False}},
    "float32": {"lora": {"rank": 3, "dora": True}, "dtype": "float32"},
    "bfloat16": {"lora": {"rank": 4}, "dtype": "bfloat16"},
}
LIMITS = {"float32": (1e-6, 1e-4), "bfloat16": (2e-2, 0.3)}  # of gradients and of weights after AdamW


def config(path, case):
    sections = {k: v for k, v in CASES[case].items() if k != "dtype"}
    dtype = CASES[case].get("dtype", "float64")
    optim = {"lr": 1e-2, "warmup_steps": 0, "clip_norm": 1e9, "clip_guard": 0.0} | sections.pop("optim", {})
    cfg = tiny_run(path, dtype, optim=optim, **sections)
    if dtype == "bfloat16":
        cfg.trainer.master_dtype = "float32"
    return cfg, getattr(torch, dtype)


def job(rank, world, path, root):
    """By case: gradients' norm and loss of the first step, weights and moments after three, a held-out loss."""
    found = {}
    for case in CASES:
        cfg, dtype = config(path, case)
        load = empty_policy if world > 1 and cfg.trainer.shard else load_policy
        t = SftTrainer(cfg, load(path, dtype), open_mesh(rank, world))
        assert t.sharded == (load is empty_policy)
        reports = [t.learn(talks(step)) for step in range(2)]
        if case == "dora":
            folder = t.save(Path(root) / f"of_{world}")
            again = SftTrainer(cfg, load(path, dtype), open_mesh(rank, world))
            again.load(folder)
            t = again
        reports.append(t.learn(talks(2)))
        held = [p if isinstance(p, Local) else local_of(n, p) for n, p in t.published()]
        gatherer = Gatherer(held, torch.float32, rank=rank, world=world)
        streams = [gatherer.gather(bucket, held) for bucket in gatherer.buckets]
        published = None if rank else np.concatenate([s.view(torch.float32).numpy() for s in streams])
        first = (reports[0].loss, reports[0].grad_norm)
        found[case] = first, everything(t), t.loss(talks(9)), published
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def results(path, tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    return job(0, 1, path, str(root)), run_ranks(2, job, path, str(root)), root


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_learns(results, case):
    one, two, _ = results
    gradient, weight = LIMITS.get(CASES[case].get("dtype"), (1e-12, 1e-9))
    first, wanted, held, published = one[case]
    for rank in two:
        assert rank[case][0] == pytest.approx(first, rel=gradient)
        close(rank[case][1], wanted, weight)
        assert rank[case][2] == pytest.approx(held, rel=weight)
    assert all(np.array_equal(two[0][case][1][n], x) for n, x in two[1][case][1].items())
    found = two[0][case][3]
    assert np.linalg.norm(found - published) <= max(weight, 1e-6) * np.linalg.norm(published)


def test_a_checkpoint_of_two_ranks_is_one_peft_folder_and_loads_on_one(results, path):
    _, _, root = results
    alone, shared = root / "of_1" / "step_000002", root / "of_2" / "step_000002"
    a, b = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (alone, shared))
    assert a.keys() == b.keys() and all((a[k] - b[k]).norm() <= 1e-9 * a[k].norm() for k in a)
    configs = [json.loads((f / "adapter" / "adapter_config.json").read_text()) for f in (alone, shared)]
    assert configs[0] == configs[1]
    cfg, dtype = config(path, "dora")
    t = SftTrainer(cfg, load_policy(path, dtype), open_mesh(0, 1))
    t.load(shared)
    t.learn(talks(2))
    close(everything(t), results[0]["dora"][1], 1e-9)
