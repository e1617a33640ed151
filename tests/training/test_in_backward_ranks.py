"""The optimizer in the backward pass under FSDP2, HSDP, tensor parallelism and replication, on real gloo ranks.

Processes are slow to start, so one launch for each number of ranks answers all questions.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.config.schema import ParallelConfig
from asyncrl.training.mesh import Mesh, open_mesh
from asyncrl.training.model import layers
from asyncrl.training.rules import local_shard
from tests.training.in_backward_cases import batches, different, everything, frozen, lora, run, trainer, whole
from tests.training.ranks import run_ranks
from tests.training.tiny import tiny_folder

FREE = {"clip_norm": 1e9, "clip_guard": 0.0}
RECOMPUTED = {"trainer": {"steps": 9, "activation_checkpointing": "full"}, "report": {"noise_floor_every": 0}}
REPLICATED = {"trainer": {"steps": 9, "shard": False}, "report": {"noise_floor_every": 0}}
CASES = {
    2: {
        "fsdp tied": {},
        "fsdp untied": {"tied": False},
        "fsdp recomputed": {"sections": RECOMPUTED},
        "fsdp frozen": {"change": frozen},
        "fsdp lora": {"change": lora, "clip_norm": 0.02},
        "fsdp sgd": {"name": "sgd"},
        "fsdp muon": {"name": "muon"},
        "replicated": {"sections": REPLICATED},
        "hsdp": {},  # 2 x 1
        "tp": {},  # 1 x 2
    },
    4: {"hsdp": {}, "hsdp recomputed": {"sections": RECOMPUTED}, "tp": {}, "tp untied": {"tied": False}},
}


def mesh_of(kind: str, rank: int, world: int) -> Mesh:
    if kind == "hsdp":
        devices = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "tp":
        return open_mesh(rank, world, parallel=ParallelConfig(tp=2))
    else:
        devices = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    return Mesh(rank, world, torch.device("cpu"), dist.group.WORLD, devices)


def build(path, rank, world, name, options):
    kind = name.split()[0]
    return lambda **more: trainer(path, mesh=mesh_of(kind, rank, world), **options, **more)


def data_rank(name, rank, world):
    """(rank, world) of the data: ranks of one tensor-parallel group share it."""
    return (rank // 2, world // 2) if name.startswith("tp") else (rank, world)


def equality(path, rank, world):
    """case -> (tensors that differ, whether averages differ, reports inside, reports after)."""
    out = {}
    for name, options in CASES[world].items():
        make, place = build(path, rank, world, name, options), data_rank(name, rank, world)
        inside, after = make(in_backward=True), make(clip="delayed")
        reports = run(inside, 0, 3, *place), run(after, 0, 3, *place)
        clips = inside.optimizer.clip.state() == after.optimizer.clip.state()
        out[name] = different(everything(inside), everything(after)), clips, *reports
    return out


def against_torch(path, rank, world):
    out = {}
    for name in ("fsdp untied", "replicated", "hsdp", "tp") if world == 2 else ("hsdp", "tp"):
        options = {**CASES[world][name], **FREE}
        make, place = build(path, rank, world, name, options), data_rank(name, rank, world)
        inside, plain = make(in_backward=True), make()
        reports = run(inside, 0, 3, *place), run(plain, 0, 3, *place)
        norms = [[r["grad_norm"] for r in rs] for rs in reports]
        out[name] = type(plain.optimizer).__name__, different(everything(inside), everything(plain)), *norms
    return out


def changes(path, rank, world):
    """(kind, dtype, accumulation, micro-batches) -> minus the change of all weights: with a rate of 1, the gradient."""
    out, rule = {}, {"name": "sgd", "momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "warmup_steps": 0}
    for kind in ("one",) if world == 1 else ("fsdp", "replicated", "hsdp", "tp"):
        cut = batches(0, *data_rank(kind, rank, world))
        for dtype, accumulation in itertools.product(("float32", "float64"), ("armed", "momentum")):
            for mine in (cut, [[s for micro in cut for s in micro]]):
                options = {**rule, "in_backward": True, "accumulation": accumulation, "schedule": "constant", **FREE}
                sections = REPLICATED if kind == "replicated" else None
                mesh = open_mesh(0, 1) if kind == "one" else mesh_of(kind, rank, world)
                t = trainer(path, dtype, mesh=mesh, sections=sections, **options)
                before = [whole(p) for _, p in t.named_parameters_hf()]
                t.step(mine)
                after = [whole(p) for _, p in t.named_parameters_hf()]
                moved = np.concatenate([(a - b).ravel() for a, b in zip(before, after, strict=True)])
                out[kind, dtype, accumulation, len(mine)] = moved
    return out


def folding(path, rank, world):
    """Largest relative difference between folded and armed accumulation, float64, after three steps."""
    out = {}
    for kind in ("sgd", "muon"):
        options = {"name": kind, "in_backward": True, **FREE}
        folded = trainer(path, "float64", mesh=mesh_of("fsdp", rank, world), accumulation="momentum", **options)
        armed = trainer(path, "float64", mesh=mesh_of("fsdp", rank, world), **options)
        run(folded, 0, 3, rank, world), run(armed, 0, 3, rank, world)
        a, b = everything(folded), everything(armed)
        out[kind] = max(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(b[k]) for k in a)
    return out


def memory(path, rank, world):
    """Bytes of gradients: most at once in ``.grad``, of all, of the largest unit. Flat buffers: most alive, left."""
    t = trainer(path, tied=False, mesh=mesh_of("fsdp", rank, world), in_backward=True)
    peak, buffers = [0], {}

    def count(p):
        live = [local_shard(q.grad) for q in t.parameters if q.grad is not None]
        peak[0] = max(peak[0], sum(g.nbytes for g in live))
        for g in live:
            buffers.setdefault(StorageWeakRef(g.untyped_storage()).cdata, StorageWeakRef(g.untyped_storage()))

    alive = []
    for p in t.parameters:
        own = dict(p._post_accumulate_grad_hooks)
        p._post_accumulate_grad_hooks.clear()
        p.register_post_accumulate_grad_hook(count)
        p._post_accumulate_grad_hooks.update(own)
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(not b.expired() for b in buffers.values())))
    t.step([batches(0, rank, world)[0]])
    units = [sum(local_shard(p).nbytes for p in unit.parameters) for unit in t.optimizer.units]
    return peak[0], sum(units), max(units), max(alive), sum(not b.expired() for b in buffers.values())


def failures(path, rank, world):
    out = {}
    t = trainer(path, mesh=mesh_of("fsdp", rank, world), in_backward=True)
    run(t, 0, 1, rank, world)
    before, calls = everything(t), []
    bad = batches(1, rank, world)
    if rank == world - 1:
        bad[0][0].logprobs[:] = -1e4
        bad[0][0].advantages[:] = -1.0
    report = t.step(bad, lambda: calls.append(1))
    out["refused"] = report.skipped, different(everything(t), before), calls
    # A gradient that is not finite on the last rank only, from the first layer backward.
    layer = layers(t.policy.lm)[0]

    def poison(_, __, output):
        if rank == world - 1:
            output.register_hook(lambda g: g * math.inf)

    handle = layer.mlp.down_proj.register_forward_hook(poison)
    before = everything(t)
    report = t.step(batches(2, rank, world))
    handle.remove()
    changed = {n.split("/")[0] for n in different(everything(t), before)}
    out["partial"] = report.skipped, report.partial_units, sorted(changed)
    again = t.step(batches(3, rank, world))
    out["again"] = again.skipped, again.partial_units, again.partial_total
    return out


def switching(path, rank, world, root):
    """Tensors that differ from an uninterrupted run after a run that changed its mode at each checkpoint."""
    whole = trainer(path, mesh=mesh_of("fsdp", rank, world), in_backward=True)
    run(whole, 0, 4, rank, world)
    for leg in range(2):
        t = trainer(path, mesh=mesh_of("fsdp", rank, world), in_backward=leg == 1, clip="delayed")
        t.load_latest(Path(root))
        run(t, 2 * leg, 2 * leg + 2, rank, world)
        t.save(Path(root))
    return different(everything(t), everything(whole))


def rounded(path, rank, world):
    """Digest of weights and state in bf16 after three steps on replicas of one shard each, and what one step moved."""
    t = trainer(path, "bfloat16", mesh=mesh_of("hsdp", rank, world), in_backward=True)
    before = everything(t)
    run(t, 0, 3, rank, world)
    return hashlib.sha256(b"".join(x.tobytes() for x in everything(t).values())).hexdigest(), different_weights(
        t, before
    )


def different_weights(t, before):
    return [n for n, x in everything(t).items() if n in before and not np.array_equal(x, before[n])]


def job(rank, world, path, root):
    out = {"equality": equality(path, rank, world), "torch": against_torch(path, rank, world)}
    if world == 2:
        out["changes"] = changes(path, rank, world)
        out["folding"] = folding(path, rank, world)
        out["memory"] = memory(path, rank, world)
        out["failures"] = failures(path, rank, world)
        out["rounded"] = rounded(path, rank, world)
        out["switching"] = switching(path, rank, world, root)
    return out


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def two(path, tmp_path_factory):
    return run_ranks(2, job, path, str(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def four(path, tmp_path_factory):
    return run_ranks(4, job, path, str(tmp_path_factory.mktemp("four")))


def check_equality(seen, case):
    for rank in seen:
        changed, averages, inside, after = rank["equality"][case]
        assert not changed and averages
        assert all(r["skipped"] is None and r["partial_units"] == 0 for r in inside)
        assert sum(r["guarded_units"] for r in inside) > 0 and inside[-1]["clip_scale"] < 1
        for a, b in zip(inside, after, strict=True):
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
            assert a["loss"] == b["loss"]


@pytest.mark.parametrize("case", CASES[2])
def test_two_ranks_equal_the_step_after_backward_bit_for_bit(two, case):
    """Clipping at work: scaled loss and guard; ragged ranks and an empty micro-batch."""
    check_equality(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[4])
def test_four_ranks_equal_the_step_after_backward_bit_for_bit(four, case):
    check_equality(four, case)


def check_torch(seen):
    for rank in seen:
        for case, (optimizer, changed, inside, plain) in rank["torch"].items():
            assert optimizer == "AdamW" and not changed, case
            assert inside == pytest.approx(plain, rel=1e-6), case


def test_without_clipping_every_mesh_equals_torch_adamw_bit_for_bit(two):
    """Norms too: replicated and sharded parameters are counted once each."""
    check_torch(two)


@pytest.mark.slow
def test_without_clipping_every_mesh_of_four_ranks_equals_torch_adamw_bit_for_bit(four):
    check_torch(four)


def test_the_gradient_that_moves_the_weights_does_not_depend_on_the_split(two, path):
    """Rows 2 and 3 in the backward pass: against the whole batch in one backward of the ordinary loop."""
    seen = [rank["changes"] for rank in two] + [changes(path, 0, 1)]
    for dtype, limit in (("float32", 1e-6), ("float64", 1e-12)):
        t, found = trainer(path, dtype), []
        samples = [s for micro in batches(0) for s in micro]
        t.step([samples], lambda: found.extend(whole(p.grad).ravel() for _, p in t.named_parameters_hf()))  # noqa: B023
        want = np.concatenate(found)
        for case, moved in ((c, m) for rank in seen for c, m in rank.items() if c[1] == dtype):
            assert np.linalg.norm(moved - want) < limit * np.linalg.norm(want), case
    assert {len(rank) for rank in seen} == {4 * 8, 8}


def first_norms(seen, case):
    return [rank["equality"][case][2][0]["grad_norm"] for rank in seen]


def test_the_norm_does_not_depend_on_the_mesh(two, path):
    """The first step's global batch on one rank and on two; ranks of a tensor-parallel group train the same batch."""
    one, alone = trainer(path, tied=True), trainer(path, tied=True)
    samples = [s for rank in range(2) for m in batches(0, rank, 2) for s in m]
    want = one.step([samples]).grad_norm
    for case in ("fsdp tied", "replicated", "hsdp"):
        assert first_norms(two, case) == [pytest.approx(want, rel=1e-5)] * 2, case
    assert first_norms(two, "tp") == [pytest.approx(alone.step(batches(0)).grad_norm, rel=1e-5)] * 2


def test_folded_momentum_is_exact_under_fsdp(two):
    for rank in two:
        assert rank["folding"]["sgd"] < 1e-12 and rank["folding"]["muon"] < 1e-9


def test_sharded_gradients_of_one_unit_live_at_a_time(two):
    """The flat buffer of a unit goes with the last of its gradients."""
    for peak, total, largest, alive, left in (rank["memory"] for rank in two):
        assert peak == largest < total and alive <= 1 and left == 0


def test_failures_are_the_same_on_all_ranks(two):
    """What one rank sees decides for all, before any weight changes; later it drops the same units everywhere."""
    for seen in (rank["failures"] for rank in two):
        assert seen["refused"] == ("loss_not_finite", [], [])
        skipped, dropped, changed = seen["partial"]
        assert skipped is None and dropped == 2  # the first layer, and the root with the embedding
        assert changed and all(name.startswith("model.layers.1.") for name in changed)
        assert seen["again"] == (None, 0, 1)


def test_replicas_of_a_shard_are_rounded_alike(two):
    """Stochastic rounding must not let the replicas of HSDP drift apart."""
    (first, moved), (second, _) = (rank["rounded"] for rank in two)
    assert first == second and len(moved) > 20


def test_modes_may_switch_at_a_checkpoint_of_two_ranks(two):
    assert not any(rank["switching"] for rank in two)
