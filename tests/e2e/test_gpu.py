"""Trainer and generator on one GPU, in a run of the real command: both planes that reach an engine there."""

from __future__ import annotations

import json

import pytest
import torch

from tests.e2e.command import run, settings, steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("backend", ["ipc", "zmq"])
def test_three_steps_on_one_gpu(tmp_path, backend):
    folder, ended = tmp_path / "run", 3
    more = {"weights__backend": backend, "trainer__steps": ended, "generator__memory_share": 0.05}
    run(tmp_path, settings(folder, **more))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == ended and summary["weight_syncs"] >= ended, summary
    digests = {line["weights/digest/generator_0"] for line in steps(folder) if "weights/digest/generator_0" in line}
    assert len(digests) > 1, "the engine got the same weights in every push"
    assert summary["mismatch_mean"] < 2e-3, (
        summary
    )  # fp32 on both sides, products in TF32; stale weights differ by more
