"""Saves of two real gloo ranks: bit-identical resume, a late rank, a full disk, a rank that dies."""

from __future__ import annotations

import errno
import json
import random
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from asyncrl.training import checkpoint, export
from asyncrl.training.errors import CheckpointError
from asyncrl.training.keeping import Keep
from asyncrl.training.opening import build_trainer
from asyncrl.training.packing import pack
from tests.training.ranks import run_ranks
from tests.training.test_ranks import all_weights, share_of, whole
from tests.training.tiny import make_samples, tiny_folder, tiny_run

COLLECTIVE_S = 0.5
LATE_S = 2.0


def learn(trainer, rank, world, first, last):
    for i in range(first, last):
        trainer.step(share_of(make_samples(groups=5, size=4, seed=i), rank, world))


def resume_job(rank, world, path, root, dtype):
    """Weights after six steps: without a break, and resumed from every step of a run that saved as it went."""
    cfg = tiny_run(path, dtype, trainer={"steps": 6}, optim={"weight_decay": 0.1, "schedule": "cosine"})
    trainer = build_trainer(cfg, rank, world)
    for i in range(6):
        learn(trainer, rank, world, i, i + 1)
        with torch.no_grad():  # an evaluation, after which FSDP2 leaves its root unit gathered
            trainer.policy(pack(make_samples(), 0, trainer.mesh.device, torch.float32), 1.0)
        checkpoint.begin(trainer, root, Keep())
    trainer.saves.close()
    out = {6: all_weights(trainer)}
    for saved in (1, 3, 6):
        other = build_trainer(cfg, rank, world)
        other.load(root / f"step_{saved:06d}")
        learn(other, rank, world, saved, 6)
        out[f"from {saved}"] = all_weights(other)
    return out


def late_job(rank, world, path, root):
    """Rank 1's disk takes longer than a collective may last, and until both ranks have trained on."""
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    learn(trainer, rank, world, 0, 1)
    before, real = all_weights(trainer), checkpoint.write_tensors
    trainer.saves.open()
    trained = threading.Event()

    def late(*args, **kwargs):
        assert trained.wait(200)
        return real(*args, **kwargs)

    if rank == world - 1:
        checkpoint.write_tensors = late
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=COLLECTIVE_S), dist.group.WORLD)
    checkpoint.begin(trainer, root, Keep())
    threading.Event().wait(LATE_S)  # rank 0's thread waits for rank 1's, and nothing of theirs may end
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=300), dist.group.WORLD)
    learn(trainer, rank, world, 1, 3)
    written = checkpoint.latest(root) is not None
    dist.barrier()
    trained.set()
    trainer.saves.wait()
    checkpoint.write_tensors = real
    other = build_trainer(tiny_run(path, "float32"), rank, world)
    other.load_latest(root)
    return written, bool((all_weights(other) == before).all())


def full_job(rank, world, path, root):
    """The last rank's disk is full; training goes on until both know."""
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    good, real = trainer.save(root), checkpoint.write_tensors

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == world - 1:
        checkpoint.write_tensors = full
    trainer.version += 1
    told = []
    checkpoint.begin(trainer, root, Keep(), on_failed=lambda error: told.append(str(error)))
    learn(trainer, rank, world, 0, 1)
    try:
        while True:  # as between steps; both ranks leave at the same one, or the other would wait for ever
            trainer.saves.check()
    except CheckpointError as error:
        told.append(str(error))
    checkpoint.write_tensors = real
    dist.barrier()
    return told, [p.name for p in root.iterdir()] == [good.name]


def draws():
    """The next number of each generator."""
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def generators_job(rank, world, path, root):
    """What this rank draws after a save, and after it is restored in the middle of other draws."""
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    folder = trainer.save(root)
    want = draws()
    draws()
    build_trainer(tiny_run(path, "float32"), rank, world).load(folder)
    return want, draws()


def damage_job(rank, world, path, root):
    """One bit of the last rank's file flips: what a load says, and whether the trainer is as it was."""
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    folder = trainer.save(root)
    if rank == 0:
        file = folder / f"state/rank_{world - 1:05d}.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    learn(trainer, rank, world, 0, 1)
    before = all_weights(trainer)
    try:
        trainer.load(folder)
    except CheckpointError as error:
        return str(error), trainer.version, bool((all_weights(trainer) == before).all())


def files_job(rank, world, path, root):
    """Exports a model in files of few tensors, shared out among the ranks; its weights by name."""
    trainer, real = build_trainer(tiny_run(path, "float32"), rank, world), export.plan_files
    learn(trainer, rank, world, 0, 1)
    export.plan_files = lambda sizes: real(sizes, 8000)
    trainer.save(root)
    export.plan_files = real
    return {name: whole(p) for name, p in trainer.named_parameters_hf()}


def death_job(rank, world, path, root):
    """Rank 1 leaves in the middle of its write: rank 0's thread, which waits for it, says so."""
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    writing = threading.Event()

    def stuck(*args, **kwargs):
        writing.set()
        threading.Event().wait()

    if rank == world - 1:
        checkpoint.write_tensors = stuck
        checkpoint.begin(trainer, root, Keep())
        assert writing.wait(60)
        return "left"
    checkpoint.begin(trainer, root, Keep())
    try:
        trainer.saves.wait()
    except CheckpointError as error:
        return str(error)


def job(rank, world, path, root):
    root = Path(root)
    out = {dtype: resume_job(rank, world, path, root / dtype, dtype) for dtype in ("float32", "float64")}
    out["late"] = late_job(rank, world, path, root / "late")
    out["full"] = full_job(rank, world, path, root / "full")
    for name, run in (("generators", generators_job), ("damage", damage_job), ("files", files_job)):
        out[name] = run(rank, world, path, root / name)
    out["death"] = death_job(rank, world, path, root / "death")
    return out


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    path = tiny_folder(root / "model", tied=False)
    return path, root, run_ranks(2, job, path, str(root))


def test_row_5_resumed_at_any_step_equals_uninterrupted(two):
    """torchtune #2390. Bit-identical in fp32 on the same ranks, at the first, a middle and the last step."""
    for seen in two[2]:
        for saved in (1, 3, 6):
            assert (seen["float32"][f"from {saved}"] == seen["float32"][6]).all()


def test_on_another_number_of_ranks(two):
    path, root, seen = two
    want = seen[0]["float64"][6]
    cfg = tiny_run(path, "float64", trainer={"steps": 6}, optim={"weight_decay": 0.1, "schedule": "cosine"})
    for saved in (1, 3, 6):
        one = build_trainer(cfg, 0, 1)
        one.load(root / "float64" / f"step_{saved:06d}")
        learn(one, 0, 1, saved, 6)
        error = all_weights(one) - want
        assert (error @ error) ** 0.5 < 1e-9 * (want @ want) ** 0.5


def test_row_6_a_rank_that_writes_longer_than_a_collective_may_last(two):
    """torchtune #2059, #2093, #2651: the watchdog killed a save whose other ranks waited in a collective."""
    assert [seen["late"] for seen in two[2]] == [(False, True)] * 2


def test_a_full_disk_of_one_rank_is_every_ranks_reason(two):
    (mine, left), (its, still) = (seen["full"] for seen in two[2])
    assert left and still and len(mine) == len(its) == 2
    assert "rank 1 failed: [Errno 28] No space left" in mine[0] and mine[0] == mine[1]
    assert "could not write checkpoint" in its[0] and "No space left" in its[0]


def test_each_rank_goes_on_with_its_own_generators(two):
    (first, restored), (second, its) = (seen["generators"] for seen in two[2])
    assert restored == first and its == second and not set(first) & set(second)


def test_damage_of_one_ranks_file_stops_every_rank_before_anything_is_loaded(two):
    for text, version, unchanged in (seen["damage"] for seen in two[2]):
        assert "rank_00001.safetensors differs from its checksum" in text
        assert version == 1 and unchanged


def test_an_export_in_several_files_written_by_two_ranks_is_the_whole_model(two):
    _, root, seen = two
    (folder,) = root.glob("files/step_*/hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) > 3 and set(index.values()) == set(files)
    for name, want in seen[0]["files"].items():
        with safe_open(folder / index[name], framework="pt") as file:
            assert (file.get_tensor(name).double().numpy().ravel() == want).all(), name
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert dict(lm.named_parameters()).keys() == seen[0]["files"].keys()


def test_a_rank_that_dies_fails_the_save_of_the_others(two):
    assert two[2][1]["death"] == "left"
    assert "could not write checkpoint" in two[2][0]["death"] and "another rank did not get there" in two[2][0]["death"]
    assert checkpoint.latest(two[1] / "death") is None
