"""How long a checkpoint holds up training, against the copy that it cannot do without and torch's own.

ours      checkpoint.begin: host copy of fp32 weights and AdamW state; then written with checksums and a bf16 HF folder
torch     torch.distributed.checkpoint.async_save of the same tensors: what it holds, then what it writes (no HF folder,
          no checksums); from a GPU into pinned memory that it keeps, as ours does, on a CPU into fresh memory
floor     the copy alone: from the GPU one buffer of the same size into pinned memory, on a CPU into touched memory

A Llama-shaped model with random weights on this process's GPU, or on the CPU. The first save of each is left out: it
makes the memory and the groups. The folder is made beside the current one (TMPDIR does not apply): a real disk.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.config.schema import Config
from asyncrl.training import checkpoint
from asyncrl.training.keeping import Keep
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.step import Trainer
from benchmarks.harness import arguments, at_most, report

Save = Callable[[int], tuple[float, float]]  # number of the save -> (held, written) in seconds


def sizes(quick: bool) -> dict[str, int]:
    if quick or not torch.cuda.is_available():
        return {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4 if quick else 12}
    return {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}


def build(folder: Path, quick: bool) -> Trainer:
    """A trainer on a model that is also stored in ``folder``, with AdamW state for every parameter."""
    config = LlamaConfig(vocab_size=32_000, num_attention_heads=8, num_key_value_heads=8, **sizes(quick))
    disable_progress_bar()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = LlamaForCausalLM(config)
    lm.to(torch.bfloat16).save_pretrained(folder)
    cfg = Config()
    cfg.model.path = str(folder)
    trainer = Trainer(cfg, prepare(lm.float(), torch.float32), open_mesh(0, 1))
    for p in trainer.parameters:
        p.grad = torch.randn_like(p)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    return trainer


def ours(trainer: Trainer, root: Path) -> Save:
    def save(number: int) -> tuple[float, float]:
        trainer.version = number
        began = time.perf_counter()
        checkpoint.begin(trainer, root, Keep(1))
        held = time.perf_counter() - began
        trainer.saves.wait()
        return held, time.perf_counter() - began

    return save


def torchs(trainer: Trainer, root: Path) -> Save:
    state = {f"weight/{name}": p.detach() for name, p in trainer.named_parameters_hf()}
    for name, p in trainer.named_parameters_hf():
        state |= {f"{kind}/{name}": trainer.optimizer.state[p][kind] for kind in ("exp_avg", "exp_avg_sq")}

    stager = BlockingAsyncStager(cache_staged_state_dict=torch.cuda.is_available())  # on a CPU it cannot

    def save(number: int) -> tuple[float, float]:
        shutil.rmtree(root / str(number - 1), ignore_errors=True)
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=root / str(number), async_stager=stager)
        held = time.perf_counter() - began
        future.result()
        return held, time.perf_counter() - began

    return save


def floor(nbytes: int, device: torch.device) -> Save:
    source = torch.ones(nbytes // 4, device=device)
    target = torch.zeros(nbytes // 4, pin_memory=device.type == "cuda")

    def copy(number: int) -> tuple[float, float]:
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began,) * 2

    return copy


def main() -> int:
    options = arguments(__doc__ or "")
    repeats = 3 if options.quick or torch.cuda.is_available() else 7  # those of a GPU are large and steady
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".benchmark_") as folder:
        root = Path(folder)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{root}/store",
            rank=0,
            world_size=1,
        )
        trainer = build(root / "model", options.quick)
        parameters = sum(p.numel() for p in trainer.parameters)
        nbytes = 12 * parameters
        rows: dict[str, Save] = {
            "ours": ours(trainer, root / "ours"),
            "torch": torchs(trainer, root / "torch"),
            "floor": floor(nbytes, trainer.mesh.device),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for number in range(repeats + 1):
            for name, save in rows.items():  # in turn, so that a slow moment of the machine meets all of them
                result = save(number)
                if number:
                    found[name].append(result)
        trainer.saves.close()
        dist.destroy_process_group()
    figures: dict[str, Any] = {"parameters": parameters, "bytes": nbytes, "device": str(trainer.mesh.device)}
    print(f"{parameters / 1e6:.0f} M parameters, {nbytes / 2**30:.2f} GiB of state on {trainer.mesh.device}")
    for name, results in found.items():
        held, written = (statistics.median(column) for column in zip(*results, strict=True))
        figures[name] = {"held_s": held, "written_s": written, "raw": results}
        print(f"{name:6s} held {held:7.3f} s ({nbytes / held / 2**30:6.2f} GiB/s)   complete after {written:7.3f} s")
    ratio = figures["ours"]["held_s"] / figures["floor"]["held_s"]
    claims = [
        at_most("hold over the bare copy", ratio, 1.25),
        at_most("hold over torch's async_save", figures["ours"]["held_s"] / figures["torch"]["held_s"], 1.0),
    ]
    return report("checkpoint", figures, claims, json_file=options.json, packages=("torch", "transformers"))


if __name__ == "__main__":
    sys.exit(main())
