"""Data planes with engines in processes of their own: what needs a GPU through its likeness on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asyncrl.transport.errors import ProtocolError
from asyncrl.weights.errors import PlaneFailed
from asyncrl.weights.ipc import IpcSending
from asyncrl.weights.manifest import Manifest, Staged
from asyncrl.weights.nccl import NcclGroup
from asyncrl.weights.planes import ZmqReceiving, ZmqSending, receiving_plane, sending_plane
from tests.weights.cpu_planes import FileReceiving, FileSending, receiving, sending
from tests.weights.fake_engine import FakeEngine
from tests.weights.plane_trainer import Bench, life, silence

CPU = torch.device("cpu")


@pytest.fixture
def bench(request):
    bench = Bench(*request.param)
    yield bench
    bench.close()


@pytest.mark.parametrize("bench", [("file",), ("gloo",)], indirect=True, ids=["ipc", "nccl"])
def test_bytes_arrive_and_a_killed_engine_costs_nobody_else_anything(bench):
    """An engine killed in the middle of a transfer hangs nobody, and its successor joins at the next push."""
    life(bench)


def test_an_engine_that_takes_nothing_is_given_up_at_the_deadline():
    bench = Bench("gloo", deadline_s=3)
    try:
        silence(bench)
    finally:
        bench.close()


@pytest.mark.parametrize("name", ["file", "gloo"])
def test_all_workers_of_all_engines_take_part(name):
    """SkyRL #1399, prime-rl #2221: with several engines the ranks of their workers were calculated wrong."""
    bench = Bench(name, mib=8)
    names = ["generator/0", "generator/1"]
    engines = [
        FakeEngine(
            bench.publisher.endpoint,
            engine,
            workers=2,
            plane=lambda rank: receiving(name, rank, 2),
            heartbeat_s=1,
            dead_after_s=5,
        )
        for engine in names
    ]
    try:
        bench.publisher.wait_for_engines(2, 20)
        for version in range(2):
            bench.change()
            assert sorted(bench.push(version).engines) == names
        for receiver in (receiver for engine in engines for receiver in engine.receivers):
            tensors = {spec.name: t for spec, t in receiver.take(1).tensors()}
            assert all(torch.equal(t, bench.parameters[n].bfloat16()) for n, t in tensors.items())
            assert not isinstance(receiver._plane, FileReceiving) or receiver._plane.opened == 1
    finally:
        for engine in engines:
            engine.close()
        bench.close()


def lent(**changes) -> SimpleNamespace:
    header = {"version": 0, "offset": 0, "bytes": 8, "at": 0, "gpu": "CPU", "handle": b"x", "size": 8, "start": 0}
    return SimpleNamespace(header=header | {"counter": b"", "counter_at": 0} | changes)


def staged() -> Staged:
    manifest = Manifest.of([("a", torch.float32, (2,))])
    return Staged(0, manifest, torch.zeros(manifest.nbytes, dtype=torch.uint8))


def test_another_gpu_is_refused_with_both_names():
    with pytest.raises(PlaneFailed, match="on one GPU, but they are on GPU-7 and CPU; use nccl or zmq"):
        FileReceiving().receive(staged(), lent(gpu="GPU-7"))


@pytest.mark.parametrize("changes", [{"at": 1}, {"at": -1}, {"bytes": 9}, {"bytes": -1}])
def test_no_byte_outside_the_lent_memory_is_read(changes):
    with pytest.raises(ProtocolError, match="of a memory of 8"):
        FileReceiving().receive(staged(), lent(**changes))


def test_a_memory_that_cannot_be_opened_fails_the_version():
    with pytest.raises(PlaneFailed, match="cannot be opened here"):
        FileReceiving().receive(staged(), lent(handle=b"/no/such/ring"))


def test_a_broadcast_without_a_group_fails_the_version():
    with pytest.raises(ProtocolError, match="no group was announced"):
        receiving("gloo").receive(staged(), SimpleNamespace(header={"offset": 0, "bytes": 8}))


def test_planes_that_need_a_gpu_say_so_on_a_cpu():
    with pytest.raises(RuntimeError, match=r"weights\.backend=ipc, but the trainer's parameters are on cpu"):
        IpcSending().memory(8, CPU)
    with pytest.raises(PlaneFailed, match="moves weights between GPUs, not from or to cpu"):
        NcclGroup(CPU)


def test_an_engine_of_another_plane_is_dropped_with_the_reason():
    bench = Bench("file", mib=8)
    engine = FakeEngine(bench.publisher.endpoint, plane=lambda rank: ZmqReceiving(), heartbeat_s=1, dead_after_s=5)
    try:
        bench.publisher.wait_for_engines(1, 20)
        report = bench.push(0)
        assert "lent came to worker/0/0, which takes chunk only" in report.dropped["generator/0"]
    finally:
        engine.close()
        bench.close()


def test_the_backend_of_the_configuration_chooses_both_halves():
    assert isinstance(sending_plane("zmq", 1024), ZmqSending) and isinstance(sending_plane("ipc", 1024), IpcSending)
    assert isinstance(receiving_plane("zmq", CPU, 0, 1, 10), ZmqReceiving)
    assert [p.kind for p in (receiving_plane("nccl", CPU, 0, 1, 10), FileReceiving())] == ["broadcast", "lent"]
    assert isinstance(sending("file", 1024), FileSending)
