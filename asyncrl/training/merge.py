"""Merges an adapter into its base: ``python -m asyncrl.training.merge ADAPTER OUT``.

``OUT`` becomes a plain Hugging Face folder that computes what base and adapter compute together. One tensor is held at
a time, so that a model of any size can be merged on a small machine. Products and sums are in fp32 (in float64 if a
weight is); the result is rounded once, to ``--dtype`` or the dtype of the base, where a small change may be lost: in
bfloat16 one of less than 1/256 of the weight it is added to.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.config.model_folder import weight_files
from asyncrl.training.adapter import StoredAdapter, read_adapter
from asyncrl.training.errors import ModelError, TrainingError
from asyncrl.training.export import plan_export, write_rest, write_weights
from asyncrl.training.files import fresh, publish, temporary
from asyncrl.training.fingerprint import fingerprint
from asyncrl.training.lora import merged, scale_of
from asyncrl.training.model import check_folder
from asyncrl.training.stored import DTYPES
from asyncrl.training.tensor_files import Spec


def merge(adapter: Path, out: Path, base: Path | None = None, dtype: str = "") -> Path:
    """Writes ``out``, which appears complete or not at all, and returns it.

    ``base``: where the base is, if not where the adapter says. Raises :class:`ModelError` for a folder that exists, an
    adapter that cannot be read, or a base that it was not made for.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists; give a folder that does not")
    stored = read_adapter(adapter)
    source = base or Path(stored.base)
    if not source.is_dir():
        raise ModelError(f"the adapter's base {source} is not a folder here; give it with --base")
    check_folder(source)
    stored.check_base(source, fingerprint(source))
    with ExitStack() as opened:
        files = [opened.enter_context(safe_open(f, framework="pt")) for f in weight_files(source)]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        weights = {name: _spec(file.get_slice(name)) for name, file in places.items()}
        _check_shapes(stored, weights)
        plan = plan_export(source, dtype, {name: name for name in weights}, weights)
        folder = fresh(temporary(out))
        try:
            write_weights(folder, plan, weights, lambda n: _merged(stored, n, places[n].get_tensor(n)), 0, 1)
            write_rest(folder, plan, weights)
            if out.exists():
                out.rmdir()
            publish(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return out


def _spec(place: Any) -> Spec:
    return DTYPES[place.get_dtype()], tuple(place.get_shape())


def _check_shapes(stored: StoredAdapter, weights: dict[str, Spec]) -> None:
    rank = stored.settings.rank
    for key, tensor in stored.tensors.items():
        name, _, kind = key.partition(".lora_")
        held = weights.get(f"{name}.weight")
        if held is None or len(held[1]) != 2:
            raise ModelError(f"the base has no matrix {name}.weight, which the adapter changes")
        rows, columns = held[1]
        wanted = {"A.weight": (rank, columns), "B.weight": (rows, rank), "magnitude_vector": (rows,)}.get(kind)
        if tuple(tensor.shape) != wanted:
            raise ModelError(f"{key} of the adapter is {tuple(tensor.shape)}; the base's {name} needs {wanted}")


def _merged(stored: StoredAdapter, name: str, weight: Tensor) -> Tensor:
    layer, found = name.removesuffix(".weight"), stored.tensors
    if f"{layer}.lora_B.weight" not in found:
        return weight
    b, a = found[f"{layer}.lora_B.weight"], found[f"{layer}.lora_A.weight"]
    magnitude = found[f"{layer}.lora_magnitude_vector"] if stored.settings.dora else None
    return merged(weight, b, a, scale_of(stored.settings), magnitude)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m asyncrl.training.merge", description="Merge an adapter.")
    parser.add_argument("adapter", type=Path, help="a PEFT folder, such as <checkpoint>/adapter")
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    parser.add_argument("--base", type=Path, help="the base's folder, if not where adapter_config.json says")
    parser.add_argument(
        "--dtype", default="", choices=["", "float32", "bfloat16", "float16"], help="default: the base's"
    )
    chosen = parser.parse_args(arguments)
    try:
        print(merge(chosen.adapter, chosen.out, chosen.base, chosen.dtype))
    except (TrainingError, OSError, SafetensorError) as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
