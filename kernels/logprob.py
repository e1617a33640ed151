"""Log-prob, entropy and log-sum-exp of selected tokens, straight from hidden states.

The logits of all tokens never exist: forward keeps softmax statistics of chunks, backward computes the chunks again.
Saved are hidden states, targets, log-sum-exp and entropy (and weight, bias and temperatures, which the caller has).
Sums over hidden size, vocabulary and tokens are fp32 (float64 for float64), and logits are never rounded to bf16.

Two backends compute the same: chunked torch (:mod:`kernels.logprob_torch`, which has the formulas) and Triton
(:mod:`kernels.logprob_triton`, bf16 and fp16 on a GPU). Either works on a vocabulary sharded over ranks: forward makes
two collectives of a few numbers a token (a maximum, then a packed sum), backward one all-reduce of hidden's gradient.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from kernels import logprob_torch
from kernels.logprob_torch import Head, Upstream
from kernels.vocab_parallel import Mesh, localise, replicated

Backend = Literal["auto", "torch", "triton"]
TOKEN_CHUNK = 4096
VOCAB_CHUNK = 8192


def selected_logprob(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: float | Tensor = 1.0,
    mesh: Mesh | None = None,
    *,
    bias_V: Tensor | None = None,
    softcap: float | None = None,
    mask_N: Tensor | None = None,
    vocab_size: int | None = None,
    token_chunk: int = TOKEN_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob_N, entropy_N, lse_N) in nat, fp32 (float64 for float64 inputs), differentiable in hidden, weight, bias.

    Of ``softmax(z)`` with ``z = c(hidden @ weight.T + bias) / temperature``, where ``c(u) = softcap tanh(u / softcap)``
    (Gemma 2, arXiv 2408.00118, section 2) or u.

    - ``hidden_ND``, ``weight_VD``: the same floating dtype. A weight without ``requires_grad`` costs no product for it.
    - ``target_N``: int64 token ids. One that is not in the vocabulary gets a log-prob of NaN.
    - ``temperature_N``: a number, or one per token; positive (on a GPU a tensor is not looked at: NaN or inf results).
    - ``mask_N``: bool; other tokens are taken out before the projection and get zeros. On a GPU this waits for the
      device, which a caller that takes its rows out itself avoids.
    - ``mesh``: one mesh dimension, or a process group, whose ranks share the vocabulary and all have the same tokens.
      ``weight_VD`` and ``bias_V`` are then this rank's rows of ``vocab_size`` (cut as ``torch.chunk`` does), or
      DTensors, which need neither argument. The outputs are the same on every rank.
    - ``token_chunk``, ``vocab_chunk``: the torch backend holds ``token_chunk * vocab_chunk`` logits, twice in backward;
      the Triton backend ``N * vocab_chunk`` in hidden's dtype, in backward only. 2048 is lean, 8192 is fast.

    Raises :class:`ValueError` for shapes, dtypes or layouts that do not fit.
    """
    hidden_ND = replicated(hidden_ND)
    weight, bias, shard = localise(weight_VD, bias_V, mesh, vocab_size)
    if mask_N is not None:
        check(hidden_ND, weight, bias, target_N, temperature_N, softcap, mask_N)
        rows = mask_N.nonzero()[:, 0]
        if isinstance(temperature_N, Tensor):
            temperature_N = temperature_N[rows]
        hidden_ND, target_N = hidden_ND.index_select(0, rows), target_N[rows]
    check(hidden_ND, weight, bias, target_N, temperature_N, softcap)
    head = Head(
        hidden_ND, weight, bias, target_N, temperature_N, softcap, shard, max(1, token_chunk), max(1, vocab_chunk)
    )
    found = _SelectedLogprob.apply(hidden_ND, weight, bias, head, implementation(backend, hidden_ND))
    if mask_N is None:
        return found
    return tuple(x.new_zeros(len(mask_N)).index_copy(0, rows, x) for x in found)  # type: ignore[return-value]


def implementation(backend: Backend, hidden: Tensor) -> ModuleType:
    """The module that computes. ``auto`` is Triton for 16-bit operands on a GPU that its tiles are made for.

    Raises :class:`ValueError` for an unknown name, or Triton where it is not installed.
    """
    if wants_triton(backend, hidden):
        from kernels import logprob_triton

        if backend == "triton" or logprob_triton.serves(hidden.device):
            return logprob_triton
    return logprob_torch


def wants_triton(backend: Backend, hidden: Tensor) -> bool:
    """Whether Triton is asked for, or in question; raises :class:`ValueError` as :func:`implementation` does."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown backend {backend!r}; choose auto, torch or triton")
    installed = find_spec("triton") is not None
    if backend == "triton" and not installed:
        raise ValueError("backend='triton', and triton is not installed; choose auto or torch")
    half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16)
    return backend == "triton" or (backend == "auto" and half and installed)


def check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float | Tensor,
    softcap: float | None,
    mask: Tensor | None = None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden (N, D) and weight (V, D) do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; the head needs one dtype")
    vectors = {"target": target, "mask": mask, "temperature": temperature if isinstance(temperature, Tensor) else None}
    for name, vector in vectors.items():
        if vector is not None and vector.shape != hidden.shape[:1]:
            raise ValueError(f"{name} must be ({len(hidden)},), one a token, is {tuple(vector.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({len(weight)},), one a vocabulary row, is {tuple(bias.shape)}")
    if isinstance(temperature, Tensor):
        positive = temperature.is_cuda or bool((temperature > 0).all())
    else:
        positive = temperature > 0
    if not positive:
        raise ValueError(f"temperature must be positive, not {temperature}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None, not {softcap}")


class _SelectedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, backend: ModuleType
    ) -> tuple[Tensor, Tensor, Tensor]:
        logp, entropy, lse = backend.statistics(head).finish(head)
        each = head.temperature if isinstance(head.temperature, Tensor) else None
        # Through autograd and not as attributes: what hooks on saved tensors move away must not be kept here.
        ctx.save_for_backward(hidden, weight, bias, head.target_N, each, lse, entropy)
        ctx.settings = (head.temperature if each is None else None, head.softcap, head.shard, head.token_chunk)
        ctx.vocab_chunk, ctx.backend = head.vocab_chunk, backend
        ctx.set_materialize_grads(False)
        return logp, entropy, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if all(g is None for g in grads):
            return None, None, None, None, None
        hidden, weight, bias, target, each, lse, entropy = ctx.saved_tensors
        one, softcap, shard, token_chunk = ctx.settings
        temperature = one if each is None else each
        head = Head(hidden, weight, bias, target, temperature, softcap, shard, token_chunk, ctx.vocab_chunk)
        found = ctx.backend.gradients(head, lse, entropy, Upstream(*grads), ctx.needs_input_grad[:3])
        if found.hidden is not None:
            found.hidden = shard.sum(found.hidden).to(hidden.dtype)
        return found.hidden, found.weight, found.bias, None, None
