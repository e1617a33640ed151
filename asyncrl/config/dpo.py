"""Learning from preferences: which keys go together."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.errors import Problem
from asyncrl.config.schema import Config


def check_dpo(config: Config) -> Iterator[Problem]:
    """Pairs that fit in a micro-batch, a policy to begin with, and a loss that knows the settings."""
    sft, dpo = config.sft, config.dpo
    if sft.loss != "dpo":
        return
    if not config.model.path:
        yield Problem(
            "model.path",
            "is empty, and a new model prefers nothing: the reference of dpo is what the run starts from",
            "give the folder of a model that knows the task, for example one that sft.loss=likelihood made",
        )
    if sft.too_long == "split":
        yield Problem("sft.too_long", "half a preference cannot be learnt", "sft.too_long=skip, cut or error")
    pair, budget = 2 * sft.max_length, config.trainer.token_budget
    if pair > budget >= sft.max_length:  # check_sft has said the rest
        yield Problem(
            "sft.max_length",
            f"two answers of {sft.max_length} tokens with their prompts fit in no micro-batch of "
            f"trainer.token_budget={budget}",
            f"trainer.token_budget={pair}, or sft.max_length={budget // 2}",
        )
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        yield Problem(
            "dpo.label_smoothing",
            f"dpo.loss={dpo.loss} has no share of exchanged pairs",
            "dpo.label_smoothing=0, or dpo.loss=sigmoid",
        )
