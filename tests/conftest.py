"""Settings of all tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """``-m "not gpu"`` means the CPU also on a machine with GPUs, in worker processes and child processes too."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
