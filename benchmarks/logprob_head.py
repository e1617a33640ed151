"""The log-prob head and the policy-loss head against bare products, torch.compile, Liger and cut-cross-entropy.

ours          selected_logprob (log-prob and entropy), its lean setting, policy_loss; forward and backward
peers         torch.compile of logits and log_softmax (log-prob and entropy); liger, cut-cross-entropy (log-prob only)
floors        the bare matrix products: 1 forward, 3 with both gradients, 4 with logits computed twice

8192 tokens, hidden size 4096, vocabularies of 128,256 and 151,936, bf16, gradients of hidden and weight. Times are
means over 1.2 s of calls back to back after 0.8 s of the same: in products a GPU is bound by its power, and ratios hold
only in that state. "Extra" memory is the peak less the gradients that are returned. Errors are relative norms against
float64, and beside them those of a dense bf16 computation (bf16 logits, fp32 softmax).

Without a GPU it runs at toy sizes, and claims errors only. Install what is to be compared:
pip install --no-deps liger-kernel, and cut-cross-entropy from its repository.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Claim, arguments, at_most, report
from benchmarks.head_peers import Action, Data, by_autograd, floors, make_data, naive, peers, reference
from kernels.logprob import selected_logprob
from kernels.policy_loss import policy_loss

GPU = torch.cuda.is_available()
LEAN = 2016  # vocabulary rows a chunk: eight tiles wide, and hidden's fp32 gradient and one chunk stay below 160 MiB
MIB = 2**20


def known_slopes(logp: Tensor, entropy: Tensor, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The linear loss whose derivatives are the upstream gradients of the other heads."""
    return g1 * logp + g2 * entropy, g1, g2


def policy_action(data: Data, **options: Any) -> Action:
    def run() -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        loss, logp, entropy = policy_loss(
            data.hidden, data.weight, data.target, known_slopes, (data.g_logp, data.g_entropy), **options
        )
        d_hidden, d_weight = torch.autograd.grad(loss, [data.hidden, data.weight])
        return logp, entropy, d_hidden, d_weight

    return run


def ours(data: Data) -> dict[str, Action]:
    def head(vocab_chunk: int) -> Action:
        operands = data.hidden, data.weight, data.target
        return by_autograd(data, lambda: selected_logprob(*operands, vocab_chunk=vocab_chunk)[:2])

    return {
        "logprob": head(8192),
        "logprob lean": head(LEAN),
        "policy loss": policy_action(data),
        "policy loss, fp32 sums": policy_action(data, fp32_weight_gradient=True),
    }


def steady_ms(action: Callable[[], Any], quick: bool) -> float:
    """Mean milliseconds of a call among many, back to back."""
    if not GPU:
        action()
        started = time.perf_counter()
        action()
        return 1e3 * (time.perf_counter() - started)
    warm_s, measured_s = (0.3, 0.5) if quick else (0.8, 1.2)
    action()
    torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    torch.cuda.synchronize()
    once = time.perf_counter() - started
    for _ in range(max(1, int(warm_s / once))):
        action()
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = max(4, int(measured_s / once))
    first.record()
    for _ in range(calls):
        action()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / calls


def extra_mib(action: Action, data: Data) -> float | None:
    """Peak memory of one call less the gradients it returns; None without a GPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    returned = sum(x.numel() * x.element_size() for x in (data.hidden, data.weight))
    return (torch.cuda.max_memory_allocated() - before - returned) / MIB


def relative(a: Tensor, b: Tensor) -> float:
    """In slices of rows: float64 copies of a whole weight would not fit."""
    difference, norm = 0.0, 0.0
    for x, y in zip(a.split(8192), b.split(8192), strict=True):
        difference += float((x.double() - y.double()).square().sum())
        norm += float(y.double().square().sum())
    return (difference / norm) ** 0.5


def errors(action: Action, truth: dict[str, Tensor]) -> dict[str, float]:
    logp, entropy, d_hidden, d_weight = action()
    which = "logp" if entropy is None else "both"
    found = {
        "logp max": float((logp.double() - truth["logp"]).abs().max()),
        "d_hidden": relative(d_hidden, truth[f"d_hidden {which}"]),
        "d_weight": relative(d_weight, truth[f"d_weight {which}"]),
    }
    return found if entropy is None else found | {"entropy max": float((entropy - truth["entropy"]).abs().max())}


def measure(data: Data, quick: bool) -> dict[str, Any]:
    """All figures of one size; a peer that is absent or fails has its reason instead."""
    truth = reference(data)
    rows: dict[str, Any] = {}
    for name, action in {"dense bf16": by_autograd(data, lambda: naive(data)), **ours(data), **peers(data)}.items():
        if isinstance(action, str):
            rows[name] = {"reason": action}
            continue
        try:
            rows[name] = {"errors": errors(action, truth), "extra_mib": extra_mib(action, data)}
            rows[name]["ms"] = steady_ms(action, quick)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as e:  # another project's code
            if name in ours(data):
                raise
            rows[name] = {"reason": f"failed: {type(e).__name__}: {str(e).splitlines()[0][:200]}"}
        if GPU:
            torch.cuda.empty_cache()
    del truth
    with torch.no_grad():
        forward = steady_ms(lambda: selected_logprob(data.hidden, data.weight, data.target), quick)
    bare = {name: steady_ms(action, quick) for name, action in floors(data).items()}
    return {"rows": rows, "forward_ms": forward, "floors_ms": bare, "entropy_mean": entropy_of(data)}


def entropy_of(data: Data) -> float:
    with torch.no_grad():
        return float(selected_logprob(data.hidden, data.weight, data.target)[1].mean())


def show(v: int, found: dict[str, Any]) -> None:
    bare = found["floors_ms"]
    print(f"\nvocabulary {v}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in bare.items() if GPU))
    for name, row in found["rows"].items():
        if "reason" in row:
            print(f"{name:24s} {row['reason']}")
            continue
        speed = ""
        if GPU:  # at toy sizes on a CPU a time says nothing
            ratios = f"{row['ms'] / bare['3 products']:5.2f} x3 {row['ms'] / bare['4 products']:5.2f} x4"
            speed = f"{row['ms']:8.2f} ms {ratios} {row['extra_mib']:8.0f} MiB  "
        print(f"{name:24s} {speed}" + "  ".join(f"{key} {error:.1e}" for key, error in row["errors"].items()))
    if GPU:
        print(f"{'forward only':24s} {found['forward_ms']:8.2f} ms {found['forward_ms'] / bare['1 product']:5.2f} x1")


def speed_claims(v: int, found: dict[str, Any]) -> list[Claim]:
    rows, bare = found["rows"], found["floors_ms"]
    four, lean, three = (rows[name] for name in ("logprob", "logprob lean", "policy loss"))
    return [
        at_most(f"V={v}: log-prob and entropy over 4 products", four["ms"] / bare["4 products"], 1.08),
        at_most(f"V={v}: its extra memory, MiB", four["extra_mib"], 260),
        at_most(f"V={v}: lean setting over 4 products", lean["ms"] / bare["4 products"], 1.15),
        at_most(f"V={v}: its extra memory, MiB, lean", lean["extra_mib"], 160),
        at_most(f"V={v}: policy-loss head over 3 products", three["ms"] / bare["3 products"], 1.10),
        at_most(f"V={v}: its extra memory, GiB", three["extra_mib"] / 1024, 0.9),
        at_most(f"V={v}: forward only over 1 product", found["forward_ms"] / bare["1 product"], 1.08),
    ]


def accuracy_claims(v: int, found: dict[str, Any], full_size: bool) -> list[Claim]:
    rows = found["rows"]
    usual, claims = rows["dense bf16"]["errors"], []
    for name in ("logprob", "logprob lean", "policy loss"):
        mine = rows[name]["errors"]
        worst = max(mine[key] / usual[key] for key in ("d_hidden", "d_weight", "logp max", "entropy max"))
        claims.append(at_most(f"V={v}: {name}: worst error over that of dense bf16", worst, 1.25))
        claims.append(at_most(f"V={v}: {name}: log-prob, worst absolute error", mine["logp max"], 2e-4))
    if full_size:
        for name in ("logprob", "policy loss, fp32 sums"):
            mine = rows[name]["errors"]
            claims.append(at_most(f"V={v}: {name}: gradients", max(mine["d_hidden"], mine["d_weight"]), 2.5e-3))
    return claims


def main() -> int:
    options = arguments(__doc__ or "")
    n, d, vocabularies = (8192, 4096, [128_256, 151_936]) if GPU else (96, 64, [1000, 1187])
    if options.quick and GPU:
        del vocabularies[1:]
    figures: dict[str, Any] = {"tokens": n, "hidden": d, "gpu": torch.cuda.get_device_name() if GPU else None}
    claims: list[Claim] = []
    for v in vocabularies:
        data = make_data(n, v, d, "cuda" if GPU else "cpu")
        figures[f"V={v}"] = found = measure(data, options.quick)
        show(v, found)
        claims += (speed_claims(v, found) if GPU else []) + accuracy_claims(v, found, GPU)
        del data
    packages = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    return report("logprob_head", figures, claims, json_file=options.json, packages=packages)


if __name__ == "__main__":
    sys.exit(main())
