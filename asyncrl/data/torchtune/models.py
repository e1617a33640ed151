"""``model``, ``tokenizer`` and the checkpointers: the folder of the model, its adapters, the length of an example."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from asyncrl.config.model_folder import positions_of
from asyncrl.config.schema import TrainerConfig
from asyncrl.data.torchtune.leaves import UNKNOWN, Reading, RecipeError, component, plain

TOKENS = TrainerConfig().token_budget
_FUSED = ("phi3", "phi4")  # q, k and v are one matrix in their Hugging Face folders, so are gate and up
_MLP = ["gate_proj", "up_proj", "down_proj"]
# Sizes and the like, which builders of parts take: config.json has them.
_SIZES = {
    "vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "head_dim", "intermediate_dim",
    "max_seq_len", "norm_eps", "rope_base", "scale_factor", "tie_word_embeddings", "attn_bias",
}  # fmt: skip


def read_model(reading: Reading) -> bool:
    """Fills ``model.path`` and ``lora``; says whether adapters are trained."""
    _folder(reading)
    name = component(reading.get("model"))
    adapters = name.startswith(("lora_", "qlora_"))
    _quantised(reading, name)
    if adapters:
        _adapters(reading)
    for leaf in reading.below("model"):
        key, value = leaf.removeprefix("model."), reading.leaves[leaf]
        if key in _SIZES or value is None:
            reading.meaningless(leaf, "the model is what config.json in model.path says")
        elif key.endswith("dropout") and not value:
            reading.meaningless(leaf, "there is none here either")
    return adapters


def _folder(reading: Reading) -> None:
    kind = component(reading.get("checkpointer"))
    folder = str(reading.get("checkpointer.checkpoint_dir", UNKNOWN)).rstrip("/")
    path = PurePosixPath(folder)
    original = kind == "FullModelMetaCheckpointer"
    if original and path.name == "original":
        folder = str(path.parent)
    reading.translate("checkpointer.checkpoint_dir", {"model.path": folder}, "a folder in Hugging Face format")
    if original or kind == "FullModelTorchTuneCheckpointer":
        reading.without("checkpointer._component_", "model.path is read as Hugging Face's safetensors only")
        reading.todo.append(f"see that {folder} is the Hugging Face folder of the model (config.json, *.safetensors)")
    else:
        reading.meaningless("checkpointer._component_", "weights are read and written in Hugging Face's format")
    files = reading.get("checkpointer.checkpoint_files")
    names = files if isinstance(files, list) else [reading.get("checkpointer.checkpoint_files.filename_format")]
    for leaf in reading.below("checkpointer.checkpoint_files"):
        if all(str(name).endswith(".safetensors") for name in names):
            reading.meaningless(leaf, "the folder's own index names them")
        else:
            reading.without(leaf, "only safetensors are read: save_pretrained of transformers writes them")
    reading.meaningless("checkpointer.model_type", "config.json in model.path says it")
    reading.meaningless(
        "checkpointer.output_dir", "checkpoints lie in the run's own folder; sft.export copies the last"
    )
    if reading.get("checkpointer.safe_serialization", True):
        reading.meaningless("checkpointer.safe_serialization", "checkpoints are safetensors")
    if keep := reading.number("checkpointer.keep_last_n_checkpoints", 0):
        reading.translate("checkpointer.keep_last_n_checkpoints", {"checkpoint.keep": keep})
    _resumed(reading)


def _resumed(reading: Reading) -> None:
    resumed = reading.get("resume_from_checkpoint", False)
    if resumed:
        reading.without(
            "resume_from_checkpoint",
            "optimizer and position of a torchtune run cannot be read; its weights can, as model.path, and an adapter "
            "of its in PEFT's format as model.adapter. resume=RUN goes on with a run of this project",
        )
    else:
        reading.meaningless("resume_from_checkpoint", "a new run; resume=RUN goes on with one")
    for name in ("recipe_checkpoint", "adapter_checkpoint", "should_load_recipe_state"):
        leaf = f"checkpointer.{name}"
        if reading.get(leaf) and resumed:
            reading.without(leaf, "see resume_from_checkpoint")
        else:
            reading.meaningless(leaf, "for resumed runs")


def _quantised(reading: Reading, name: str) -> None:
    nearest = "no quantised base: frozen weights are held in model.compute_dtype, 2 bytes each in bfloat16"
    if name.startswith("qlora_"):
        reading.without("model._component_", f"{nearest}; the adapters are translated")
    else:
        reading.also("model._component_", "model.path: its config.json says what the model is")
    if reading.get("model.quantize_base", False):
        reading.without("model.quantize_base", nearest)
    else:
        reading.meaningless("model.quantize_base", "no base is quantised")


def _adapters(reading: Reading) -> None:
    fused = any(family in str(reading.get("model._component_")) for family in _FUSED)
    named = {"output_proj": "o_proj"} | ({f"{x}_proj": "qkv_proj" for x in "qkv"} if fused else {})
    wanted = reading.get("model.lora_attn_modules", [])
    if not isinstance(wanted, list):
        raise RecipeError(f"model.lora_attn_modules is {plain(wanted)}\n    -> a list: [q_proj, v_proj]")
    targets = [named.get(name, name) for name in map(str, wanted)]
    if reading.get("model.apply_lora_to_mlp", False):
        targets += ["gate_up_proj", "down_proj"] if fused else _MLP
    targets = list(dict.fromkeys(targets))
    why = "q, k and v are one matrix in the folder: they share an adapter" if fused else ""
    reading.translate("model.lora_attn_modules", {"lora.targets": targets}, why)
    reading.also("model.apply_lora_to_mlp", f"lora.targets={', '.join(targets)}")
    if reading.get("model.apply_lora_to_output", False):
        reading.without("model.apply_lora_to_output", "the head is never a target of lora.targets")
    else:
        reading.meaningless("model.apply_lora_to_output", "the head is never a target")
    reading.translate("model.lora_rank", {"lora.rank": reading.number("model.lora_rank", 8)})
    reading.translate("model.lora_alpha", {"lora.alpha": reading.number("model.lora_alpha", 16.0)})
    reading.translate("model.lora_dropout", {"lora.dropout": reading.number("model.lora_dropout", 0.0)})
    reading.translate("model.use_dora", {"lora.dora": bool(reading.get("model.use_dora", False))})
    if reading.get("save_adapter_weights_only", False):
        reading.meaningless("save_adapter_weights_only", "a checkpoint holds the adapter alone")
    else:
        reading.without(
            "save_adapter_weights_only",
            "a checkpoint holds the adapter alone; python -m asyncrl.training.merge ADAPTER OUT makes the whole model",
        )


def read_tokenizer(reading: Reading, batch_size: int, sides: int, stated: int) -> int:
    """Fills ``sft.max_length``, which it returns; 0 if there is none.

    A micro-batch has room for ``batch_size`` sequences, of two ``sides`` if they are pairs. ``stated``: by the dataset.
    """
    length = reading.number("tokenizer.max_seq_len", stated)
    if length:
        room = batch_size * sides * length
        keys: dict[str, Any] = {"sft.max_length": length, "sft.too_long": "cut", "trainer.token_budget": room}
        why = "longer ones are cut, without the eos token that torchtune writes over the last"
        reading.translate("tokenizer.max_seq_len", keys, why)
    else:
        reading.meaningless("tokenizer.max_seq_len", "null: see sft.max_length")
        keys = {"sft.max_length": min(TOKENS // sides, _positions(reading)), "sft.too_long": "error"}
        why = f"a limit is needed; trainer.token_budget is {TOKENS} tokens, and to use less memory is to lower both"
        reading.translate("", keys, why)
    if reading.get("tokenizer.truncation_type", "right") == "right":
        reading.meaningless("tokenizer.truncation_type", "the end is cut here too")
    if reading.get("tokenizer.prompt_template"):
        reading.without("tokenizer.prompt_template", "the chat template of model.path is applied, nothing else")
    for leaf in reading.below("tokenizer"):
        reading.meaningless(leaf, "the tokenizer is that of model.path, with its own chat template")
    return length


def _positions(reading: Reading) -> int:
    """How many tokens a context of the model may have; what a micro-batch holds if its folder is not here."""
    try:
        settings = json.loads((Path(str(reading.keys["model.path"])) / "config.json").read_text())
        return positions_of(settings) or TOKENS
    except (OSError, ValueError, AttributeError):
        return TOKENS  # the run's own check says what is wrong with the folder
