"""What the configuration says about links, the same for every process of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.schema import TransportConfig
from asyncrl.transport.keys import KEYS_FILE, Keys


def keys_file(cfg: TransportConfig) -> Path | None:
    """The CURVE keys of the run; None on loopback without keys."""
    return Path(cfg.keys_dir) / KEYS_FILE if cfg.keys_dir else None


def link_options(cfg: TransportConfig) -> dict[str, Any]:
    """Keys and pulse for a ``Dialer`` or ``Listener``."""
    path = keys_file(cfg)
    keys = Keys.load(path) if path is not None else None
    return {"keys": keys, "heartbeat_s": cfg.heartbeat_s, "dead_after_s": cfg.dead_after_s}


def listener_options(cfg: TransportConfig) -> dict[str, Any]:
    """The same, and where a ``Listener`` binds: a port that the system chooses on ``transport.host``."""
    return {**link_options(cfg), "address": f"tcp://{cfg.host}:0"}
