"""The embedded default learns: the claim of the README, run as a user runs it."""

from __future__ import annotations

import pytest

from tests.e2e.command import run, summary


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_embedded_default_learns_its_task(tmp_path, seed):
    run_dir = tmp_path / "run"
    run(tmp_path, [f"seed={seed}", f"run.dir={run_dir}", "report.wandb.enabled=false"])
    result = summary(run_dir)
    print(
        f"seed {seed}: {result['accuracy_initial']:.3f} -> {result['accuracy_final']:.3f} in {result['wall_s']:.0f} s"
    )
    assert result["accuracy_initial"] <= 0.45
    assert result["accuracy_final"] >= 0.80
