"""Memory and speed levers of the decoder layers: what is kept for backward, where, and what is compiled.

Each wraps the forward of single layers, inside FSDP2's unit, in this order from the inside: compile, recompute,
offload. So compiled code is what is recomputed, and of a recomputed layer only its input is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from asyncrl.config.levers import recomputed_every
from asyncrl.config.schema import TrainerConfig
from asyncrl.training.attention import stay_uncompiled
from asyncrl.training.exact import exact
from asyncrl.training.model import layers
from asyncrl.weights.gather import local_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALLEST_BYTES = 1 << 20  # smaller activations are not worth a transfer of their own

# What a selective recomputation keeps: matrix products, attention, and the sums over tensor-parallel ranks.
KEPT = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_attention_math",
    "torch_attn::_varlen_attn",
    "_c10d_functional::all_reduce",
    "_c10d_functional::wait_tensor",
)

Forward = Callable[..., Any]


Remember = Callable[[], AbstractContextManager[Any]]  # called in a forward: the context in which to repeat it


def pull(
    lm: PreTrainedModel,
    trainer: TrainerConfig,
    compute: torch.dtype,
    device: torch.device,
    remember: Remember = nullcontext,
) -> None:
    """Applies the levers that ``trainer`` sets to the decoder layers of ``lm``, in place, before they are sharded."""
    choice = trainer.activation_checkpointing
    every = recomputed_every(choice)
    if choice == "none" and not (trainer.compile or trainer.activation_offload):
        return
    if trainer.compile:
        stay_uncompiled(lm)
    for index, layer in enumerate(layers(lm)):
        if trainer.compile:
            layer.forward = compiled(layer.forward)  # type: ignore[method-assign]
        if choice == "selective" or (every and index % every == 0):
            layer.forward = recomputed(  # type: ignore[method-assign]
                layer.forward, compute, choice == "selective", remember
            )
        if trainer.activation_offload:
            layer.forward = Offloaded(layer, layer.forward, device)  # type: ignore[method-assign]


def compiled(forward: Forward, backend: str = "inductor") -> Forward:
    """The layer by torch.compile, for any number of tokens; attention by document stays as it is."""
    return torch.compile(forward, dynamic=True, backend=backend)


def recomputed(forward: Forward, compute: torch.dtype, selective: bool, remember: Remember = nullcontext) -> Forward:
    """Recomputes the layer's activations in backward. Not transformers' own switch: that one needs train mode."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = nullcontext()
        again: AbstractContextManager[Any] = nullcontext()
        if selective:
            first, again = create_selective_checkpoint_contexts(_policy)
        # The first forward runs in the caller's context for exactness, the recomputed one needs its own.
        return first, _both(_both(exact(compute), remember()), again)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)

    return run


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op.name().partition(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class Offloaded:
    """A layer whose activations wait for backward in host memory.

    Copies run on the stream that computes, so that no tensor can be freed or overwritten while one is under way
    (torchtune #1867 had that race); the price is that the GPU waits for them. Weights stay where they are: FSDP2 frees
    them itself.
    """

    def __init__(self, layer: nn.Module, forward: Forward, device: torch.device) -> None:
        self._layer, self._forward, self._device = layer, forward, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = {local_of("", p).tensor.untyped_storage().data_ptr() for p in self._layer.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, weights), self._unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, weights: set[int], x: Tensor) -> Tensor | Waiting:
        stays = x.nbytes < SMALLEST_BYTES or type(x) is not Tensor or x.device.type != self._device.type
        return x if stays or x.untyped_storage().data_ptr() in weights else Waiting(x)

    def _unpack(self, packed: Tensor | Waiting) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.back(self._device)


class Waiting:
    """An activation in host memory.

    It comes back with the strides that it had: kernels keep what they have padded for alignment (a mask's rows, say)
    as views, and refuse to read it packed closely. What an expanded dimension repeats is copied once.
    """

    def __init__(self, x: Tensor) -> None:
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        loose = span > 2 * x.numel()  # a part of something larger: its gaps would be copied too
        x = x.contiguous() if loose else x
        self._shape, self._stride = x.shape, x.stride()
        flat = x.as_strided((x.numel() if loose else span,), (1,))
        self._kept = torch.empty(flat.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        self._kept.copy_(flat, non_blocking=True)

    def back(self, device: torch.device) -> Tensor:
        return self._kept.to(device, non_blocking=True).as_strided(self._shape, self._stride)
