"""The suites of the log-prob head on the Triton kernels, run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SUITES = ["test_logprob.py", "test_policy_loss.py"]


def test_the_same_suites_pass_on_the_triton_kernels():
    """A process of its own: Triton reads TRITON_INTERPRET once, when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton"]
    run = subprocess.run(
        [*command, *(str(HERE / suite) for suite in SUITES)],
        env=environment, capture_output=True, text=True, cwd=HERE.parents[1],
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout
