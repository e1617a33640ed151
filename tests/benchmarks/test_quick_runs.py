"""Benchmarks that need no peer: their quick runs end, and write figures and claims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_backward", "checkpoint"])
def test_a_quick_run_writes_its_figures(name, tmp_path):
    """Whether a claim holds is not asked: that depends on the machine and on who else computes there."""
    out = tmp_path / "out.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert "Traceback" not in done.stderr and out.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads(out.read_text())
    assert told["benchmark"] == name and told["claims"] and done.returncode in (0, 1)
