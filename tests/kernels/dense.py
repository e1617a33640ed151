"""The head as one dense float64 expression, and problems to compare with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CASES: dict[str, dict[str, Any]] = {  # arguments of ``problem``
    "plain": {},
    "temperature per token": {"per_token": True},
    "bias": {"bias": True},
    "soft-cap": {"softcap": 2.0},
    "all": {"per_token": True, "bias": True, "softcap": 3.0},
}


class Problem(NamedTuple):
    """A head's inputs; ``temperature`` is a number or one per token."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    temperature: Any = 1.0
    bias: Tensor | None = None
    softcap: float | None = None

    def inputs(self) -> list[Tensor]:
        """What has a gradient."""
        return [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])

    def options(self) -> dict[str, Any]:
        return {"bias_V": self.bias, "softcap": self.softcap}

    def double(self) -> Problem:
        """The same values in float64."""
        each = [
            x.detach().double().requires_grad_() if isinstance(x, Tensor) and x.dtype.is_floating_point else x
            for x in self
        ]
        if isinstance(each[3], Tensor):
            each[3] = each[3].detach()
        return Problem(*each)


def problem(
    n: int = 11,
    v: int = 23,
    d: int = 6,
    dtype: torch.dtype = torch.float64,
    *,
    scale: float = 1.0,
    per_token: bool = False,
    bias: bool = False,
    softcap: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int, by: float = 1.0) -> Tensor:
        x = (by * torch.randn(*shape, generator=g, dtype=torch.float64)).to(dtype)
        return x.to(device).requires_grad_()

    hidden, weight = random(n, d, by=scale), random(v, d)
    target = torch.randint(0, v, (n,), generator=g).to(device)
    temperature = (0.5 + torch.rand(n, generator=g)).to(device) if per_token else 1.0
    return Problem(hidden, weight, target, temperature, random(v) if bias else None, softcap)


def logits(p: Problem) -> Tensor:
    z = p.hidden @ p.weight.t()
    z = z if p.bias is None else z + p.bias
    z = z if p.softcap is None else p.softcap * torch.tanh(z / p.softcap)
    return z / (p.temperature[:, None] if isinstance(p.temperature, Tensor) else p.temperature)


def dense(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, lse) in the dtype of the inputs."""
    z = logits(p)
    logp = z.log_softmax(-1)
    return logp.gather(1, p.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), z.logsumexp(-1)


def upstream(n: int, which: str = "logp entropy lse", device: str = "cpu") -> list[Tensor]:
    """Different gradients for the three outputs, zeros for those not in ``which``."""
    line = torch.linspace(-1, 2, n, dtype=torch.float64, device=device)
    each = {"logp": line, "entropy": 0.5 * line.flip(0), "lse": line.square() - 0.7}
    return [x if name in which else torch.zeros_like(x) for name, x in each.items()]


def weighted(outputs: tuple[Tensor, ...], which: str = "logp entropy lse") -> Tensor:
    up = upstream(len(outputs[0]), which, str(outputs[0].device))
    names = ("logp", "entropy", "lse")
    return sum((x * g.to(x.dtype)).sum() for name, x, g in zip(names, outputs, up, strict=True) if name in which)  # type: ignore[return-value]


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``, in float64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def results(p: Problem, outputs: tuple[Tensor, ...], which: str = "logp entropy lse") -> list[Tensor]:
    """The outputs and the gradients of their weighted sum."""
    return [*outputs, *torch.autograd.grad(weighted(outputs, which), p.inputs())]


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out
