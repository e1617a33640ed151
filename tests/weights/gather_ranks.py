"""The ranks of the gather tests: ``python -m tests.weights.gather_ranks WORLD STORE SCENARIO...``."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from asyncrl.weights.errors import PublishFailed
from asyncrl.weights.gather import Gatherer, local_of
from asyncrl.weights.publisher import WeightPublisher
from tests.weights.fake_engine import FakeEngine


def model() -> torch.nn.Module:
    """Odd sizes, so that shards are uneven and some ranks hold nothing of the small ones."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(7, 13), torch.nn.Linear(13, 5, bias=False), torch.nn.LayerNorm(2), torch.nn.Linear(1, 1)]
    return torch.nn.Sequential(*layers)


def whole() -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model().named_parameters()}


def gathered(named, rank: int, world: int, wire=torch.float32, bucket_bytes: int = 200):
    """Rank 0: name -> tensor, and the summed digests; None elsewhere."""
    locals_ = [local_of(name, p) for name, p in named]
    plan = Gatherer(locals_, wire, rank=rank, world=world, group=dist.new_group(), bucket_bytes=bucket_bytes)
    assert len(plan.buckets) > 1
    streams = [plan.gather(bucket, locals_) for bucket in plan.buckets]
    digests = plan.shard_digests()
    if rank != 0:
        assert streams == [None] * len(streams) and digests is None
        return None
    stream = torch.cat(streams)
    return {spec.name: spec.view(stream) for spec in plan.manifest.specs}, digests


def compare(result, expected: dict[str, torch.Tensor]) -> None:
    from asyncrl.weights.digest import tensor_digests

    if result is not None:
        tensors, digests = result
        assert list(tensors) == list(expected)
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert digests == tensor_digests(expected.values())


def fsdp(rank: int, world: int) -> None:
    """FSDP2's shards, in two wire dtypes."""
    net = model()
    fully_shard(net[0])
    fully_shard(net)
    for wire in (torch.float32, torch.bfloat16):
        compare(gathered(net.named_parameters(), rank, world, wire), {n: t.to(wire) for n, t in whole().items()})


def placements(rank: int, world: int) -> None:
    """Shards of other dimensions, replicas, two-dimensional meshes and plain tensors together."""
    flat = init_device_mesh("cpu", (world,))
    mesh = init_device_mesh("cpu", (world // 2, 2)) if world % 2 == 0 else None
    torch.manual_seed(1)
    tensors = {name: torch.randn(6, 10) for name in ("rows", "columns", "replica", "plain", "grid", "mixed")}
    named = {
        "rows": distribute_tensor(tensors["rows"], flat, [Shard(0)]),
        "columns": distribute_tensor(tensors["columns"], flat, [Shard(1)]),
        "replica": distribute_tensor(tensors["replica"], flat, [Replicate()]),
        "plain": tensors["plain"] if rank == 0 else torch.full((6, 10), float("nan")),
    }
    if mesh is not None:
        named["grid"] = distribute_tensor(tensors["grid"], mesh, [Shard(0), Shard(1)])
        named["mixed"] = distribute_tensor(tensors["mixed"], mesh, [Replicate(), Shard(1)])
    compare(gathered(named.items(), rank, world), {name: tensors[name] for name in named})


def publish(rank: int, world: int) -> None:
    """A push from sharded parameters to two engines while the ranks go on; then one that nobody needs."""
    net = model()
    fully_shard(net)
    publisher = WeightPublisher(
        lambda: net.named_parameters(), wire_dtype="bfloat16", rank=rank, world=world, chunk_bytes=128, deadline_s=20
    )
    engines = [FakeEngine(publisher.endpoint, f"generator/{i}") for i in range(2)] if rank == 0 else []
    if rank == 0:
        publisher.wait_for_engines(2, 20)
    publisher.publish(0)
    dist.barrier()  # other collectives go on meanwhile
    publisher.wait_gathered()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    report = publisher.wait_committed()
    for engine in engines:
        assert all(torch.equal(engine.weights[n], t.bfloat16()) for n, t in whole().items())
    assert (report.engines == ["generator/0", "generator/1"]) if rank == 0 else report is None
    publisher.publish(0)
    report = publisher.wait_committed()
    assert rank != 0 or report.engines == []
    publisher.close()
    for engine in engines:
        engine.close()


def damaged(rank: int, world: int) -> None:
    """What rank 1 sends is not what it holds: rank 0 finds out before any engine loads it."""
    net = model()
    fully_shard(net)
    if rank == 1:
        send = dist.send

        def flip(tensor, *arguments, **options):
            tensor[0] ^= 1
            return send(tensor, *arguments, **options)

        dist.send = flip
    publisher = WeightPublisher(lambda: net.named_parameters(), rank=rank, world=world, deadline_s=20)
    if rank == 0:
        engine = FakeEngine(publisher.endpoint)
        publisher.wait_for_engines(1, 20)
    publisher.publish(0)
    if rank == 0:
        try:
            publisher.wait_committed()
        except PublishFailed as error:
            assert "gathered tensors differ from their shards: 0.weight" in str(error), error
            assert engine.versions == []
        else:
            raise AssertionError("not found")
        engine.close()
    else:
        publisher.wait_gathered()
        dist.send = send
    publisher.close()


def unready(rank: int, world: int) -> None:
    """Nobody gathers before the engines are ready, or if rank 0 cannot ask them; later collectives still match."""
    net = model()
    fully_shard(net)
    gather, began, ready = Gatherer.gather, [], []
    Gatherer.gather = lambda *arguments: began.append(time.monotonic()) or gather(*arguments)

    def pushed(rank_0: Callable[[WeightPublisher], None], deadline_s: float = 20.0) -> None:
        """One push on all ranks; ``rank_0`` looks at it there. Counts the gathers that it began."""
        began.clear()
        with WeightPublisher(net.named_parameters, rank=rank, world=world, deadline_s=deadline_s) as publisher:
            if rank == 0:
                rank_0(publisher)
            else:
                publisher.publish(0)
                with contextlib.suppress(PublishFailed):
                    publisher.wait_committed()

    def deaf(publisher: WeightPublisher) -> None:
        engine = FakeEngine(publisher.endpoint, deaf_to=("announce",))
        publisher.wait_for_engines(1, 20)
        publisher.publish(0)
        assert "did not get ready" in publisher.wait_committed().dropped["generator/0"]
        engine.close()

    def broken(publisher: WeightPublisher) -> None:
        publisher._hub.subscribers.announce = None
        publisher.publish(0)
        with contextlib.suppress(PublishFailed):
            raise AssertionError(publisher.wait_committed())

    def slow(publisher: WeightPublisher) -> None:
        engine = FakeEngine(publisher.endpoint, before_ready=lambda: ready.append((time.sleep(0.5), time.monotonic())))
        publisher.wait_for_engines(1, 20)
        publisher.publish(0)
        assert publisher.wait_committed().engines == ["generator/0"]
        engine.close()

    for case, deadline_s in ((deaf, 1.0), (broken, 20.0)):
        pushed(case, deadline_s)
        assert not began, f"rank {rank} gathered for an engine that was not ready ({case.__name__})"
    pushed(slow)
    at = [ready[0][1] if ready else 0.0]
    dist.broadcast_object_list(at)
    assert began and began[0] > at[0], f"rank {rank} gathered {at[0] - began[0]:.3f} s before the engine was ready"
    Gatherer.gather = gather


def run_rank(rank: int, world: int, store: str, scenarios: list[str]) -> None:
    """What each process does."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for scenario in scenarios:
        print(f"rank {rank}: {scenario}", flush=True)
        globals()[scenario](rank, world)
    dist.barrier()
    dist.destroy_process_group()


def main(world: int, store: str, scenarios: list[str]) -> int:
    """Fork the ranks, so that torch is imported once. The first failure ends them all: the others would wait for it."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, world, store, scenarios)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    alive = {rank.sentinel: rank for rank in ranks}
    while alive:
        for sentinel in multiprocessing.connection.wait(list(alive)):
            if code := alive.pop(sentinel).exitcode:
                for rank in alive.values():
                    rank.kill()
                return abs(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
