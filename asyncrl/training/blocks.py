"""Which part of a parameter this rank holds, for any mesh: FSDP2, HSDP, tensor parallelism and their products.

A part is a block: first index and size along each dimension of the whole tensor. Ranks along a replicated mesh
dimension hold the same block; they are numbered, so that each block can be written by one of them, in turn.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from asyncrl.training.errors import CheckpointError
from asyncrl.weights.gather import Block


def block_of(name: str, p: Tensor) -> Block:
    """This rank's block of ``p``; a plain tensor is held whole.

    Raises :class:`CheckpointError` if the placements do not describe a block, or not the one that is held.
    """
    shape = tuple(p.shape)
    start, size = [0] * len(shape), list(shape)
    if not isinstance(p, DTensor):
        return Block(tuple(start), tuple(size))
    mesh, coordinate = p.device_mesh, _coordinate(p)
    for mesh_dim in _order(name, p.placements):
        d = p.placements[mesh_dim].dim  # type: ignore[attr-defined]
        chunk = -(-size[d] // mesh.size(mesh_dim))  # as torch.chunk cuts
        first = min(coordinate[mesh_dim] * chunk, size[d])
        start[d] += first
        size[d] = min(chunk, size[d] - first)
    block = Block(tuple(start), tuple(size))
    held = tuple(p.to_local().shape)
    if held != block.size and (block.numel or p.to_local().numel()):
        raise CheckpointError(f"{name} of shape {shape}, placed as {p.placements}: {held} held, {block.size} expected")
    return block


def replica_of(p: Tensor, rank: int, world_size: int) -> tuple[int, int]:
    """(number of this rank among those that hold the same block, how many they are). A plain tensor: all ranks do."""
    if not isinstance(p, DTensor):
        return rank, world_size
    number, count = 0, 1
    for at, placement, size in zip(_coordinate(p), p.placements, p.device_mesh.shape, strict=True):
        if placement.is_replicate():
            number, count = number * size + at, count * size
    return number, count


def _coordinate(p: DTensor) -> list[int]:
    coordinate = p.device_mesh.get_coordinate()
    if coordinate is None:
        raise CheckpointError("a parameter lies on a mesh that this rank is not part of")
    return list(coordinate)


def _order(name: str, placements: tuple[Placement, ...]) -> list[int]:
    """Mesh dimensions that shard, in the order in which they cut.

    From left to right; but FSDP2 over an already split dimension (torch's _StridedShard) cuts what was left, after it.
    """
    plain: list[int] = []
    strided: list[int] = []
    for mesh_dim, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim") or placement.is_partial():
            raise CheckpointError(f"{name} is placed as {placement}: only shards and replicas can be saved")
        (strided if hasattr(placement, "split_factor") else plain).append(mesh_dim)
    return plain + strided[::-1]
