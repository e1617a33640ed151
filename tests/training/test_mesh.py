"""Meshes on real gloo ranks: one launch answers all questions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training import mesh_jobs
from tests.training.forks import run_forks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    root = tmp_path_factory.mktemp("mesh")
    mesh_jobs.make_folders(root)
    return run_forks("tests.training.mesh_jobs:job", (1, 2, 4), root, str(root))


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_gradients_do_not_depend_on_the_mesh(ranks):
    """torchtune #1875, #2980 and section 2.2: normalisation wrong under TP, accumulation and ragged ranks."""
    one, cases = ranks[1][0]["gradients"], 0
    for world in (2, 4):
        for seen in ranks[world]:
            for (family, dtype, mesh), (gradient, weights, reports) in seen["gradients"].items():
                want_gradient, want_weights, want_reports = one[family, dtype, "one"]
                case, exact = (world, family, dtype, mesh), dtype == "float64"
                assert relative(gradient, want_gradient) < (1e-12 if exact else 1e-6), case
                assert relative(weights, want_weights) < (1e-12 if exact else 1e-5), case
                assert np.allclose(reports, want_reports, rtol=1e-12 if exact else 1e-5), case
                cases += 1
    assert cases == 2 * (6 + 8) + 4 * 10


def test_the_push_of_every_mesh_is_the_whole_model(ranks):
    """No replica is counted twice, no rank's part is left out, rows cut twice are put in order."""
    for world in (1, 2, 4):
        assert ranks[world][0]["pushed"] == dict.fromkeys(mesh_jobs.MESHES[world], True)


def test_activations_of_split_layers_wait_in_host_memory_and_change_nothing(ranks):
    """torchtune: offload with tensor parallelism was broken."""
    for seen in ranks[2]:
        moved, same = seen["offloaded"]
        assert moved >= 8 and same


def test_tensor_parallel_peers_must_get_the_same_batch(ranks):
    for seen in ranks[2]:
        assert "tensor-parallel peers differ" in seen["unequal"]


def test_a_split_layer_costs_two_sums_in_each_direction(ranks):
    """Queries, keys and values share the sum of their input's gradient; so do gate and up."""
    for seen in ranks[2]:
        assert seen["sums"] == 4


def test_no_rank_ever_holds_more_than_its_shards_and_one_piece(ranks):
    """Meta device, shard, then read slices: torchtune has each rank read the whole checkpoint."""
    for seen in ranks[4]:
        for mesh, (peak, shards, largest, model) in seen["held"].items():
            share = 2 if mesh == "hsdp" else 4
            assert model / share <= shards * 1.02 and shards < model / share * 1.03, mesh
            assert shards <= peak <= shards + largest + 1024, mesh
            assert peak < model * 0.55, mesh
