"""What ranks do in the tests of meshes (test_mesh.py); results are numpy arrays and plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from asyncrl.rollouts.types import TrainSample
from asyncrl.training import levers, tensor_parallel
from asyncrl.training.errors import BatchError
from asyncrl.training.opening import build_trainer
from asyncrl.training.step import Trainer
from asyncrl.weights.digest import tensor_digests
from asyncrl.weights.gather import Gatherer, local_of
from tests.training.memory import Memory
from tests.training.tiny import VOCAB, add_tokenizer, make_samples, tiny_run

# What parallel.* is set to, by world. A vocabulary of 61 divides by nothing.
MESHES: dict[int, dict[str, dict[str, int]]] = {
    1: {"one": {}},
    2: {"dp": {}, "copies": {"dp_replicate": 2}, "tp": {"tp": 2}},
    4: {
        "dp": {},
        "hsdp": {"dp_replicate": 2},
        "tp": {"tp": 4},
        "dp x tp": {"dp_shard": 2, "tp": 2},
        "copies x tp": {"dp_replicate": 2, "dp_shard": -1, "tp": 2},
    },
}
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
    intermediate_size=48, max_position_embeddings=256, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
    bos_token_id=None,
)  # fmt: skip
LARGER = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=6, vocab_size=512)
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3 untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, tie_word_embeddings=False, sliding_window=4)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES, tie_word_embeddings=False)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, tie_word_embeddings=False)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    ),
}


def make_folders(root: Path) -> None:
    """One Hugging Face folder a family in ``root``."""
    for name in FAMILIES:
        make_folder(root, name)
    Qwen3ForCausalLM(Qwen3Config(**SIZES | LARGER)).save_pretrained(root / "larger")
    add_tokenizer(root / "larger")


def make_folder(root: Path, family: str) -> None:
    torch.manual_seed(0)
    lm = FAMILIES[family]()
    with torch.no_grad():
        for p in lm.parameters():  # norms and biases too: a split one that is all ones or zeros would hide mistakes
            p.add_(0.05 * torch.randn_like(p))
    lm.save_pretrained(root / family)
    add_tokenizer(root / family)


def whole(x: torch.Tensor) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().double().cpu().numpy().ravel()


def gradient(trainer: Trainer) -> np.ndarray:
    return np.concatenate([whole(p.grad) for _, p in trainer.named_parameters_hf()])


def weights(trainer: Trainer) -> np.ndarray:
    return np.concatenate([whole(p) for _, p in trainer.named_parameters_hf()])


def ragged(samples: list[TrainSample], rank: int, ranks: int) -> list[list[TrainSample]]:
    """Two micro-batches of unequal size a data rank; the last one has few samples and an empty micro-batch."""
    if ranks == 1:
        return [samples[:9], samples[9:]]
    cut = [*np.array_split(np.arange(len(samples) - 3), ranks - 1), np.arange(len(samples) - 3, len(samples))]
    mine = [samples[i] for i in cut[rank]]
    return [mine, []] if rank == ranks - 1 else [mine[:4], mine[4:]]


def trained(
    cfg: Any, rank: int, world: int, steps: int = 2
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, float]]]:
    """(first gradient before clipping, weights after ``steps``, [(loss, gradient norm)])."""
    trainer, seen, reports = build_trainer(cfg, rank, world), [], []
    for i in range(steps):
        mine = ragged(make_samples(groups=5, size=4, seed=i), trainer.mesh.data_rank, trainer.mesh.data_ranks)
        report = trainer.step(mine, lambda: seen or seen.append(gradient(trainer)))
        reports.append((report.loss, report.grad_norm))
    return seen[0], weights(trainer), reports


RECOMPUTED = {"hsdp": "full", "dp x tp": "selective", "copies x tp": "every_2"}


def gradients(rank: int, world: int, root: str) -> dict[Any, Any]:
    """By (family, dtype, mesh): every mesh for one family, some with recomputed layers; two ranks split the others."""
    out = {}
    for family in FAMILIES if world < 4 else ("qwen3",):
        main = family == "qwen3"
        for mesh, parallel in MESHES[world].items():
            for dtype in ("float64", "float32") if main else ("float64",):
                if not main and mesh not in ("one", "tp"):
                    continue
                cfg = tiny_run(f"{root}/{family}", dtype, parallel=parallel, report={"noise_floor_every": 0})
                if dtype == "float64":
                    cfg.trainer.activation_checkpointing = RECOMPUTED.get(mesh, "none")
                out[family, dtype, mesh] = trained(cfg, rank, world, 2 if main and dtype == "float64" else 1)
    return out


def pushed(rank: int, world: int, root: str) -> dict[str, bool]:
    """Whether the gathered push of every mesh equals the weights in the folder, and the summed digests theirs."""
    found = {}
    want = {n: p.bfloat16() for n, p in Qwen3ForCausalLM.from_pretrained(f"{root}/qwen3 untied").named_parameters()}
    for mesh, parallel in MESHES[world].items():
        trainer = build_trainer(tiny_run(f"{root}/qwen3 untied", "float32", parallel=parallel), rank, world)
        locals_ = [local_of(name, p) for name, p in trainer.named_parameters_hf()]
        plan = Gatherer(locals_, torch.bfloat16, rank=rank, world=world, group=dist.new_group(), bucket_bytes=4096)
        streams = [plan.gather(bucket, locals_) for bucket in plan.buckets]
        digests = plan.shard_digests()
        if rank == 0:
            stream = torch.cat(streams)
            same = all(torch.equal(s.view(stream), want[s.name]) for s in plan.manifest.specs)
            found[mesh] = same and len(plan.buckets) > 1 and digests == tensor_digests(want.values())
    return found


def sums_of_a_layer(rank: int, world: int, root: str) -> float:
    """Sums over tensor-parallel ranks that a layer costs in forward and backward; Llama has no norms of heads."""
    cfg = tiny_run(f"{root}/llama", "float32", parallel={"tp": world}, report={"noise_floor_every": 0})
    trainer = build_trainer(cfg, rank, world)
    calls, one = [], tensor_parallel._sum
    tensor_parallel._sum = lambda x, mesh: calls.append(1) or one(x, mesh)
    trainer.step([make_samples()])
    tensor_parallel._sum = one
    return (len(calls) - 1) / SIZES["num_hidden_layers"]  # the embedding takes one


def offloaded(rank: int, world: int, root: str) -> tuple[int, bool]:
    """Activations of split layers in host memory: how many went there, and whether the gradient is the same."""
    moved, back, seen = [], levers.Waiting.back, []
    levers.Waiting.back = lambda self, device: moved.append(1) or back(self, device)
    least, levers.SMALLEST_BYTES = levers.SMALLEST_BYTES, 1
    for on in (False, True):
        cfg = tiny_run(f"{root}/qwen3", "float32", parallel={"tp": world}, trainer={"activation_offload": on})
        trainer = build_trainer(cfg, rank, world)
        trainer.step([make_samples()], lambda: seen.append(gradient(trainer)))  # noqa: B023
    levers.Waiting.back, levers.SMALLEST_BYTES = back, least
    return len(moved), bool((seen[0] == seen[1]).all())


def unequal_peers(rank: int, world: int, root: str) -> str:
    """Tensor-parallel peers that got different batches."""
    trainer = build_trainer(tiny_run(f"{root}/qwen3", "float32", parallel={"tp": world}), rank, world)
    try:
        trainer.step([make_samples()[rank:]])
    except BatchError as error:
        return str(error)
    return ""


def held(rank: int, world: int, root: str) -> dict[str, Any]:
    """Bytes, by mesh: (held at once while a trainer is built, its shards, its largest shard, the model)."""
    found: dict[str, Any] = {}
    for mesh in ("hsdp", "tp", "dp x tp"):
        parallel = MESHES[world][mesh]
        with Memory() as memory:
            trainer = build_trainer(tiny_run(f"{root}/larger", "float32", parallel=parallel), rank, world)
        named = trainer.named_parameters_hf()
        shards = [local_of(name, p).tensor.nbytes for name, p in named]
        found[mesh] = memory.peak, sum(shards), max(shards), sum(p.numel() * p.itemsize for _, p in named)
    return found


def job(rank: int, world: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    out = {"gradients": gradients(rank, world, root), "pushed": pushed(rank, world, root)}
    if world == 2:
        out["offloaded"] = offloaded(rank, world, root)
        out["unequal"] = unequal_peers(rank, world, root)
        out["sums"] = sums_of_a_layer(rank, world, root)
    if world == 4:
        out["held"] = held(rank, world, root)
    return out
