"""Settings of all tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """``-m "not gpu"`` means the CPU also on a machine with GPUs, in worker processes and child processes too."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes share the tests (``make test``): a file goes to one of them, and so does all that shares an engine.

    What a fixture of a module or of the session makes is then made once. Threads of both would be more than the cores.
    """
    for item in items:
        shared = "rig" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("rig" if shared else item.nodeid.partition("::")[0]))
