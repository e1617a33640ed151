"""The trainer on real gloo ranks. Processes are slow to start, so one launch answers all questions."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from asyncrl.training import checkpoint
from asyncrl.training.errors import BatchError, CheckpointError
from asyncrl.training.opening import build_trainer
from asyncrl.training.sharding import local
from asyncrl.training.step import Trainer
from tests.training.ranks import run_ranks
from tests.training.tiny import make_samples, tiny_folder, tiny_run

MODES = {
    "sharded": {"shard": True},
    "whole": {"shard": False},
    "recomputed": {"shard": True, "activation_checkpointing": "full"},
}


def whole(x: torch.Tensor) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double().numpy().ravel()


def all_weights(trainer: Trainer) -> np.ndarray:
    return np.concatenate([whole(p) for _, p in trainer.named_parameters_hf()])


def share_of(samples, rank, world):
    """Ragged: the last rank gets few samples, and one of its micro-batches is empty."""
    if world == 1:
        return [samples[:9], samples[9:]]
    cut = [*np.array_split(np.arange(len(samples) - 3), world - 1), np.arange(len(samples) - 3, len(samples))]
    mine = [samples[i] for i in cut[rank]]
    return [mine, []] if rank == world - 1 else [mine[:4], mine[4:]]


def run_steps(cfg, rank, world, steps=2):
    """(first gradient before clipping, weights after ``steps``, the last report without times)."""
    trainer, seen = build_trainer(cfg, rank, world), []

    def look():
        if not seen:
            seen.append(np.concatenate([whole(p.grad) for _, p in trainer.named_parameters_hf()]))

    for i in range(steps):
        report = trainer.step(share_of(make_samples(groups=5, size=4, seed=i), rank, world), look)
    facts = {k: v for k, v in vars(report).items() if not k.endswith("_s") and k != "seconds"}
    return seen[0], all_weights(trainer), facts


def gradients_job(rank, world, folders):
    out = {}
    for tied, path in folders.items():
        for dtype in ("float64", "float32"):
            for mode, settings in MODES.items():
                aggregation = "sequence_mean" if mode == "whole" else "token_mean"
                cfg = tiny_run(path, dtype, trainer=settings, algorithm={"aggregation": aggregation})
                cfg.report.noise_floor_every = 1 if world > 1 else 0  # more forwards, no other gradient
                out[tied, dtype, mode] = run_steps(cfg, rank, world)
    return out


def behaviour_job(rank, world, path, root):
    """Failures and precision under FSDP2; returns what each rank saw."""
    out = {}
    trainer = build_trainer(tiny_run(path, "float32"), rank, world)
    out["shard_rows"] = [local(p).shape[0] for _, p in trainer.named_parameters_hf()][:1]
    samples = make_samples()
    trainer.step([samples[rank::world]])

    # Unequal counts: every rank raises, before any collective of the model could hang.
    try:
        trainer.step([samples] * (1 + rank))
    except BatchError as e:
        out["unequal"] = str(e)

    # A loss that is not finite on the last rank only.
    bad = make_samples(groups=1)
    if rank == world - 1:
        bad[0].logprobs[:] = -1e4
        bad[0].advantages[:] = -1.0
    before = all_weights(trainer)
    report = trainer.step([bad])
    out["skipped"] = report.skipped
    out["unchanged"] = bool(np.array_equal(before, all_weights(trainer)))

    # A rank with nothing to train takes part.
    report = trainer.step([samples if rank == 0 else []])
    out["empty"] = (report.skipped, report.tokens)

    # The disk of the last rank is full.
    good = trainer.save(Path(root) / "full")
    kept = checkpoint.write_tensors

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == world - 1:
        checkpoint.write_tensors = full
    trainer.version += 1
    try:
        trainer.save(Path(root) / "full")
    except CheckpointError as e:
        out["full"] = str(e)
    checkpoint.write_tensors = kept
    torch.distributed.barrier()
    out["left"] = [p.name for p in (Path(root) / "full").iterdir()] == [good.name]

    # bf16 compute with fp32 masters: updates of 1e-6 survive.
    cfg = tiny_run(path, "float32", optim={"lr": 1e-6, "warmup_steps": 0}, model={"compute_dtype": "bfloat16"})
    half = build_trainer(cfg, rank, world)
    before = all_weights(half)
    seen = []
    half.step([samples[rank::world]], lambda: seen.append(np.concatenate([whole(p.grad) for p in half.parameters])))
    moved = np.abs(all_weights(half) - before)
    # The sum of two ranks' bf16 gradients has more digits than bf16 holds, unless it was made in bf16.
    grad = torch.from_numpy(seen[0][seen[0] != 0])
    share = float((grad.bfloat16().double() != grad).double().mean())
    out["bf16"] = (float(np.median(moved)), {str(local(p).dtype) for p in half.parameters}, share)
    return out


def save(rank, world, path, root):
    trainer = build_trainer(tiny_run(path), rank, world)
    for i in range(2):
        trainer.step(share_of(make_samples(groups=5, size=4, seed=i), rank, world))
    trainer.save(Path(root))


def resume(rank, world, path, root):
    """Weights after steps 2 and 3 on a checkpoint of two steps."""
    trainer = build_trainer(tiny_run(path), rank, world)
    trainer.load_latest(Path(root))
    assert trainer.version == 2
    for i in range(2, 4):
        trainer.step(share_of(make_samples(groups=5, size=4, seed=i), rank, world))
    return all_weights(trainer)


def job(rank, world, folders, root):
    root = Path(root)
    out = {"gradients": gradients_job(rank, world, folders), "resumed": {}}
    for tying, path in folders.items():
        save(rank, world, path, root / f"{tying}_{world}")
        out["resumed"][tying] = resume(rank, world, path, root / f"{tying}_1")
    if world == 2:
        out["behaviour"] = behaviour_job(rank, world, folders["tied"], root)
    return out


@dataclass
class Ranks:
    folders: dict[str, str]
    root: Path
    one: dict
    several: dict[int, list[dict]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    """All jobs on 1, 2 and 3 ranks."""
    root = tmp_path_factory.mktemp("ranks")
    folders = {"tied": tiny_folder(root / "tied"), "untied": tiny_folder(root / "untied", tied=False)}
    one = job(0, 1, folders, root)
    return Ranks(folders, root, one, {world: run_ranks(world, job, folders, str(root)) for world in (2, 3)})


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_rows_2_and_3_gradients_and_reports_do_not_depend_on_the_ranks(ranks):
    """Contract Loss: FSDP2 and whole, tied and untied, ragged, with an empty micro-batch.

    torchtune #1875, #1917, #2172, #2687, #2733, #2980; prime-rl #2562; ms-swift #10116.
    """
    for seen in (s for world in ranks.several.values() for s in world):
        for case, (gradient, weights, report) in seen["gradients"].items():
            want_gradient, want_weights, want_report = ranks.one["gradients"][case]
            exact = case[1] == "float64"
            assert relative(gradient, want_gradient) < (1e-12 if exact else 1e-6), case
            assert relative(weights, want_weights) < (1e-12 if exact else 1e-5), case
            assert 0 < report["floor_tokens"] <= report["tokens"] and report["floor"] < (1e-12 if exact else 1e-5)
            for key, value in want_report.items():
                if key in ("micro_batches", "padding_share", "floor", "floor_max", "floor_tokens"):
                    continue  # these do depend on the cut
                if isinstance(value, (float, dict)):
                    value = pytest.approx(value, rel=1e-9 if exact else 1e-3)
                assert report[key] == value, (case, key)


def test_failures_and_precision_on_two_ranks(ranks):
    first, last = (seen["behaviour"] for seen in ranks.several[2])
    for seen in (first, last):
        assert "different numbers of micro-batches: [1, 2]" in seen["unequal"]
        assert seen["skipped"] == "loss_not_finite" and seen["unchanged"]
        assert seen["empty"] == (None, sum(len(s.token_ids) for s in make_samples()))
        assert seen["left"]
        median, dtypes, finer_than_bf16 = seen["bf16"]
        assert 0.5e-6 < median < 2e-6 and dtypes == {"torch.float32"} and finer_than_bf16 > 0.3
    assert first["shard_rows"] == [31] and last["shard_rows"] == [30]  # uneven: 61 rows on two ranks
    assert "rank 1 failed" in first["full"] and "No space left" in last["full"]


@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_checkpoints_move_between_numbers_of_ranks(ranks, tying):
    want = ranks.one["resumed"][tying]
    for world, seen in ranks.several.items():
        for rank in seen:  # from one rank to several
            assert relative(rank["resumed"][tying], want) < 1e-12
        back = resume(0, 1, ranks.folders[tying], ranks.root / f"{tying}_{world}")  # and from several to one
        assert relative(back, want) < 1e-12


@pytest.mark.parametrize("tying", ["tied", "untied"])
def test_the_export_of_several_ranks_is_the_whole_model(ranks, tying):
    """PipelineRL 7ae377c, torchtune #2237: a head dropped or stale on tied and untied models."""
    state = {}
    for world in (1, 2, 3):
        lm = AutoModelForCausalLM.from_pretrained(ranks.root / f"{tying}_{world}" / "step_000002" / "hf")
        state[world] = np.concatenate([whole(p) for p in lm.parameters()])
    for world in (2, 3):
        assert relative(state[world], state[1]) < 1e-6
