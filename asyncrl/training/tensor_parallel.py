"""Tensor parallelism: each rank of the ``tp`` mesh computes a part of every layer on the same tokens.

The plan is transformers' own (``base_model_tp_plan`` of the config, ``_tp_plan`` of the class), its styles:

==================================  ==================================================================================
``colwise``                         rows of the weight and of the bias; input whole, output this rank's features
``rowwise``                         columns of the weight; input this rank's features, outputs summed over ranks
``rowwise_split_input``             as rowwise, of a whole input, of which each rank takes its features
``colwise_gather_output``           as colwise, outputs joined again; of the head only the weight is split
``replicated_with_grad_allreduce``  whole on every rank, each seeing its own heads: gradients are summed over ranks
==================================  ==================================================================================

Everything between them (the residual stream, its norms) is whole and the same on all ranks, gradients included. The
embedding is split by vocabulary like the head, to which it may be tied (transformers adds ``embedding_rowwise`` then).

Every parameter becomes a DTensor on the ``tp`` mesh, so that FSDP2 over the other dimensions, the weight push and
checkpoints see from its placements what a rank holds. The computation itself is on local tensors: attention by document
sees this rank's heads and needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from asyncrl.config.parallel import STYLES, check_styles
from asyncrl.training.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def split(lm: PreTrainedModel, mesh: DeviceMesh, linear: Linear = F.linear) -> None:
    """Splits ``lm`` over the 1-D ``mesh`` in place; parameters may be on the meta device.

    ``linear`` computes the products of the split layers. Raises :class:`ModelError` for a model without a plan, with a
    style that is not supported, or whose heads or MLP do not divide.
    """
    styles = plan_of(lm)
    _check_sizes(lm, mesh.size())
    ends = _split_vocabulary(lm, mesh)
    entries: dict[str, Entry] = {}
    for name, module in list(lm.named_modules()):
        style = styles.get(_pattern(name))
        if module in ends:
            continue
        if style is None:
            if module._parameters:
                _replicate(module, mesh, lambda p: p)
        elif style == "replicated_with_grad_allreduce":
            _replicate(module, mesh, SumGradient(mesh))
        elif type(module) is not nn.Linear:
            raise ModelError(f"{name} is to be split as {style} and is a {type(module).__name__}, not a linear layer")
        elif style in ("rowwise", "rowwise_split_input"):
            entry = entries.setdefault(name.rpartition(".")[0], Entry(mesh))
            _rowwise(module, mesh, linear, entry, cut=style == "rowwise_split_input")
        else:
            entry = entries.setdefault(name.rpartition(".")[0], Entry(mesh))
            _colwise(module, mesh, linear, entry, gather=style == "colwise_gather_output")


def plan_of(lm: PreTrainedModel) -> dict[str, str]:
    """Module name (``*`` for layer numbers) -> style. Raises :class:`ModelError` if there is none that can be done."""
    config = lm.config.get_text_config()
    base = dict(getattr(config, "base_model_tp_plan", None) or {})
    if not base:
        raise ModelError(f"parallel.tp: transformers has no plan for splitting {config.model_type} over ranks")
    for problem in check_styles(config.model_type, base):
        raise ModelError(f"{problem.key}: {problem.message}")
    styles = {f"{lm.base_model_prefix}.{name}": style for name, style in base.items()}
    own = getattr(type(lm), "_tp_plan", None) or {}
    return styles | {name: style for name, style in own.items() if style in STYLES}


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _check_sizes(lm: PreTrainedModel, ranks: int) -> None:
    config = lm.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None)
        if isinstance(size, int) and size % ranks:
            raise ModelError(f"parallel.tp={ranks} does not divide the model's {key}={size}")


# ---- parameters ---------------------------------------------------------------------------------------------------


def _place(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    p = module._parameters[name]
    if p is not None:
        whole = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None)
        module._parameters[name] = nn.Parameter(whole, requires_grad=p.requires_grad)


def local(x: Any) -> Any:
    """The part of a tensor that lives on this rank; differentiable. None stays None."""
    return x.to_local() if isinstance(x, DTensor) else x


def _replicate(module: nn.Module, mesh: DeviceMesh, adjust: Callable[[Tensor], Tensor]) -> None:
    """Whole parameters, which the module's own forward sees as plain tensors that went through ``adjust``."""
    for name in module._parameters:
        _place(module, name, mesh, Replicate())
    forward = module.forward

    def on_local(*args: Any, **kwargs: Any) -> Any:
        kept = module._parameters
        module._parameters = {n: None if p is None else adjust(local(p)) for n, p in kept.items()}  # type: ignore[misc]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters = kept

    module.forward = on_local  # type: ignore[method-assign]


def _colwise(module: nn.Linear, mesh: DeviceMesh, linear: Linear, entry: Entry, gather: bool) -> None:
    if gather and module.out_features % mesh.size():
        raise ModelError(f"parallel.tp={mesh.size()} does not divide the {module.out_features} outputs of a layer")
    _place(module, "weight", mesh, Shard(0))
    _place(module, "bias", mesh, Shard(0))

    def forward(x: Tensor) -> Tensor:
        out = linear(entry(x), local(module.weight), local(module.bias))
        return GatherFeatures.apply(out, mesh) if gather else out

    module.forward = forward  # type: ignore


def _rowwise(module: nn.Linear, mesh: DeviceMesh, linear: Linear, entry: Entry, cut: bool) -> None:
    if cut and module.in_features % mesh.size():
        raise ModelError(f"parallel.tp={mesh.size()} does not divide the {module.in_features} inputs of a layer")
    _place(module, "weight", mesh, Shard(1))
    _place(module, "bias", mesh, Replicate())

    def forward(x: Tensor) -> Tensor:
        entry.leave()
        x = CutFeatures.apply(x, mesh) if cut else x
        out = SumForward.apply(linear(x, local(module.weight), None), mesh)
        return out if module.bias is None else out + local(module.bias)

    module.forward = forward  # type: ignore


# ---- embedding and head -------------------------------------------------------------------------------------------


def _split_vocabulary(lm: PreTrainedModel, mesh: DeviceMesh) -> set[nn.Module]:
    """Splits embedding and head by rows, together if they are tied; returns both."""
    embedding, head = lm.get_input_embeddings(), lm.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    tied = head.weight is embedding.weight
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        raise ModelError("an embedding with max_norm, scale_grad_by_freq or sparse gradients cannot be split")
    _place(embedding, "weight", mesh, Shard(0))
    if tied:
        head.weight = embedding.weight
    else:
        _place(head, "weight", mesh, Shard(0))
    if head.bias is not None:
        _place(head, "bias", mesh, Shard(0))
    _embed_split(embedding, mesh)
    return {embedding, head}


def _embed_split(module: nn.Embedding, mesh: DeviceMesh) -> None:
    """Each rank looks up the tokens whose rows it holds; the others' embeddings are zero in the sum."""
    first = rows_of(module.num_embeddings, mesh)
    padding = None if module.padding_idx is None else module.padding_idx - first

    def forward(token_1T: Tensor) -> Tensor:
        weight = local(module.weight)
        index = token_1T - first
        here = (index >= 0) & (index < len(weight))
        pad = padding if padding is not None and 0 <= padding < len(weight) else None
        if len(weight):
            out = F.embedding(torch.where(here, index, 0), weight, pad)
            out = torch.where(here[..., None], out, 0.0)
        else:  # more ranks than rows; the graph must still reach the weight
            out = weight.new_zeros(*token_1T.shape, weight.shape[1]) + weight.sum()
        out = SumForward.apply(out, mesh)
        scale = getattr(module, "embed_scale", None)  # Gemma 3 multiplies in the embedding's own forward
        return out if scale is None else out * scale.to(out.dtype)

    module.forward = forward  # type: ignore


def rows_of(vocabulary: int, mesh: DeviceMesh) -> int:
    """First row of the vocabulary that this rank holds; every rank but the last ones holds ceil(V / ranks)."""
    return min(mesh.get_local_rank() * -(-vocabulary // mesh.size()), vocabulary)


# ---- collectives of the graph -------------------------------------------------------------------------------------


def _sum(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", mesh))


def _join(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Equal pieces of all ranks behind each other along dimension 0."""
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor  # its name since and before 2.13
    return funcol.wait_tensor(gather(x, 0, mesh))


class Entry:
    """Into a split region: the input itself, whose gradient is summed over ranks.

    The layers that share an input (queries, keys, values; gate and up) share its one sum in backward. The layer that
    ends the region lets go of it.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not x:
            self._last = x, SumBackward.apply(x, self._mesh)
        return self._last[1]

    def leave(self) -> None:
        self._last = None


class SumGradient:
    """For a weight that every rank applies to its own heads."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __call__(self, weight: Tensor) -> Tensor:
        out: Tensor = SumBackward.apply(weight, self._mesh)
        return out


class SumBackward(torch.autograd.Function):
    """The identity; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum(grad, ctx.mesh), None


class SumForward(torch.autograd.Function):
    """The sum over ranks; its gradient is the same on all of them already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        return _sum(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class CutFeatures(torch.autograd.Function):
    """This rank's piece of the last dimension of what all ranks have; the pieces of the gradient are joined again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, size = mesh, x.shape[-1] // mesh.size()
        return x.narrow(-1, mesh.get_local_rank() * size, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return torch.cat(_join(grad.contiguous(), ctx.mesh).chunk(ctx.mesh.size()), dim=-1), None


class GatherFeatures(torch.autograd.Function):
    """Equal pieces of the last dimension joined; the gradient, the same on all ranks, is cut again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh, ctx.size = mesh, x.shape[-1]
        return torch.cat(_join(x.contiguous(), mesh).chunk(mesh.size()), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.narrow(-1, ctx.mesh.get_local_rank() * ctx.size, ctx.size), None
