"""What every process of a run finds in its environment: nothing is downloaded or reported, threads do not spin."""

from __future__ import annotations

import os

# OpenMP threads spin at barriers unless told otherwise. Beside an engine on the same cores that costs the trainer a
# factor of six (42 SFT steps on two busy cores: more than 300 s spinning, 51 s waiting). Read when torch is imported.
THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
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
    for name, value in (OFFLINE | THREADS).items():
        os.environ.setdefault(name, value)
