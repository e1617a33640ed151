"""Which torchtune recipe a configuration is for, and on how many ranks: it says so at most in its comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.data.torchtune.leaves import RecipeError, component

READ = (
    "full_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_single_device",
    "lora_finetune_distributed",
    "full_dpo_distributed",
    "lora_dpo_single_device",
    "lora_dpo_distributed",
)
# A part of a recipe's name, and what there is instead.
INSTEAD = {
    "ppo_": "reinforcement learning is mode=grpo: a reward in one Python function (docs/environments.md)",
    "grpo": "reinforcement learning is mode=grpo: a reward in one Python function (docs/environments.md)",
    "knowledge_distillation": "distillation of logits is not here; write the teacher's answers to a file of messages "
    "and learn them with mode=sft",
    "qat_": "quantisation-aware training is not here; train with mode=sft and quantise the checkpoint's hf folder",
    "generate": "load a checkpoint's hf folder in vLLM, as it is: vllm serve RUN/checkpoints/step_N/hf",
    "eleuther_eval": "evaluate a checkpoint's hf folder, as it is, with lm-evaluation-harness",
    "quantize": "quantise a checkpoint's hf folder with the tools of the engine that serves it",
}
# A key that one recipe alone has.
_SIGNS = {
    "ppo_epochs": "ppo_full_finetune_single_device",
    "grpo_samples": "grpo_full_finetune_distributed",
    "kd_loss": "knowledge_distillation_distributed",
    "tasks": "eleuther_eval",
    "max_new_tokens": "generate",
}
_MULTIMODAL = ("vision", "multimodal", "flux", "clip")
_COMMAND = re.compile(r"tune run\b([^\n]*?)(\S+)[ \t]+--config\b")
_RANKS = re.compile(r"--nproc[_-]per[_-]node[= ]+(\d+)")


@dataclass(frozen=True)
class Launch:
    """``said``: where the recipe and the number of ranks are from, for the user."""

    recipe: str
    ranks: int
    said: str

    @property
    def preference(self) -> bool:
        return "dpo" in self.recipe


def launch_of(config: Mapping[str, Any], text: str, recipe: str = "", ranks: int = 0) -> Launch:
    """The recipe and its ranks, from the options, the comments of ``text``, or what the configuration holds.

    Raises ``RecipeError`` for one that has no equivalent here.
    """
    command = _COMMAND.search(text)
    name, why = recipe, "--recipe"
    if not name and command:
        name, why = command[2].rpartition("/")[2], "its comments"
    if not name:
        name, why = _guess(config), "its keys"
    for each in (name, _by_content(config)):
        _refuse(each)
    _check(name, config)
    return Launch(name, *_ranks(name, why, ranks, command[1] if command else ""))


def _ranks(name: str, why: str, ranks: int, arguments: str) -> tuple[int, str]:
    said = f"{name} (by {why})"
    if ranks:
        return ranks, f"{said} on {ranks} rank{'s' * (ranks > 1)} (by --ranks)"
    if name.endswith("single_device"):
        return 1, f"{said} on 1 rank"
    if found := _RANKS.search(arguments):
        return int(found[1]), f"{said} on {found[1]} ranks (by its comments; --ranks N for another number)"
    return 2, f"{said} on 2 ranks (assumed, the file does not say; --ranks N for another number)"


def _by_content(config: Mapping[str, Any]) -> str:
    """The recipe of which ``config`` has a key of its own; empty for those that are read."""
    if component(config.get("quantizer")):
        return "qat_distributed" if "dataset" in config else "quantize"
    return next((recipe for key, recipe in _SIGNS.items() if key in config), "")


def _guess(config: Mapping[str, Any]) -> str:
    method = "dpo" if component(config.get("loss")) in ("DPOLoss", "RSOLoss") else "finetune"
    kind = "lora" if component(config.get("model")).startswith(("lora", "qlora")) else "full"
    return f"{kind}_{method}_distributed"


def _refuse(name: str) -> None:
    """Raises ``RecipeError`` for a recipe that has no equivalent here."""
    for part, instead in INSTEAD.items():
        if part in name:
            raise RecipeError(f"{name} is not a recipe for this reader\n    -> {instead}")


def _check(name: str, config: Mapping[str, Any]) -> None:
    """Raises ``RecipeError`` unless ``name`` is read and ``config`` is one of such a recipe."""
    if name not in READ:
        raise RecipeError(f"{name} is not a recipe that is known\n    -> --recipe with one of: {', '.join(READ)}")
    model = config.get("model")
    missing = [key for key in ("model", "dataset") if not config.get(key)]
    if missing or not component(model):
        what = " and no ".join(missing) or "model._component_"
        raise RecipeError(
            f"is no configuration of a torchtune recipe: it has no {what}\n    -> give the YAML file that "
            f"`tune run {name} --config` takes (tune cp copies one)"
        )
    parts = str(model["_component_"]) if isinstance(model, Mapping) else ""
    if any(word in parts for word in _MULTIMODAL):
        raise RecipeError(f"{parts} reads images or draws them\n    -> only text is learnt here")
