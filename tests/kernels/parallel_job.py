"""What each rank of the vocabulary-parallel tests does; imported by processes that know nothing else of the tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kernels.logprob import selected_logprob
from kernels.policy_loss import policy_loss
from kernels.vocab_parallel import shard_bounds
from tests.kernels.dense import LargestTensor, Problem, problem, weighted
from tests.kernels.test_policy_loss import CLIPPED, known

# Vocabulary sizes whose shards on 4 ranks are even, ragged, one short, and empty on the last rank.
VOCABULARIES = (24, 23, 21, 5)
INTERPRETED = (23, 5)  # of which Triton's interpreter, which is slow, takes these
LARGE = (torch.float64, torch.float32, torch.bfloat16)
ALL = {"per_token": True, "bias": True, "softcap": 3.0}


class Collectives:
    """Counts all-reduces by the names of their operations."""

    def __enter__(self) -> list[str]:
        self.seen, self.kept = [], dist.all_reduce

        def counted(x, op=dist.ReduceOp.SUM, **options):
            self.seen.append(str(op).rpartition(".")[2])
            return self.kept(x, op, **options)

        dist.all_reduce = counted
        return self.seen

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self.kept


def mine(p: Problem, group: dist.ProcessGroup) -> Problem:
    """The problem with this rank's rows of weight and bias."""
    start, end = shard_bounds(len(p.weight), dist.get_world_size(group), dist.get_rank(group))
    bias = None if p.bias is None else p.bias.detach()[start:end].clone().requires_grad_()
    return p._replace(weight=p.weight.detach()[start:end].clone().requires_grad_(), bias=bias)


def gathered(parts: list[torch.Tensor | None], group: dist.ProcessGroup) -> list[Any]:
    """The shards of all ranks put together, as numpy."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, [x.detach().double() for x in parts], group=group)
    return [torch.cat(list(shards)).numpy() for shards in zip(*found, strict=True)]


def numpy(xs: Any) -> list[Any]:
    return [x.detach().double().numpy() for x in xs]


def logprob_job(p: Problem, group: dist.ProcessGroup, mesh: Any, backend: str) -> dict[str, Any]:
    local = mine(p, group)
    options = {"bias_V": local.bias, "softcap": p.softcap, "vocab_size": len(p.weight), "backend": backend}
    with Collectives() as forward:
        outputs = selected_logprob(*local[:4], mesh, token_chunk=4, vocab_chunk=7, **options)
    with Collectives() as backward:
        d_hidden, *shards = torch.autograd.grad(weighted(outputs), local.inputs())
    return {
        "results": [*numpy(outputs), *numpy([d_hidden]), *gathered(shards, group)],
        "collectives": (forward, backward),
    }


def policy_job(p: Problem, group: dist.ProcessGroup, mesh: Any, backend: str, chunk_rows: int) -> dict[str, Any]:
    local = mine(p, group)
    widest = -(-len(p.weight) // dist.get_world_size(group))
    options = {"bias_V": local.bias, "softcap": p.softcap, "vocab_size": len(p.weight), "backend": backend}
    room = chunk_rows * widest * p.hidden.element_size()
    extras = known(p, p.hidden.dtype)
    with Collectives() as forward:
        outputs = policy_loss(*local[:3], CLIPPED, extras, p.temperature, mesh, chunk_bytes=room, **options)
    with Collectives() as backward:
        d_hidden, *shards = torch.autograd.grad(outputs[0], local.inputs())
    return {
        "results": [*numpy(outputs), *numpy([d_hidden]), *gathered(shards, group)],
        "collectives": (forward, backward),
    }


def dtensor_job(p: Problem, mesh: DeviceMesh) -> list[Any]:
    """Weight and bias as DTensors, without mesh and size; the gradient comes back as a DTensor."""
    weight = distribute_tensor(p.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(p.bias.detach(), mesh, [Shard(0)]).requires_grad_()
    outputs = selected_logprob(*p._replace(weight=weight)[:4], bias_V=bias, softcap=p.softcap)
    d_hidden, *shards = torch.autograd.grad(weighted(outputs), [p.hidden, weight, bias])
    assert all(isinstance(x, DTensor) and x.placements == (Shard(0),) for x in shards)
    return [*numpy(outputs), *numpy([d_hidden]), *numpy([x.full_tensor() for x in shards])]


def memory_job(group: dist.ProcessGroup, mesh: Any) -> dict[str, Any]:
    """Largest tensor of each head, in elements, on a problem where all logits or all vocabulary would stand out."""
    n, v, d = 256, 600, 8
    p = mine(problem(n, v, d, torch.float32), group)
    with LargestTensor() as four:
        outputs = selected_logprob(*p[:3], 1.0, mesh, vocab_size=v, token_chunk=64, vocab_chunk=50)
        weighted(outputs).backward()
    extras = tuple(torch.ones(n) for _ in range(3))
    room = 64 * 4 * -(-v // dist.get_world_size(group))
    with LargestTensor() as three:
        policy_loss(*p[:3], CLIPPED, extras, 1.0, mesh, vocab_size=v, chunk_bytes=room)[0].backward()
    return {"four": four.elements, "three": three.elements}


def large_problem(dtype: torch.dtype) -> Problem:
    """Qwen2.5's 151,643 tokens before padding, which no power of two divides."""
    return problem(8, 151_643, 16, dtype, scale=0.3)


def large_job(group: dist.ProcessGroup, mesh: Any, dtype: torch.dtype) -> list[Any]:
    local = mine(large_problem(dtype), group)
    outputs = selected_logprob(*local[:3], 1.0, mesh, vocab_size=151_643)
    d_hidden, d_weight = torch.autograd.grad(weighted(outputs), local.inputs())
    return [*numpy(outputs), *numpy([d_hidden]), *gathered([d_weight], group)]


def empty_job(p: Problem, group: dist.ProcessGroup, mesh: Any) -> bool:
    """All tokens of these ranks masked: zeros, a graph, and no rank waits for another."""
    local = mine(p, group)
    options = {"bias_V": local.bias, "vocab_size": len(p.weight)}
    nothing = torch.zeros(len(p.hidden), dtype=torch.bool)
    weighted(selected_logprob(*local[:4], mesh, mask_N=nothing, **options)).backward()
    none = tuple(x[:0] for x in known(p, p.hidden.dtype))
    policy_loss(local.hidden[:0], local.weight, local.target[:0], CLIPPED, none, 1.0, mesh, **options)[0].backward()
    return all(torch.equal(x.grad, torch.zeros_like(x)) for x in local.inputs())


def refusals(group: dist.ProcessGroup, mesh: DeviceMesh) -> list[str]:
    p, found = problem(), []
    local = mine(p, group)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = distribute_tensor(p.weight.detach(), mesh, [Shard(1)])
    for weight, where, options in (
        (local.weight, mesh, {}),
        (p.weight, mesh, {"vocab_size": 23}),
        (local.weight, both, {"vocab_size": 23}),
        (wrong, None, {}),
    ):
        try:
            selected_logprob(p.hidden, weight, p.target, 1.0, where, **options)
        except ValueError as e:
            found.append(str(e))
    return found


def job(rank: int, world: int) -> dict[str, Any]:
    """Everything on 4 ranks, and on 2 x 2 ranks whose pairs share the vocabulary."""
    assert world == 4
    wide = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    out: dict[str, Any] = {"rank": rank}
    for ranks, mesh in ((4, wide), (2, pairs)):
        group = mesh.get_group()
        for v in VOCABULARIES:
            for backend in ("torch", "triton") if v in INTERPRETED else ("torch",):
                p = problem(v=v, dtype=torch.float64 if backend == "torch" else torch.float32, **ALL)
                out["logprob", ranks, v, backend] = logprob_job(p, group, mesh, backend)
                out["policy", ranks, v, backend] = policy_job(p, group, group, backend, chunk_rows=4)
            out["dtensor", ranks, v] = dtensor_job(problem(v=v, **ALL), mesh)
        out["memory", ranks] = memory_job(group, mesh)
        out["empty", ranks] = empty_job(problem(bias=True), group, mesh)
    for dtype in LARGE:
        out["large", str(dtype)] = large_job(wide.get_group(), wide, dtype)
    # One pair has tokens and the other none: data parallel ranks do not wait for each other here.
    if rank < 2:
        logprob_job(problem(), pairs.get_group(), pairs, "torch")
    else:
        assert empty_job(problem(), pairs.get_group(), pairs)
    out["refused"] = refusals(wide.get_group(), wide)
    return out
