"""The trainer's step on a CPU: its time, what packing and sharing prompts save, and how exact it stays.

ours          packed documents, a group's prompt computed once, chunked head (asyncrl.training)
plain         the same without sharing prompts
padded rows   the peer: transformers' SDPA on right-padded rows, all logits, as TRL-like trainers do it
floor         the matrix products of ours alone, at the machine's own speed for such products

512 samples in groups of 16, prompts of 28-32 and answers of 5-11 tokens, a decoder of 0.8 M parameters. Times are CPU
seconds of one process, so that other work on the machine does not count; the wall time of 2 threads is given beside.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as runs have it; OpenMP reads it when torch loads

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import Config
from asyncrl.rollouts.types import TrainSample
from asyncrl.training import packing
from asyncrl.training.attention import document_attention
from asyncrl.training.documents import Documents
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.step import Trainer
from benchmarks.harness import arguments, at_least, at_most, report

VOCAB, HIDDEN, LAYERS = 305, 128, 4
CPU = torch.device("cpu")


def tiny_lm() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 384, "head_dim": 32, "tie_word_embeddings": True, "initializer_range": 0.05}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, max_position_embeddings=1024, **sizes, **more))


def draw_samples(groups: int, size: int = 16) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    out = []
    for g in range(groups):
        prompt = rng.integers(2, VOCAB, rng.integers(28, 33)).astype(np.int32)
        for i in range(size):
            n = int(rng.integers(5, 12))
            ids, zeros = rng.integers(2, VOCAB, n).astype(np.int32), np.zeros(n, np.int32)
            logps = (-5.7 + 0.1 * rng.standard_normal(n)).astype(np.float32)
            out.append(TrainSample(prompt, ids, logps, zeros, np.full(n, rng.standard_normal(), np.float32), g, i))
    return out


def fastest(action: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    found = []
    for _ in range(repeats):
        started = clock()
        action()
        found.append(clock() - started)
    return min(found)


def new_trainer() -> Trainer:
    cfg = Config()
    cfg.optim.lr = 0.0  # every repetition is the same step
    return Trainer(cfg, prepare(tiny_lm(), torch.float32), open_mesh(0, 1, CPU))


def padded_step(lm: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, samples: list[TrainSample]) -> None:
    """The peer's step: forward and backward on padded rows with all logits, then AdamW."""
    tokens = sum(len(s.token_ids) for s in samples)
    for rows in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
        longest = max(len(s) for s in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        trained = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
        behaviour, advantage = torch.zeros(len(rows), longest - 1), torch.zeros(len(rows), longest - 1)
        for i, s in enumerate(rows):
            ids[i, : len(s)] = torch.from_numpy(np.concatenate([s.prompt_ids, s.token_ids]))
            place = slice(len(s.prompt_ids) - 1, len(s) - 1)
            trained[i, place] = True
            behaviour[i, place], advantage[i, place] = torch.from_numpy(s.logprobs), torch.from_numpy(s.advantages)
        logp = lm(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (logp - behaviour).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (-torch.where(trained, surrogate, 0.0).sum() / tokens).backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step_times(samples: list[TrainSample], repeats: int) -> dict[str, float]:
    half = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    trainer, lm = new_trainer(), tiny_lm()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=0.0, fused=True)
    limit = packing.SHARE_BELOW
    out = {"ours": fastest(lambda: trainer.step(half), repeats)}
    packing.SHARE_BELOW = 0.0
    out["plain"] = fastest(lambda: trainer.step(half), repeats)
    packing.SHARE_BELOW = limit
    out["padded rows"] = fastest(lambda: padded_step(lm, optimizer, samples), repeats)
    out["floor"] = floor_seconds(half, repeats)
    return out


def floor_seconds(micro_batches: list[list[TrainSample]], repeats: int) -> float:
    """Three products (forward, dX, dW) of every linear layer on the tokens of ours, and four of the head."""
    shapes = [(HIDDEN, 256), (128, HIDDEN), (HIDDEN, 768), (384, HIDDEN)]  # qkv, o, gate and up, down
    total = 0.0
    for samples in micro_batches:
        batch = packing.pack(samples, 0, CPU)
        for tokens, inner, outer, count in (
            *((batch.input_1T.shape[1], i, o, 3 * LAYERS) for i, o in shapes),
            (len(batch.target_M), HIDDEN, VOCAB, 4),
        ):
            x, w = torch.randn(tokens, inner), torch.randn(inner, outer)
            total += count * fastest(lambda x=x, w=w: x @ w, 3 * repeats)  # type: ignore[misc]
    return total


def attention_ratio(lengths: list[int], repeats: int) -> float:
    """CPU time of attention by document over that of padded rows, forward and backward."""
    lengths = sorted(lengths, reverse=True)
    documents = Documents(lengths)
    q, k, v = (torch.randn(1, sum(lengths), h, 32).transpose(1, 2).requires_grad_() for h in (4, 2, 2))
    rows = [torch.randn(len(lengths), lengths[0], h, 32).transpose(1, 2).requires_grad_() for h in (4, 2, 2)]

    def ours() -> None:
        document_attention(torch.nn.Identity(), q, k, v, None, documents=documents)[0].sum().backward()

    def padded() -> None:
        wide = [x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in rows[1:]]
        F.scaled_dot_product_attention(rows[0], *wide, is_causal=True).transpose(1, 2).contiguous().sum().backward()

    return fastest(ours, repeats) / fastest(padded, repeats)


def exactness(samples: list[TrainSample]) -> dict[str, float]:
    """Packed against one sample at a time (log-probs), and one micro-batch against many (gradients), in fp32."""
    policy, lm = prepare(tiny_lm(), torch.float32), tiny_lm()
    worst = 0.0
    for s in samples:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.token_ids])).long()
        with torch.no_grad():
            logp = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0]
        s.logprobs[:] = logp.numpy()  # the engine's part: pack() then carries it in the order of the row
    for share in (True, False):
        batch = packing.pack(samples, 0, CPU, share=share)
        with torch.no_grad():
            worst = max(worst, float((policy(batch, 1.0)[0] - batch.behaviour_M).abs().max()))
    gradients = []
    for cut in ([samples], [samples[i : i + 40] for i in range(0, len(samples), 40)]):
        trainer = new_trainer()
        trainer.step(cut, lambda t=trainer: gradients.append(torch.cat([p.grad.flatten() for p in t.parameters])))
    error = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    return {"packed_vs_unpacked": worst, "gradient_cut": error}


def main() -> int:
    options = arguments(__doc__ or "")
    repeats = 3 if options.quick else 8
    samples = draw_samples(groups=8 if options.quick else 32)
    figures: dict[str, Any] = {"samples": len(samples), "tokens": sum(map(len, samples))}
    torch.set_num_threads(1)
    figures["cpu_seconds"] = times = step_times(samples, repeats)
    for name, seconds in times.items():
        print(f"{name:12s} {seconds:7.3f} CPU s a step   {seconds / times['padded rows']:5.2f} of padded rows")
    rng = np.random.default_rng(0)
    ranges = {"38": (33, 42, 256), "10-60": (10, 60, 200), "100-260": (100, 260, 32)}
    ratios = {
        name: attention_ratio(rng.integers(low, high + 1, n).tolist(), 3 * repeats)
        for name, (low, high, n) in ranges.items()
    }
    figures["attention_over_padded_rows"] = ratios
    print("attention by document over padded rows: " + ", ".join(f"{k} tokens {v:.2f}" for k, v in ratios.items()))
    figures["exactness"] = exact = exactness(samples)
    torch.set_num_threads(2)
    trainer = new_trainer()
    half = [samples[: len(samples) // 2], samples[len(samples) // 2 :]]
    figures["wall_seconds_2_threads"] = fastest(lambda: trainer.step(half), repeats, time.perf_counter)
    print(f"2 threads: {figures['wall_seconds_2_threads']:.3f} s a step (wall)")
    claims = [
        at_most("attention by document over padded rows, worst", max(ratios.values()), 1.3),
        at_least("speed-up of a step over padded rows", times["padded rows"] / times["ours"], 2.0),
        at_most("packed against unpacked log-prob", exact["packed_vs_unpacked"], 1e-5),
        at_most("gradient of one cut against another, relative", exact["gradient_cut"], 1e-6),
    ]
    return report("trainer", figures, claims, json_file=options.json, packages=("torch", "transformers", "numpy"))


if __name__ == "__main__":
    sys.exit(main())
