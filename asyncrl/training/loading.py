"""Loading a model that no rank could hold: build without weights, shard, then read each rank's pieces.

    empty_policy   parameters on the meta device, which have shapes and no memory; buffers are real
    distribute     splits and shards them (asyncrl/training/sharding.py)
    read_weights   local shards get memory; each is read from the safetensors files, which are mapped, not loaded

At no time does a rank hold more than its shards and one piece of a tensor in the dtype of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from asyncrl.config.model_folder import weight_files
from asyncrl.training.attention import ATTENTION
from asyncrl.training.errors import ModelError
from asyncrl.training.lora import is_adapter
from asyncrl.training.model import Policy, prepare, read_config
from asyncrl.weights.gather import Block, local_of


class WithoutWeights(TorchFunctionMode):
    """Uninitialised tensors, which is what layers make their parameters of, go to the meta device.

    Buffers are computed from values (``arange``, ``tensor``) and stay real, which ``torch.device("meta")`` would lose.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def empty_policy(path: str | Path, dtype: torch.dtype = torch.float32, logprob_chunk: int = 4096) -> Policy:
    """The policy of a local Hugging Face folder without its weights, which are read when it is distributed.

    Raises :class:`ModelError` as :func:`asyncrl.training.model.load_policy` does.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(path)
    config = read_config(folder)
    try:
        with WithoutWeights():
            lm: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    except ValueError as e:
        raise ModelError(f"{folder}: transformers cannot make a causal LM of it: {e}") from e
    for module in lm.modules():
        for name, p in module._parameters.items():
            if p is not None and not p.is_meta:  # small ones, of ones or zeros: norms
                module._parameters[name] = torch.nn.Parameter(p.to("meta"), requires_grad=p.requires_grad)
    lost = [name for name, b in lm.named_buffers() if b.is_meta]
    if lost:
        raise ModelError(f"{folder}: cannot be loaded in shards, buffer {lost[0]} is not computed from the config")
    policy = prepare(lm, dtype, logprob_chunk)
    policy.unread = folder
    return policy


@torch.no_grad()
def read_weights(policy: Policy, device: torch.device, weights_device: torch.device | None = None) -> None:
    """Gives sharded meta parameters memory and their values from ``policy.unread``.

    They go to ``weights_device``, which defaults to ``device``, where buffers go.

    Raises :class:`ModelError` for a missing, leftover or misshapen tensor, and for a file that cannot be read.
    """
    folder = policy.unread
    assert folder is not None, "the policy has its weights"
    embedding, head = policy.lm.get_input_embeddings(), policy.lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    home = weights_device or device

    def give(t: Tensor) -> Tensor:
        if t.is_meta:
            return torch.empty_like(t, device=home)
        return t if isinstance(t, DTensor) else t.to(device)

    policy._apply(give)
    if tied and head.weight is not embedding.weight:  # parameters that are not sharded are made anew, each for itself
        head.weight = embedding.weight
    wanted: dict[str, Tensor] = {n: p for n, p in policy.lm.named_parameters() if not is_adapter(n)}
    wanted |= {n: b for n, b in policy.lm.named_buffers() if n in policy.lm.state_dict()}
    try:
        with ExitStack() as opened:
            files = [opened.enter_context(safe_open(f, framework="pt")) for f in weight_files(folder)]
            stored = {name: file for file in files for name in file.keys()}  # noqa: SIM118
            _check_names(policy, folder, set(wanted), set(stored))
            for name, tensor in wanted.items():
                _read(tensor, name, stored[name].get_slice(name), folder)
    except (OSError, ValueError, SafetensorError) as e:
        raise ModelError(f"{folder}: cannot read the weights: {e}") from e
    policy.unread = None


def _check_names(policy: Policy, folder: Path, wanted: set[str], stored: set[str]) -> None:
    tied = {name for name, _ in policy.lm.named_parameters(remove_duplicate=False)}
    ignored = getattr(policy.lm, "_keys_to_ignore_on_load_unexpected", None) or []
    missing, left = wanted - stored, stored - wanted - tied
    left = {name for name in left if not any(re.search(pattern, name) for pattern in ignored)}
    for kind, names in (("missing", missing), ("unexpected", left)):
        if names:
            raise ModelError(f"{folder}: {kind} keys in the weights: {sorted(names)[:5]}")


def _read(tensor: Tensor, name: str, stored: Any, folder: Path) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise ModelError(f"{folder}: {name} has shape {shape} in the weights and {tuple(tensor.shape)} in the config")
    mine = local_of(name, tensor)
    block = mine.block or Block((0,) * len(shape), shape)
    if block.numel:
        piece = stored[tuple(slice(s, s + n) for s, n in zip(block.start, block.size, strict=True))]
        mine.tensor.copy_(piece)
