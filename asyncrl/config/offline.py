"""A run downloads nothing and reports nothing: it reads local folders only."""

from __future__ import annotations

import os

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def set_offline_defaults() -> None:
    """Sets the variables that this process and its children read; a user's own value wins."""
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
