"""The command of README.md that makes the shipped checkpoint makes it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.command import ROOT, run
from tests.e2e.readme import overrides

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

START = "torchrun launch/train.py +experiment=sft "
WEIGHTS = "model.safetensors"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flat(folder: Path) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(load_file(folder / WEIGHTS).items())])


def test_the_shipped_checkpoint_is_made_again(tmp_path):
    """Twice the same bytes. Other processors round otherwise, so of the shipped weights only that much is asked."""
    ((key, shipped),) = (text.split("=") for text in overrides(START))
    assert key == "sft.export"
    made = [tmp_path / name for name in ("first", "second")]
    for folder in made:
        run(tmp_path, [f"{key}={folder}", f"run.dir={folder}.run"], experiment="sft")
    assert files(made[0]) == files(made[1])
    first, kept = files(made[0]), files(ROOT / shipped)
    assert first.keys() == kept.keys()
    assert [name for name in kept if first[name] != kept[name]] in ([], [WEIGHTS])
    want = flat(ROOT / shipped)
    assert (flat(made[0]) - want).norm() < 1e-4 * want.norm()
