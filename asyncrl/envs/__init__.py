"""Environments: prompts and rewards. Nothing here imports torch."""

from __future__ import annotations

from asyncrl.config.schema import EnvConfig
from asyncrl.envs.function import FunctionEnv
from asyncrl.envs.reasoning_gym import ReasoningGymEnv
from asyncrl.envs.types import SPLITS, Env, EnvError, Item

__all__ = ["Env", "EnvError", "Item", "load_env"]


def load_env(cfg: EnvConfig, split: str) -> Env:
    """The split "train" or "heldout" of the configured task.

    A held-out split of ``env.heldout_size=0`` has no items but still scores.

    Raises:
        EnvError: (a ValueError) the task is unknown or its configuration is wrong; names the key and the remedy.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if cfg.kind == "function":
        return FunctionEnv(cfg, split)  # type: ignore[arg-type]
    return ReasoningGymEnv(cfg, split)  # type: ignore[arg-type]
