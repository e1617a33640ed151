"""The optimizer in the backward pass against the ordinary loop, on a Llama-shaped transformers model.

torch after      the peer: torch's fused AdamW after the backward pass, the whole gradient in memory
ours after       our update of every unit after the backward pass: the same arithmetic as in it
ours in          the same in the backward pass (``optim.in_backward=true``)
ours in, adama   the same with two micro-batches whose gradients go into the moments at once

With a GPU: two models of 1.5 B parameters in pure bf16 (weights rounded stochastically by ours, to nearest by torch),
with the vocabulary of Llama 2 and, tied, of Llama 3; activation checkpointing. Steps of the cases alternate for the
times (16,384 tokens), and each case runs alone for its peak, with these tokens and with 1024, where activations do not
hide the gradient. What can be saved is the gradient less its largest part, which is alive when it steps. Then the
bandwidth of the update alone against a copy. Without a GPU: 11 M parameters in fp32, CPU seconds of one thread, and
bytes of gradients counted in hooks, because a process's memory says little about them. There the bound on time is 1.05
and not 1.02, which the noise of two busy cores does not resolve.

    python -m benchmarks.in_backward --json FILE           # everything that this machine has
    python -m benchmarks.in_backward --quick               # the small model, also on a GPU
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as runs have it; OpenMP reads it when torch loads

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.schema import Config
from asyncrl.rollouts.types import TrainSample
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.optim import build_optimizer
from asyncrl.training.rules import local_shard
from asyncrl.training.step import Trainer
from benchmarks.harness import Claim, arguments, at_least, at_most, report


@dataclass(frozen=True)
class Shape:
    """A Llama, and the batch that it learns: ``count`` samples of ``prompt`` and ``answer`` tokens."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    count: int
    prompt: int
    answer: int

    def model(self, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
        sizes = {k: v for k, v in asdict(self).items() if k not in ("count", "prompt", "answer")}
        torch.manual_seed(0)
        with device:
            lm = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=4096))
        return lm.to(dtype)


SMALL = Shape(4096, 256, 12, 768, 4, 2, True, count=8, prompt=24, answer=24)
LLAMA_2 = Shape(32_000, 2048, 22, 8192, 32, 8, False, count=8, prompt=512, answer=1536)
LLAMA_3 = Shape(128_256, 2048, 20, 8192, 32, 8, True, count=8, prompt=512, answer=1536)
FEW = {"prompt": 32, "answer": 96}  # tokens, so that a step's peak of memory is where the gradient is complete


@dataclass(frozen=True)
class Case:
    """``torch``: the peer's optimizer; ``inside``: ours in the backward pass; ``fold``: with AdamA's accumulation."""

    name: str
    torch: bool = False
    inside: bool = False
    fold: bool = False
    micro_batches: int = 1

    def dtype(self, large: bool) -> torch.dtype:
        """Moments that take several gradients a step need fp32."""
        return torch.bfloat16 if large and self.micro_batches == 1 else torch.float32


CASES = (
    Case("torch after", torch=True),
    Case("ours after"),
    Case("ours in", inside=True),
    Case("torch after, 2 micro-batches", torch=True, micro_batches=2),
    Case("ours in, adama, 2 micro-batches", inside=True, fold=True, micro_batches=2),
)


def draw_samples(shape: Shape) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    out = []
    for i in range(shape.count):
        prompt_ids, ids = (rng.integers(2, shape.vocab_size, n).astype(np.int32) for n in (shape.prompt, shape.answer))
        logps = (-np.log(shape.vocab_size) + 0.1 * rng.standard_normal(shape.answer)).astype(np.float32)
        advantages = np.full(shape.answer, rng.standard_normal(), np.float32)
        out.append(TrainSample(prompt_ids, ids, logps, np.zeros(shape.answer, np.int32), advantages, i, 0))
    return out


def build(case: Case, shape: Shape, device: torch.device) -> Trainer:
    large = shape is not SMALL
    dtype = case.dtype(large)
    cfg = Config()
    cfg.trainer.master_dtype = cfg.model.compute_dtype = str(dtype).removeprefix("torch.")  # type: ignore[assignment]
    cfg.trainer.activation_checkpointing = "full" if large else "none"
    cfg.trainer.loss_chunk_bytes = 64 * 2**20  # the head's buffers are not what is measured
    cfg.report.noise_floor_every = 0
    cfg.optim.lr, cfg.optim.warmup_steps = 1e-6, 0
    cfg.optim.in_backward, cfg.optim.clip = case.inside, "global" if case.torch else "delayed"
    cfg.optim.accumulation = "adama" if case.fold else "armed"
    trainer = Trainer(cfg, prepare(shape.model(device, dtype), dtype), open_mesh(0, 1, device))
    if case.torch:
        trainer.optimizer = build_optimizer(trainer.parameters, cfg.optim)
    return trainer


@contextlib.contextmanager
def counted_gradients(trainer: Trainer) -> Iterator[list[int]]:
    """Appends the bytes of gradients alive whenever one is complete, before the optimizer's hook frees it."""
    seen: list[int] = []
    handles = []

    def count(_: torch.Tensor) -> None:
        seen.append(sum(local_shard(p.grad).nbytes for p in trainer.parameters if p.grad is not None))

    for p in trainer.parameters:
        own = dict(p._post_accumulate_grad_hooks or {})  # type: ignore[attr-defined]
        handles.append(p.register_post_accumulate_grad_hook(count))
        for key, hook in own.items():  # to the end of the line
            del p._post_accumulate_grad_hooks[key]  # type: ignore[attr-defined]
            p._post_accumulate_grad_hooks[key] = hook  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        for handle in handles:  # they hold the trainer, out of the garbage collector's sight
            handle.remove()


def measure(cases: Sequence[Case], shape: Shape, device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Median seconds of a step, and the peak of gradients. The steps of ``cases`` alternate: noise hits all of them."""
    on_gpu = device.type == "cuda"
    samples = draw_samples(shape)
    trainers = [build(case, shape, device) for case in cases]
    cut = [[samples[i :: case.micro_batches] for i in range(case.micro_batches)] for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    clock = time.perf_counter if on_gpu else time.process_time
    for _ in range(2 + steps):
        for trainer, micro_batches, found in zip(trainers, cut, times, strict=True):
            if on_gpu:
                torch.cuda.synchronize()
            began = clock()
            trainer.step(micro_batches)
            if on_gpu:
                torch.cuda.synchronize()
            found.append(clock() - began)
    out = []
    for case, trainer, micro_batches, found in zip(cases, trainers, cut, times, strict=True):
        with counted_gradients(trainer) as gradients:
            last = trainer.step(micro_batches)
        assert last.skipped is None and not last.partial_units, f"{case.name}: {last.skipped}"
        sizes = [local_shard(p).nbytes for p in trainer.parameters]
        kept = found[2:]  # states exist, kernels are compiled
        facts = {"gradient_peak_bytes": max(gradients), "gradient_bytes": sum(sizes), "largest_bytes": max(sizes)}
        out.append({"step_s": statistics.median(kept), "steps_s": kept, **facts})
    return out


def peak_bytes(case: Case, shape: Shape, device: torch.device) -> int:
    """Most memory that a step in the steady state takes of a GPU on which nothing else lies."""
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 2**28, "something of an earlier case is alive"
    trainer, samples = build(case, shape, device), draw_samples(shape)
    micro_batches = [samples[i :: case.micro_batches] for i in range(case.micro_batches)]
    for _ in range(2):
        trainer.step(micro_batches)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(micro_batches)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def kernel_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of the update alone over a billion parameters in 48 tensors, and of a copy, on a GPU."""
    from kernels.adamw import Hyper, Job, adamw_triton

    def seconds(action: Callable[[], Any]) -> float:
        flush = torch.empty(64 * 2**20, dtype=torch.int32, device=device)
        found = []
        for i in range(25):
            flush.zero_()  # 256 MiB: nothing of the last call is left in the cache
            torch.cuda._sleep(4_000_000)  # the host is ahead, as in training, whose queue is never empty
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            end.synchronize()
            if i >= 5:
                found.append(start.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def jobs(weight: torch.dtype, grad: torch.dtype) -> list[Job]:
        sizes = [4096 * 4096, 4096 * 1024, 4096, 14336 * 4096] * 12
        made = []
        for i, n in enumerate(sizes):
            values = [torch.randn(n, device=device).mul_(0.02).to(d) for d in (weight, grad, weight)]
            square = torch.rand(n, device=device).mul_(1e-4).to(weight)
            made.append(Job(*values, square, 10, Hyper(1e-6, 0.9, 0.95, 1e-8, 0.01), i))
        return made

    def copy() -> float:
        source, target = (torch.empty(2**30, dtype=torch.int32, device=device) for _ in range(2))
        return 2 * source.nbytes / seconds(lambda: target.copy_(source))

    out = {"copy": copy()}
    one = torch.ones((), device=device)
    half, full = torch.bfloat16, torch.float32
    for name, weight, grad, bytes_each, seed in (
        ("fp32, fp32 gradient", full, full, 28, 0),
        ("fp32, bf16 gradient", full, half, 26, 0),
        ("bf16, to nearest", half, half, 14, None),
        ("bf16, stochastic", half, half, 14, 0),
    ):
        work = jobs(weight, grad)
        count = sum(job.weight.numel() for job in work)
        out[name] = bytes_each * count / seconds(lambda w=work, s=seed: adamw_triton(w, one, s))  # type: ignore[misc]
        del work
        torch.cuda.empty_cache()
    parameters = [torch.nn.Parameter(job.weight) for job in jobs(half, half)]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    peer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    peer.step()
    out["torch fused, bf16"] = 14 * sum(p.numel() for p in parameters) / seconds(peer.step)
    return out


def kernel_claims(found: dict[str, float]) -> list[Claim]:
    """Stochastic rounding has a bound of its own over the kernel without."""
    names = [name for name in found if name != "copy" and not name.startswith("torch") and "stochastic" not in name]
    shares = [
        at_least(f"update, {name}: share of the copy bandwidth", found[name] / found["copy"], 0.95) for name in names
    ]
    extra = found["bf16, to nearest"] / found["bf16, stochastic"] - 1
    return [*shares, at_most("stochastic rounding, more time", extra, 0.08)]


def main() -> int:
    options = arguments(__doc__ or "")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    shapes = {"llama 2": LLAMA_2, "llama 3, tied": LLAMA_3} if on_gpu and not options.quick else {"small": SMALL}
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    for name, shape in shapes.items():
        steps = 12 if shape is not SMALL else 5 if options.quick else 40
        figures[name] = of_shape(name, shape, device, steps)
        claims += compare(name, figures[name], on_gpu)
    if on_gpu:
        figures["bytes_per_second"] = bandwidth = kernel_bandwidth(device)
        for name, rate in bandwidth.items():
            print(f"{name:32s} {rate / 1e9:8.0f} GB/s   {rate / bandwidth['copy']:.3f} of the copy")
        claims += kernel_claims(bandwidth)
    return report(
        "in_backward", figures, claims, json_file=options.json, packages=("torch", "triton", "transformers", "numpy")
    )


def of_shape(name: str, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """Figures of every case by name; two micro-batches, whose states are fp32, for the small shape only."""
    large = shape is not SMALL
    few = replace(shape, **FEW) if large else shape
    figures: dict[str, Any] = {"shape": asdict(shape)}
    print(name)
    for group in [CASES[:3]] if large else [CASES[:3], CASES[3:]]:
        found = measure(group, shape, device, steps)
        for case, facts in zip(group, found, strict=True):
            peak = ""
            if device.type == "cuda":
                facts["peak_bytes"] = peak_bytes(case, few, device)
                peak = f"{facts['peak_bytes'] / 2**30:7.2f} GiB peak"
            if large:
                facts["peak_bytes_of_many"] = peak_bytes(case, shape, device)
                peak += f" ({facts['peak_bytes_of_many'] / 2**30:.2f} with all tokens)"
            figures[case.name] = facts
            share = facts["gradient_peak_bytes"] / facts["gradient_bytes"]
            print(f"  {case.name:32s} {facts['step_s']:8.4f} s a step   gradients {share:5.2f} of the whole {peak}")
    return figures


def compare(name: str, figures: dict[str, Any], on_gpu: bool) -> list[Claim]:
    torch_after, after, inside, torch_two, folded = (figures.get(case.name) for case in CASES)
    assert inside and torch_after and after
    claims = []
    for what, peer in (("ours after", after), ("torch after", torch_after)):
        ratio = statistics.median(a / b for a, b in zip(inside["steps_s"], peer["steps_s"], strict=True))
        claims.append(at_most(f"{name}: step time, ours in over {what}", ratio, 1.02 if on_gpu else 1.05))
    pairs = [("1 micro-batch", inside, torch_after)]
    if folded and torch_two:
        pairs.append(("2 micro-batches, adama", folded, torch_two))
    for which, ours, peer in pairs:
        if on_gpu:
            saved = peer["peak_bytes"] - ours["peak_bytes"]
            whole, largest = ours["gradient_bytes"], ours["largest_bytes"]
            claims.append(at_least(f"{name}: peak memory saved, of the gradient, {which}", saved / whole, 1.0))
            left = f"{name}: the same, of the gradient less its largest part, {which}"
            claims.append(at_least(left, saved / (whole - largest), 0.9))
        else:
            saved = (peer["gradient_peak_bytes"] - ours["gradient_peak_bytes"]) / ours["gradient_bytes"]
            claims.append(at_least(f"{name}: gradient memory saved, of its size, {which}", saved, 0.5))
    return claims


if __name__ == "__main__":
    sys.exit(main())
