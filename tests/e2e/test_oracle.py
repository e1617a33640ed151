"""A recorded synchronous run of the real system, against the single-process reference fed the same samples."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.actors.batches import cut
from asyncrl.config.files import load_config
from asyncrl.modes.reference import replay
from asyncrl.rollouts.ledger import Ledger
from tests.e2e.command import run, settings, steps, summary

pytestmark = pytest.mark.timeout(900)
STEPS = 5
PREFIX = "weight/"


def recorded_batches(run_dir, cfg):
    with Ledger(run_dir / "ledger") as ledger:
        return [cut(version, groups, cfg).samples for version, groups in ledger.cuts_since(0)]


def master_weights(run_dir):
    """The trainer's own weights in its master dtype, by Hugging Face name."""
    state = load_file(run_dir / "checkpoints" / f"step_{STEPS:06d}" / "state" / "rank_00000.safetensors")
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-9), pytest.param("float32", 1e-5, marks=pytest.mark.slow)])
def test_the_weights_after_five_synchronous_steps_are_the_references(tmp_path, dtype, limit):
    run_dir = tmp_path / "run"
    precision = {"trainer__master_dtype": dtype, "model__compute_dtype": dtype}
    run(tmp_path, settings(run_dir, trainer__steps=STEPS, staleness__max_steps=0, **precision))
    assert [r["staleness/max"] for r in steps(run_dir)] == [0] * STEPS
    cfg = load_config(run_dir)
    expected = replay(cfg.model.path, recorded_batches(run_dir, cfg), cfg)
    found = master_weights(run_dir)
    assert found.keys() == expected.keys()
    moved = torch.stack([(expected[n] - before).norm() for n, before in start_weights(cfg, expected).items()]).norm()
    error = torch.stack([(found[n] - expected[n]).norm() for n in expected]).norm()
    size = torch.stack([expected[n].norm() for n in expected]).norm()
    assert error / size < limit
    assert moved / size > 100 * limit, "the run has to move the weights for the comparison to say something"
    assert summary(run_dir)["mismatch_mean"] < 1e-5


def start_weights(cfg, like):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=next(iter(like.values())).dtype)
    return {name: p.detach() for name, p in model.named_parameters()}
