"""Gathering sharded parameters to rank 0 bucket by bucket, as the byte stream of a ``Manifest``.

Every rank cuts the parameters into the same buckets of consecutive tensors. For each bucket a rank sends its blocks,
already in the wire dtype, as one message to rank 0, which puts them in place: a second full copy never exists.

A block is what one rank holds of a DTensor placed by Shard and Replicate; of replicas the lowest rank's is taken. A
plain tensor is taken from rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.weights.digest import tensor_digest
from asyncrl.weights.manifest import Manifest, TensorSpec

MAX_DIMS = 8


@dataclass(frozen=True)
class Block:
    """Where a rank's part of a tensor lies: first index and size along each dimension."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def of(self, whole: Tensor) -> Tensor:
        """The view of this block in the whole tensor."""
        return whole[tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))]

    def digest(self, block: Tensor, shape: Sequence[int]) -> Tensor:
        """The part of the whole tensor's digest that this block adds."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        offset = sum(s * n for s, n in zip(self.start, strides, strict=True))
        return tensor_digest(block, offset=offset, strides=strides)


@dataclass(frozen=True)
class Local:
    """One parameter as this rank holds it. ``tensor`` shares the parameter's storage."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    block: Block | None  # None: replicated in full on every rank
    change: Callable[[Tensor], Tensor] | None = None  # what travels is this of ``tensor``, made when it is read


def local_of(name: str, parameter: Tensor) -> Local:
    """Raises ``TypeError`` for a placement whose blocks are not rectangles."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Local(name, parameter.detach(), shape, None)
    block, local = block_of(parameter), parameter.to_local()
    if block is None or block.size != tuple(local.shape):
        raise TypeError(f"{name} is placed as {parameter.placements}; weights are gathered from Shard and Replicate")
    return Local(name, local.detach(), shape, block)


def block_of(parameter: DTensor) -> Block | None:
    """The block of the whole tensor that lies on this rank; None if it is no rectangle.

    FSDP2 over tensor parallelism cuts rows that are cut already. The placement of its dimension, which comes first in
    the mesh, is then _StridedShard: it is applied last.
    """
    start, size = [0] * parameter.ndim, list(parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "only ranks of its mesh hold a parameter"
    cuts = [
        (placement, at, parameter.device_mesh.size(dim))
        for dim, (placement, at) in enumerate(zip(parameter.placements, coordinate, strict=True))
        if not isinstance(placement, Replicate)
    ]
    for placement, at, pieces in sorted(cuts, key=lambda cut: isinstance(cut[0], _StridedShard)):
        if type(placement) not in (Shard, _StridedShard):
            return None
        dim = placement.dim  # type: ignore[attr-defined]
        most = -(-size[dim] // pieces)
        first = min(at * most, size[dim])
        start[dim] += first
        size[dim] = min(most, size[dim] - first)
    return Block(tuple(start), tuple(size))


class Gatherer:
    """The fixed plan of one model's gathers. Construct and use it on all ranks of ``group`` in the same order."""

    def __init__(
        self,
        locals_: Sequence[Local],
        wire_dtype: torch.dtype | None,
        *,
        rank: int = 0,
        world: int = 1,
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 16 << 20,
    ) -> None:
        """``wire_dtype`` None: each tensor travels in its own dtype. ``rank`` and ``world`` are those of ``group``."""
        self.rank, self.world, self._group = rank, world, group
        self.manifest = Manifest.of((p.name, wire_dtype or p.tensor.dtype, p.shape) for p in locals_)
        self.buckets = list(_buckets(self.manifest.specs, bucket_bytes))
        self._owners = self._exchange(locals_)
        over_gloo = world > 1 and dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if over_gloo or not locals_ else locals_[0].tensor.device
        self._digests: dict[int, Tensor] = {}

    def gather(self, bucket: range, locals_: Sequence[Local], out: Tensor | None = None) -> Tensor | None:
        """Rank 0: the bucket's bytes (uint8), in ``out`` or, without it, in a fresh buffer on the CPU.

        Other ranks take part and get None. ``out`` is complete once its device has done what was asked of it.
        """
        mine = {i: self._wire(i, locals_[i]) for i in bucket if self.rank in self._owners[i]}
        for i, block in mine.items():
            self._note_digest(i, block)
        if self.rank != 0:
            if mine:
                dist.send(_pack(mine.values()), self._global(0), group=self._group)
            return None
        origin = self.manifest.specs[bucket[0]].offset
        stream = out
        if stream is None:
            stream = torch.zeros(self.bucket_bytes(bucket), dtype=torch.uint8, device=self._device)
        for i, block in mine.items():
            self._place(stream, origin, i, 0, block)
        for peer in range(1, self.world):
            self._receive(peer, bucket, stream, origin)
        return stream.cpu() if out is None else out

    def bucket_bytes(self, bucket: range) -> int:
        """Length of a bucket's part of the stream, the padding up to the next bucket included."""
        specs = self.manifest.specs
        end = specs[bucket.stop].offset if bucket.stop < len(specs) else self.manifest.nbytes
        return end - specs[bucket.start].offset

    @property
    def largest(self) -> int:
        """Bytes of the largest bucket."""
        return max(map(self.bucket_bytes, self.buckets), default=0)

    def shard_digests(self) -> list[int] | None:
        """Digests of the bytes gathered since the last call, summed over shards; rank 0 gets them, others None."""
        sums = torch.stack([self._digests.get(i, _ZERO).cpu() for i in range(len(self.manifest.specs))])
        self._digests.clear()
        if self.world > 1:
            sums = sums.to(self._device)
            dist.reduce(sums, self._global(0), group=self._group)
        return [value % (1 << 64) for value in sums.tolist()] if self.rank == 0 else None

    # -- one rank's part ----------------------------------------------------------------------------------------------

    def _wire(self, i: int, local: Local) -> Tensor:
        tensor = local.change(local.tensor) if local.change else local.tensor
        return tensor.to(device=self._device, dtype=self.manifest.specs[i].dtype).contiguous()

    def _note_digest(self, i: int, block: Tensor) -> None:
        shape = self.manifest.specs[i].shape
        self._digests[i] = self._owners[i][self.rank].digest(block, shape)

    def _place(self, stream: Tensor, origin: int, i: int, owner: int, block: Tensor) -> None:
        whole = self.manifest.specs[i].view(stream, origin)
        place = self._owners[i][owner]
        place.of(whole).copy_(block.view(place.size))

    def _receive(self, peer: int, bucket: range, stream: Tensor, origin: int) -> None:
        sizes = {
            i: self._owners[i][peer].numel * self.manifest.specs[i].dtype.itemsize
            for i in bucket
            if peer in self._owners[i]
        }
        if not sizes:
            return
        packed = torch.empty(sum(_aligned(n) for n in sizes.values()), dtype=torch.uint8, device=self._device)
        dist.recv(packed, self._global(peer), group=self._group)
        begin = 0
        for i, size in sizes.items():
            block = packed[begin : begin + size].view(self.manifest.specs[i].dtype)
            self._place(stream, origin, i, peer, block)
            begin += _aligned(size)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _exchange(self, locals_: Sequence[Local]) -> list[dict[int, Block]]:
        """For every parameter, which rank contributes which block."""
        rows = torch.full((len(locals_), 1 + 2 * MAX_DIMS), -1, dtype=torch.int64)
        for row, local in zip(rows, locals_, strict=True):
            if local.block is None:
                continue
            row[0] = len(local.shape)
            row[1 : 1 + len(local.shape)] = torch.tensor(local.block.start, dtype=torch.int64)
            row[1 + MAX_DIMS : 1 + MAX_DIMS + len(local.shape)] = torch.tensor(local.block.size, dtype=torch.int64)
        tables = [rows]
        if self.world > 1:
            rows = rows if dist.get_backend(self._group) == "gloo" else rows.to(locals_[0].tensor.device)
            tables = [torch.empty_like(rows) for _ in range(self.world)]
            dist.all_gather(tables, rows, group=self._group)
        lists: list[list[list[int]]] = [table.tolist() for table in tables]
        return [self._owners_of(i, local, lists) for i, local in enumerate(locals_)]

    @staticmethod
    def _owners_of(i: int, local: Local, tables: list[list[list[int]]]) -> dict[int, Block]:
        if local.block is None:
            return {0: Block((0,) * len(local.shape), local.shape)}
        owners: dict[int, Block] = {}
        for rank, table in enumerate(tables):
            dims, values = table[i][0], table[i][1:]
            block = Block(tuple(values[:dims]), tuple(values[MAX_DIMS : MAX_DIMS + dims]))
            if block.numel and block not in owners.values():
                owners[rank] = block
        covered = sum(block.numel for block in owners.values())
        if covered != math.prod(local.shape):
            raise ValueError(f"{local.name}: the ranks hold {covered} of its {math.prod(local.shape)} elements")
        return owners


_ZERO = torch.zeros((), dtype=torch.int64)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _pack(blocks: Iterable[Tensor]) -> Tensor:
    """Blocks as bytes, each padded so that a view of the next is aligned."""
    parts = []
    for block in blocks:
        data = block.view(-1).view(torch.uint8)
        parts.append(torch.nn.functional.pad(data, (0, _aligned(data.numel()) - data.numel())))
    return torch.cat(parts)


def _buckets(specs: Sequence[TensorSpec], limit: int) -> Iterator[range]:
    """Runs of tensors of at most ``limit`` bytes; a larger tensor is a bucket of its own."""
    begin = 0
    for i, spec in enumerate(specs):
        if i > begin and spec.offset + spec.nbytes - specs[begin].offset > limit:
            yield range(begin, i)
            begin = i
    if specs:
        yield range(begin, len(specs))
