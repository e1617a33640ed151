"""Where a head's weight lies when its vocabulary is sharded, and the collectives of the log-prob head.

A rank holds rows ``start .. start + len(weight)`` of the (V, D) weight. Shards follow ``torch.chunk``, as DTensor's
``Shard(0)`` does: all of ``ceil(V / ranks)`` rows but the last ones, which may be shorter or empty.

torch's ``loss_parallel`` is not used: inside it only ``F.cross_entropy`` has right gradients, those of log-probs and
entropies are silently wrong (pytorch issue 190746), and it needs the logits of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

Mesh = DeviceMesh | dist.ProcessGroup


@dataclass(frozen=True)
class VocabShard:
    """``start`` is this rank's first vocabulary row, ``widest`` the number of rows of the largest shard.

    ``group`` are the ranks that share the vocabulary, None if this rank has all of it.
    """

    start: int
    widest: int
    group: dist.ProcessGroup | None = None

    def maximum(self, x: Tensor) -> Tensor:
        """Element-wise maximum over the ranks, in place."""
        if self.group is not None and x.numel():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None and x.numel():
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x


def shard_bounds(vocabulary: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first, end) of ``rank``'s vocabulary rows, as ``torch.chunk`` and DTensor cut them.

    >>> [shard_bounds(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-vocabulary // ranks)
    return min(vocabulary, rank * size), min(vocabulary, (rank + 1) * size)


def localise(
    weight_VD: Tensor, bias_V: Tensor | None, mesh: Mesh | None, vocab_size: int | None
) -> tuple[Tensor, Tensor | None, VocabShard]:
    """This rank's part of weight and bias, differentiable, and where it lies.

    A DTensor says itself how it is sharded. A plain weight is whole without ``mesh``, and with one it is this rank's
    rows of ``vocab_size``. Raises :class:`ValueError` for a layout that the head cannot work on.
    """
    if isinstance(weight_VD, DTensor):
        shard = _shard_of(weight_VD)
        if isinstance(bias_V, DTensor):
            if bias_V.placements != weight_VD.placements:
                raise ValueError(f"the head's bias is {bias_V.placements}, its weight {weight_VD.placements}")
            bias_V = bias_V.to_local()
        return weight_VD.to_local(), bias_V, shard
    group = None if mesh is None else _group(mesh)
    if group is None:
        return weight_VD, bias_V, VocabShard(0, len(weight_VD))
    if vocab_size is None:
        raise ValueError("with a mesh, give the head's weight as a DTensor, or this rank's rows and vocab_size")
    ranks = dist.get_world_size(group)
    start, end = shard_bounds(vocab_size, ranks, dist.get_rank(group))
    if len(weight_VD) != end - start:
        raise ValueError(
            f"rank {dist.get_rank(group)} of {ranks} has rows {start} to {end} of a vocabulary of {vocab_size}, "
            f"and its weight has {len(weight_VD)} rows"
        )
    return weight_VD, bias_V, VocabShard(start, -(-vocab_size // ranks), group)


def replicated(hidden: Tensor) -> Tensor:
    """The local tensor of hidden states that every rank has; raises :class:`ValueError` if they are sharded."""
    if not isinstance(hidden, DTensor):
        return hidden
    if not all(isinstance(p, Replicate) for p in hidden.placements):
        raise ValueError(f"the head needs whole hidden states on every rank, not {hidden.placements}")
    return hidden.to_local()


def _shard_of(weight: DTensor) -> VocabShard:
    sharded = [i for i, p in enumerate(weight.placements) if not isinstance(p, Replicate)]
    if not sharded:
        return VocabShard(0, len(weight))
    mesh, i = weight.device_mesh, sharded[0]
    if len(sharded) > 1 or weight.placements[i] != Shard(0):
        raise ValueError(
            f"the head's weight must be sharded over the vocabulary on one mesh dimension, not {weight.placements}"
        )
    start, _ = shard_bounds(len(weight), mesh.size(i), mesh.get_local_rank(i))
    return VocabShard(start, -(-len(weight) // mesh.size(i)), mesh.get_group(i) if mesh.size(i) > 1 else None)


def _group(mesh: Mesh) -> dist.ProcessGroup | None:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"give one dimension of the mesh, for example mesh['tp'], not all of {mesh}")
        mesh = mesh.get_group()
    return mesh if dist.get_world_size(mesh) > 1 else None
