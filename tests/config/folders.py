"""Model folders made of headers alone: enough for every check that runs before torch is imported."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def write_safetensors(path: Path, dtype: str = "F32", names: tuple[str, ...] = ("model.norm.weight",)) -> None:
    """A valid safetensors file with one zero vector of 4 bytes a name."""
    header = {name: {"dtype": dtype, "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))


def make_model_folder(folder: Path, **settings: object) -> Path:
    """A folder that passes the check, with ``settings`` added to its config.json."""
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 1024, "eos_token_id": 0} | settings
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(folder / "model.safetensors")
    return folder
