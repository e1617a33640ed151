"""Is this folder a model that we can train and serve? Answered from file headers, without torch or transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.errors import Problem

KEY = "model.path"
TRAINABLE_DTYPES = {"F64", "F32", "F16", "BF16"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors format

# Where each library names the architectures it knows.
REGISTRIES = {
    "transformers": "models/auto/modeling_auto.py",
    "vllm": "model_executor/models/registry.py",
}


def check_model_folder(folder: Path, key: str, tokens: int) -> Iterator[Problem]:
    """Every reason for which ``folder`` cannot be trained and served with contexts of ``tokens``, as ``key`` says."""
    if not folder.is_dir():
        remedy = "give a local folder in Hugging Face format"
        if folder.parent.parent == Path.cwd():  # typed as owner/name, which is how the Hub names models
            name = f"{folder.parent.name}/{folder.name}"
            remedy += f"; to fetch one: hf download {name} --local-dir {folder.name}, then model.path={folder.name}"
        yield Problem(KEY, f"{folder} is not a folder", remedy)
        return
    try:
        settings = json.loads((folder / "config.json").read_text())
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        yield Problem(KEY, f"{folder}/config.json cannot be read: {error}", "give a folder in Hugging Face format")
        settings = {}
    else:
        yield from _check_settings(folder, settings, key, tokens)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        names = " or ".join(TOKENIZER_FILES)
        yield Problem(KEY, f"{folder} has no tokenizer ({names})", "copy the tokenizer's files beside the weights")
    yield from _check_tokenizer(folder / "tokenizer.json")
    yield from _check_weights(folder, settings)


def _check_tokenizer(path: Path) -> Iterator[Problem]:
    """A tokenizer.json that is cut off, or a pointer to one, would be met only after the run has started."""
    if not path.is_file():
        return
    try:
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        yield Problem(KEY, f"{path} cannot be read: {error}", "copy the tokenizer's files again")


def _check_settings(folder: Path, settings: dict[str, Any], key: str, tokens: int) -> Iterator[Problem]:
    architectures = settings.get("architectures") or []
    if not architectures:
        yield Problem(KEY, f"{folder}/config.json names no architecture", 'add "architectures": ["..."] to it')
    for architecture in architectures:
        for library in REGISTRIES:
            if not knows_architecture(library, architecture):
                message = f"the installed {library} does not know the architecture {architecture} of {folder}"
                yield Problem(KEY, message, "choose a model that transformers trains and vLLM serves")
    yield from _check_parts(settings)
    if "quantization_config" in settings:
        yield Problem(KEY, f"{folder} is quantised, which cannot be trained", "give the unquantised model")
    limit = positions_of(settings)
    if limit is not None and limit < tokens:
        yield Problem(key, f"{tokens} is more than the {limit} positions of the model", f"{key}={limit} or less")


def positions_of(settings: dict[str, Any]) -> int | None:
    """How many tokens a context of the model may have, by its config.json; None if that does not say."""
    limit = (settings.get("text_config") or settings).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _check_parts(settings: dict[str, Any]) -> Iterator[Problem]:
    """Parts of a decoder that the trainer does not compute, by the names that their configs have."""
    text = settings.get("text_config") or settings
    kind = str(text.get("model_type", ""))
    cap = text.get("attn_logit_softcapping", 50.0 if kind.startswith("gemma2") else None)
    parts = {
        "a mixture of experts": any(isinstance(text.get(name), int) and text[name] > 1 for name in EXPERTS),
        "multi-head latent attention (MLA)": bool(text.get("kv_lora_rank")),
        "attention with capped scores (attn_logit_softcapping)": cap is not None,
        "attention with sinks": kind == "gpt_oss",
    }
    for part, has in parts.items():
        if has:
            yield Problem(KEY, f"{kind or 'the model'} has {part}, which is not part of this version", "a dense model")


def knows_architecture(library: str, architecture: str) -> bool:
    """Whether the registry of an installed library names ``architecture``.

    The source is searched as text: importing it would import torch. A library that is not installed, or keeps its
    registry elsewhere, is given the benefit of the doubt; it speaks for itself when it loads the model.
    """
    spec = find_spec(library)
    if spec is None or spec.origin is None:
        return True
    registry = Path(spec.origin).parent / REGISTRIES[library]
    return not registry.is_file() or f'"{architecture}"' in registry.read_text()


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights from; others that may lie beside them are not the model.

    Raises ``ValueError`` if there are none, or for an index that cannot be read.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor {index.name}")
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read: {error!r}") from error


def _check_weights(folder: Path, settings: dict[str, Any]) -> Iterator[Problem]:
    try:
        files = weight_files(folder)
    except ValueError as error:
        remedy = "download the folder again, or convert it: save_pretrained of transformers writes them"
        yield Problem(KEY, str(error), remedy)
        return
    for file in files:
        yield from _check_safetensors(file, settings)


def _check_safetensors(path: Path, settings: dict[str, Any]) -> Iterator[Problem]:
    try:
        header = read_safetensors_header(path)
    except (OSError, ValueError) as error:
        yield Problem(KEY, f"{path} cannot be read: {error}", "download the folder again")
        return
    wrong = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} - TRAINABLE_DTYPES
    if wrong:
        message = f"{path} holds weights of type {', '.join(sorted(wrong))}"
        yield Problem(KEY, message, f"give weights of type {', '.join(sorted(TRAINABLE_DTYPES))}")
    wanted = (settings.get("text_config") or settings).get("vocab_size")
    for name, entry in header.items():
        if wanted is not None and name.endswith("embed_tokens.weight") and entry["shape"][0] != wanted:
            message = f"{path} has {entry['shape'][0]} embeddings ({name}), config.json says vocab_size={wanted}"
            yield Problem(KEY, message, "the config.json that belongs to the weights")


def stop_token_ids(model: Path) -> list[int]:
    """The ids that end a completion, from generation_config.json or else config.json of a model folder.

    Raises ``ValueError`` if neither names one: completions would all run to their limit.
    """
    for file in ("generation_config.json", "config.json"):
        path = model / file
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return [int(i) for i in ids] if isinstance(ids, list) else [int(ids)]
    raise ValueError(f"{model}: neither generation_config.json nor config.json has an eos_token_id")


def read_safetensors_header(path: Path) -> dict[str, Any]:
    """The header: tensor name -> dtype, shape and offsets. Raises OSError, or ValueError when the file is damaged."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            raise ValueError("it is a Git LFS pointer, not the weights")
        if len(start) < 8:
            raise ValueError("it is not a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError("it is cut off, or not a safetensors file")
        header = json.loads(file.read(length))
    end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end != size:
        raise ValueError(f"it has {size} bytes instead of {8 + length + end}")
    return header
