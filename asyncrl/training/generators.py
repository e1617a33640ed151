"""The random number generators of a rank, as JSON: Python's, numpy's, torch's and the device's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def get_generators(device: torch.device) -> dict[str, Any]:
    """Their states now."""
    kind, keys, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    out = {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if device.type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return out


def set_generators(saved: dict[str, Any], device: torch.device) -> None:
    """Continues where ``get_generators`` saw them."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))

    def state(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(state(saved["torch"]))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(state(saved["cuda"]), device)
