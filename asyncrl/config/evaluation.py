"""What is evaluated in a mode, and the keys that depend on it: early stop, generations, the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.data import has_heldout
from asyncrl.config.errors import Problem
from asyncrl.config.model_folder import stop_token_ids
from asyncrl.config.schema import Config

LARGER_IS_BETTER = {"eval/accuracy": True, "eval/loss": False}


def badness(metric: str, value: float) -> float:
    """Smaller is better, whichever metric it is."""
    return -value if LARGER_IS_BETTER[metric] else value


def best_by(config: Config) -> str:
    """The metric that checkpoints and evaluations are compared by."""
    return config.checkpoint.best_by or ("eval/loss" if config.mode == "sft" else "eval/accuracy")


def measured(config: Config) -> list[str]:
    """The metrics of held-out items that evaluations have, the mode's own first."""
    if config.mode != "sft":
        return ["eval/accuracy"]
    pairs = config.sft.loss == "dpo"
    return ["eval/loss", "eval/accuracy"] if pairs or scores_answers(config) else ["eval/loss"]


def scores_answers(config: Config) -> bool:
    """Whether ``mode=sft`` has a scorer for its generations: that of the items of env, if those are learnt."""
    from_env = not (config.sft.data or config.sft.heldout)
    return from_env and config.sft.loss == "likelihood" and config.eval.generations > 0


def check_evaluation(config: Config) -> Iterator[Problem]:
    """Generations have prompts and ends; an early stop has something to wait for."""
    wanted = config.eval
    for name in ("generations", "patience", "temperature"):
        key, value = f"eval.{name}", getattr(wanted, name)
        if not value:
            continue
        if config.mode != "sft":
            yield Problem(key, f"is for mode=sft; mode={config.mode} evaluates by its engines alone", f"{key}=0")
        elif not has_heldout(config):
            yield Problem(key, "there are no held-out items", f"{key}=0, or sft.heldout (env.heldout_size)")
    if config.mode == "sft" and wanted.temperature and not wanted.generations:
        yield Problem("eval.temperature", "nothing is answered (eval.generations=0)", "eval.generations=16")
    if config.mode == "sft" and wanted.patience and not wanted.every:
        yield Problem("eval.patience", "nothing is evaluated before the end (eval.every=0)", "eval.every=10")
    if config.mode == "sft" and wanted.generations and config.model.path:
        try:
            stop_token_ids(Path(config.model.path))
        except (OSError, ValueError) as error:
            yield Problem("eval.generations", f"answers would not end: {error}", "name it there")


def check_best(config: Config) -> Iterator[Problem]:
    """A best checkpoint needs checkpoints that are evaluated, by what the mode measures."""
    wanted, every = config.checkpoint, config.eval.every
    known = measured(config)
    if wanted.best_by not in ("", *known):
        remedy = known[0]
        if config.mode == "sft" and not (config.sft.data or config.sft.heldout):
            remedy += ", or eval.generations=64, whose answers are scored"
        yield Problem("checkpoint.best_by", f"mode={config.mode} does not measure {wanted.best_by}", remedy)
    if not wanted.keep_best:
        return
    if not has_heldout(config):
        yield Problem("checkpoint.keep_best", "there are no held-out items to find the best by", "0, or held-out items")
    elif not every or not wanted.every:
        never = "eval.every" if not every else "checkpoint.every"
        yield Problem(
            "checkpoint.keep_best",
            f"only the last checkpoint would be evaluated ({never}=0)",
            f"{never}={every or wanted.every or 10}, or checkpoint.keep_best=0",
        )
    elif math.lcm(every, wanted.every) > config.trainer.steps:
        yield Problem(
            "checkpoint.keep_best",
            f"no step but the last is both saved (every {wanted.every}) and evaluated (every {every})",
            f"eval.every={wanted.every}, or checkpoint.keep_best=0",
        )
