"""What benchmarks.logprob_head compares with: bare products, torch.compile, and the heads of other projects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.matmul import chunks

# One forward and backward: (logp_N, entropy_N or None, d_hidden, d_weight).
Action = Callable[[], tuple[Tensor, Tensor | None, Tensor, Tensor]]


@dataclass(frozen=True)
class Data:
    """bf16 operands as of a language model, and upstream gradients of log-prob and entropy for each token."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    g_logp: Tensor
    g_entropy: Tensor


def make_data(n: int, v: int, d: int, device: str, seed: int = 1234) -> Data:
    """Logits with a Zipf prior and one boosted token each, as a language model has them; targets drawn from them.

    At N = 8192, V = 128,256 and D = 4096 the mean entropy is about 1.5 nat.
    """
    g = torch.Generator(device=device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=g)

    hidden, weight = random(n, d), random(v, d) * (3.0 / math.sqrt(d))
    rank = torch.randperm(v, device=device, generator=g)
    prior = -1.2 * (rank + 10.0).log()
    boosted = torch.multinomial(prior.exp(), n, replacement=True, generator=g)
    by = (8 + 16 * torch.rand(n, 1, device=device, generator=g)) / 3.0
    hidden += by * torch.nn.functional.normalize(weight[boosted], dim=1)
    hidden[:, 0], weight[:, 0] = 8.0, prior / 8.0
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    target = torch.empty(n, dtype=torch.int64, device=device)
    for rows in chunks(n, 512):
        p = (hidden[rows].float() @ weight.float().t()).softmax(-1)
        target[rows] = torch.multinomial(p, 1, generator=g)[:, 0]
    return Data(hidden.requires_grad_(), weight.requires_grad_(), target, random(n), 0.1 * random(n))


@torch.no_grad()
def reference(data: Data) -> dict[str, Tensor]:
    """log-prob, entropy and gradients in float64, for upstream gradients of log-prob alone and of both."""
    n, (v, d), device = len(data.hidden), data.weight.shape, data.hidden.device
    weight = data.weight.double()
    out = {name: torch.empty(n, dtype=torch.float64, device=device) for name in ("logp", "entropy")}
    for which in ("logp", "both"):
        out[f"d_hidden {which}"] = torch.empty(n, d, dtype=torch.float32, device=device)
        out[f"d_weight {which}"] = torch.zeros(v, d, dtype=torch.float32, device=device)
    for rows in chunks(n, 256):
        h, y = data.hidden[rows].double(), data.target[rows, None]
        log_p = (h @ weight.t()).log_softmax(-1)
        p = log_p.exp()
        entropy = -(p * log_p).sum(-1, keepdim=True)
        out["logp"][rows], out["entropy"][rows] = log_p.gather(1, y)[:, 0], entropy[:, 0]
        dz = p.neg().scatter_add_(1, y, torch.ones_like(entropy)) * data.g_logp[rows, None]
        both = dz - data.g_entropy[rows, None] * p * (log_p + entropy)
        for which, du in (("logp", dz), ("both", both)):
            out[f"d_hidden {which}"][rows] = (du @ weight).float()
            out[f"d_weight {which}"] += (du.t() @ h).float()
    return out


def floors(data: Data) -> dict[str, Callable[[], Any]]:
    """One, three and four bare products (with the second projection), in bf16 with bf16 results."""
    (n, _), v = data.hidden.shape, len(data.weight)
    h, w = data.hidden.detach(), data.weight.detach()
    logits = torch.empty(n, v, dtype=h.dtype, device=h.device)
    gradient = torch.randn_like(logits)
    d_hidden, d_weight = torch.empty_like(h), torch.empty_like(w)

    def project() -> None:
        torch.mm(h, w.t(), out=logits)

    def three() -> None:
        project()
        torch.mm(gradient, w, out=d_hidden)
        torch.mm(gradient.t(), h, out=d_weight)

    def four() -> None:
        project()
        three()

    return {"1 product": project, "3 products": three, "4 products": four}


def by_autograd(data: Data, head: Callable[[], tuple[Tensor, Tensor | None]]) -> Action:
    """Forward and backward of a head that gives log-probs and possibly entropies."""

    def run() -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        logp, entropy = head()
        outputs = [logp] if entropy is None else [logp, entropy]
        upstream = [g.to(x.dtype) for g, x in zip((data.g_logp, data.g_entropy), outputs, strict=False)]
        d_hidden, d_weight = torch.autograd.grad(outputs, [data.hidden, data.weight], upstream)
        return logp.detach(), None if entropy is None else entropy.detach(), d_hidden, d_weight

    return run


def naive(data: Data) -> tuple[Tensor, Tensor]:
    """bf16 logits, fp32 softmax: what a trainer without a head of its own does."""
    logp = (data.hidden @ data.weight.t()).float().log_softmax(-1)
    return logp.gather(1, data.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def peers(data: Data) -> dict[str, Action | str]:
    """By name, an action, or the reason for which there is none."""
    out: dict[str, Action | str] = {}
    if data.hidden.is_cuda:
        out["torch.compile"] = by_autograd(data, torch.compile(lambda: naive(data), dynamic=False))
    else:
        out["torch.compile"] = "left out: compared on a GPU only"
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger() -> tuple[Tensor, None]:
            loss = Liger.apply(
                data.hidden, data.weight, data.target, None, None, -100, 0.0, 0.0, "none", None, False, None
            )
            return -loss[0], None

        out["liger"] = by_autograd(data, liger)
    except ImportError as e:
        out["liger"] = f"absent: {e}"
    try:
        from cut_cross_entropy import linear_cross_entropy

        def cut() -> tuple[Tensor, None]:
            return -linear_cross_entropy(data.hidden, data.weight, data.target, reduction="none"), None

        out["cut-cross-entropy"] = by_autograd(data, cut)
    except ImportError as e:
        out["cut-cross-entropy"] = f"absent: {e}"
    return out
