"""Kernel modules whose Triton functions run in the interpreter on the CPU, beside the compiled ones of the process."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import triton


def interpreted(name: str) -> ModuleType:
    """A fresh copy of module ``name`` and of all of ``kernels``, made while Triton's interpreter is switched on.

    Whether a Triton function is interpreted is decided when it is defined, so the order of imports in a test session
    does not matter here, and no environment variable reaches child processes.
    """
    package = importlib.import_module("kernels")
    kept = {n: m for n, m in sys.modules.items() if n.startswith("kernels.")}
    attributes = {n.rpartition(".")[2]: m for n, m in kept.items()}
    for n in kept:
        del sys.modules[n]
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return importlib.import_module(name)
    finally:
        for n in [n for n in sys.modules if n.startswith("kernels.")]:
            del sys.modules[n]
        sys.modules.update(kept)
        for attribute, module in attributes.items():
            setattr(package, attribute, module)
