"""Shards of every mesh, written and read back by every other, on four gloo ranks; no model is needed for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from asyncrl.training.agreement import Agreement
from asyncrl.training.blocks import block_of, replica_of
from asyncrl.training.checkpoint import Write
from asyncrl.training.errors import CheckpointError
from asyncrl.training.host_memory import HostMemory
from asyncrl.training.keeping import Keep
from asyncrl.training.sharding import local
from asyncrl.training.snapshot import take
from asyncrl.training.stored import StoredState
from tests.training.ranks import run_ranks

SHAPES = {"even": (8, 6), "odd": (10, 4), "short": (3, 5), "vector": (7,)}
# Placement of each tensor over tp: rows, columns, rows, whole.
SPLIT = {"even": Shard(0), "odd": Shard(0), "short": Replicate(), "vector": Replicate()}
COLUMNS = {"even": Shard(1), "odd": Shard(1), "short": Shard(1), "vector": Replicate()}
MESHES = {
    "fsdp": ((4,), ("dp_shard",), {}),
    "hsdp": ((2, 2), ("dp_replicate", "dp_shard"), {}),
    "fsdp x tp rows": ((2, 2), ("dp_shard", "tp"), SPLIT),
    "fsdp x tp columns": ((2, 2), ("dp_shard", "tp"), COLUMNS),
    "copies x tp": ((2, 2), ("dp_replicate", "tp"), SPLIT),
}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def placed(sizes, names, split) -> dict[str, nn.Parameter]:
    """The tensors on a mesh, tensor parallelism first and FSDP2 over what it left, as the trainer does it."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    module = nn.Module()
    for name, tensor in whole_tensors().items():
        if split:
            tensor = distribute_tensor(tensor, mesh["tp"], [split[name]], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(tensor))
    data = tuple(name for name in names if name != "tp")
    if data == ("dp_replicate",):  # FSDP2 has no form without shards: placed by hand
        return {
            name: nn.Parameter(distribute_tensor(t, mesh, [Replicate(), split[name]], src_data_rank=None))
            for name, t in whole_tensors().items()
        }
    fully_shard(module, mesh=mesh[data if len(data) > 1 else data[0]])
    return dict(module.named_parameters())


def stand_in(parameters, rank, world):
    """As much of a trainer as a snapshot sees, with AdamW state that is a function of the weights."""
    state = {p: {"step": torch.tensor(5.0), "exp_avg": p.detach() * 2} for p in parameters.values()}
    mesh = SimpleNamespace(rank=rank, world_size=world, device=torch.device("cpu"))
    return SimpleNamespace(
        mesh=mesh,
        policy=nn.Module(),
        named_parameters_hf=lambda: list(parameters.items()),
        optimizer=SimpleNamespace(state=state),
        version=1,
        skipped={},
        update_state=dict,
    )


def job(rank, world, root):
    root, whole, out = Path(root), whole_tensors(), {}
    agreement = Agreement(rank, world, None)
    meshes = {name: placed(*mesh) for name, mesh in MESHES.items()}
    for name, parameters in meshes.items():
        for key, p in parameters.items():
            assert torch.equal(local(p.detach()), block_of(key, p).of(whole[key])), (name, key, p.placements)
        snapshot = take(stand_in(parameters, rank, world), HostMemory(torch.device("cpu")))
        out[name] = list(snapshot.copies.tensors), snapshot.scalars
        write = Write(root, root / name, Keep(), snapshot, {}, root, "", {})
        write.folder, write.rank, write.ranks = root / name, rank, world
        (write.folder / "state").mkdir(parents=True, exist_ok=True)
        agreement.together("write", write.write)
    for writer in MESHES:
        stored = StoredState(root / writer / "state", world)
        for reader, parameters in meshes.items():
            for key, p in parameters.items():
                block = block_of(key, p)
                for kind, factor in (("weight", 1), ("exp_avg", 2)):
                    found = stored.read(f"{kind}/{key}", torch.float32, block)
                    assert torch.equal(found, factor * block.of(whole[key])), (writer, reader, key)
    for key, p in meshes["fsdp"].items():
        out[key] = replica_of(p, rank, world)
    out["hsdp copies"] = [replica_of(p, rank, world) for p in meshes["hsdp"].values()]
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("blocks")
    return root, run_ranks(4, job, str(root))


def test_every_mesh_reads_what_every_other_wrote(written):
    """One rank, too: whole tensors, from whatever blocks. Every element is in exactly one file."""
    root, _ = written
    whole = whole_tensors()
    specs = {f"{k}/{n}": (t.dtype, tuple(t.shape)) for n, t in whole.items() for k in ("weight", "exp_avg")}
    for mesh in MESHES:
        stored = StoredState(root / mesh / "state", 4)
        stored.check_complete(specs)
        for name, tensor in whole.items():
            assert torch.equal(stored.read_whole(f"weight/{name}", specs[f"weight/{name}"]), tensor), mesh


def test_copies_are_written_once_and_the_work_is_divided(written):
    _, ranks = written
    for mesh in ("hsdp", "copies x tp"):
        times = Counter(key for rank in ranks for key in rank[mesh][0])
        assert max(times.values()) == 2, "two shards of each, by one holder each"
        assert all(rank[mesh][0] for rank in ranks), "no rank is idle while another writes everything"
    assert [rank["hsdp copies"][0] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(rank["even"] == (0, 1) for rank in ranks)
    assert all(rank[mesh][1] == {name: {"step": 5.0} for name in SHAPES} for rank in ranks for mesh in MESHES)


def test_the_shards_of_one_rank_are_missed(written):
    root, _ = written
    stored = StoredState(root / "fsdp" / "state", 4)
    stored.blocks["weight/odd"].pop()
    spec = {"weight/odd": (torch.float32, SHAPES["odd"])}
    stored.blocks = {key: blocks for key, blocks in stored.blocks.items() if key in spec}
    with pytest.raises(CheckpointError, match=r"weight/odd: shards hold 36 of 40 elements"):
        stored.check_complete(spec)
    with pytest.raises(CheckpointError, match=r"weight/odd: 36 of 40 elements found"):
        stored.read_whole("weight/odd", spec["weight/odd"])


def test_a_sum_that_is_still_due_cannot_be_saved(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(CheckpointError, match="w is placed as"):
            block_of("w", DTensor.from_local(torch.zeros(3), mesh, [Partial()]))
    finally:
        torch.distributed.destroy_process_group()
