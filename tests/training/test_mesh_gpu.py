"""Meshes over NCCL and the levers that only a GPU has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.training import float8, levers
from asyncrl.training.opening import build_trainer
from tests.training.mesh_jobs import MESHES, gradient, make_folder, ragged
from tests.training.ranks import run_ranks
from tests.training.tiny import make_samples, tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
BACKEND = "cpu:gloo,cuda:nccl"
GPU = torch.device("cuda", 0)


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("gpu")
    make_folder(root, "qwen3")
    return str(root / "qwen3")


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group(BACKEND, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def first_gradient(cfg, rank=0, world=1) -> np.ndarray:
    """Without the clip of the ratio, at which the gradient jumps: rounding in bf16 takes single tokens across it."""
    cfg.algorithm.clip_low, cfg.algorithm.clip_high = 1.0, 1e6
    trainer, seen = build_trainer(cfg, rank, world), []
    mine = ragged(make_samples(groups=5, size=4), trainer.mesh.data_rank, trainer.mesh.data_ranks)
    trainer.step(mine, lambda: seen.append(gradient(trainer)))
    return seen[0]


def every_mesh(rank, world, path):
    return {
        (mesh, dtype): first_gradient(
            tiny_run(path, "float32", parallel=parallel, model={"compute_dtype": dtype}), rank, world
        )
        for mesh, parallel in MESHES[world].items()
        for dtype in ("float32", "bfloat16")
    }


@pytest.mark.parametrize("world", [2, 4])
def test_meshes_over_nccl_give_the_gradient_of_one_gpu(path, world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    (one,) = run_ranks(1, every_mesh, path, backend=BACKEND)
    for seen in run_ranks(world, every_mesh, path, backend=BACKEND):
        for (mesh, dtype), found in seen.items():
            error = relative(found, one["one", dtype])
            print(f"{world} GPUs, {mesh}, {dtype}: {error:.2e}")
            assert error < (1e-5 if dtype == "float32" else 3e-2), (mesh, dtype)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_activations_change_nothing(path, world_of_one, recompute, monkeypatch):
    """Under pressure: every activation moves, whatever its size, and freed memory is used again at once."""
    monkeypatch.setattr("asyncrl.training.levers.SMALLEST_BYTES", 1)
    moved, back = [], levers.Waiting.back
    monkeypatch.setattr(levers.Waiting, "back", lambda self, device: moved.append(1) or back(self, device))
    found = [
        first_gradient(
            tiny_run(path, "float32", trainer={"activation_offload": on, "activation_checkpointing": recompute})
        )
        for on in (False, True)
    ]
    assert moved
    assert relative(*found) < 1e-6  # sums of the same kernels in any order; reused memory would show as garbage


def test_weights_and_optimizer_in_host_memory(path, world_of_one):
    trainers = [build_trainer(tiny_run(path, "float32", trainer={"cpu_offload": on}), 0, 1) for on in (False, True)]
    samples = make_samples(groups=5, size=4)
    reports = [trainer.step([samples]) for trainer in trainers]
    assert trainers[1].sharded
    assert {p.to_local().device.type for p in trainers[1].parameters} == {"cpu"}
    assert {s.device.type for state in trainers[1].optimizer.state.values() for s in state.values()} == {"cpu"}
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[1].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-4)


def test_float8_products_of_the_hardware_are_those_of_the_emulation():
    if torch.cuda.get_device_capability(GPU) < float8.CAPABILITY:
        pytest.skip("needs compute capability 8.9")
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(40, 64, generator=g), torch.randn(48, 64, generator=g)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        here = float8.product(x, w, dtype, torch.float32)
        there = float8.product(x.to(GPU), w.to(GPU), dtype, torch.bfloat16).float().cpu()
        assert relative(there.numpy(), here.numpy()) < 5e-3


def test_float8_trains_near_bf16(path, world_of_one):
    if torch.cuda.get_device_capability(GPU) < float8.CAPABILITY:
        pytest.skip("needs compute capability 8.9")
    found = [
        first_gradient(tiny_run(path, "float32", model={"compute_dtype": dtype})) for dtype in ("bfloat16", "float8")
    ]
    assert 1e-3 < relative(found[1], found[0]) < 0.3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_compiled_layers_train_like_plain_ones(path, world_of_one, dtype):
    found = [
        first_gradient(tiny_run(path, "float32", model={"compute_dtype": dtype}, trainer={"compile": on}))
        for on in (False, True)
    ]
    assert relative(found[1], found[0]) < {"float32": 1e-5, "bfloat16": 3e-2, "float8": 0.2}[dtype]
