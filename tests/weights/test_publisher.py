"""The four phases of a push, with engines that are fakes behind real links."""

from __future__ import annotations

import threading

import pytest
import torch

from asyncrl.transport.errors import DeadlineExpired
from asyncrl.weights.digest import combined, tensor_digests
from asyncrl.weights.errors import PublishFailed
from asyncrl.weights.manifest import Staged
from asyncrl.weights.publisher import WeightPublisher
from asyncrl.weights.subscribers import Subscribers
from tests.weights.fake_engine import FakeEngine


class Bench:
    """A publisher of a few tensors, and fake engines."""

    def __init__(self, **options) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            "embed": torch.randn(40, 8, generator=generator),
            "layer.weight": torch.randn(33, 7, generator=generator),
            "layer.scale": torch.randn((), generator=generator),
            "head": torch.randn(5, 3, generator=generator),
        }
        self.drops: list[tuple[str, str]] = []
        self.served: list[tuple[str, int, str]] = []
        self.publisher = WeightPublisher(
            lambda: self.parameters.items(),
            on_drop=lambda *who: self.drops.append(who),
            on_served=lambda *what: self.served.append(what),
            **{"chunk_bytes": 256, "window_bytes": 1024, "deadline_s": 20} | options,
        )
        self.engines: list[FakeEngine] = []

    def join(self, *names: str, **options) -> list[FakeEngine]:
        new = [FakeEngine(self.publisher.endpoint, name, **options) for name in names]
        self.engines += new
        self.publisher.wait_for_engines(len(self.engines), 20)
        return new

    def push(self, version: int):
        self.publisher.publish(version)
        return self.publisher.wait_committed(60)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.publisher.close()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def impatient():
    bench = Bench(deadline_s=1.0)
    yield bench
    bench.close()


def same(engine: FakeEngine, parameters: dict[str, torch.Tensor]) -> bool:
    return list(engine.weights) == list(parameters) and all(
        torch.equal(engine.weights[name], value) for name, value in parameters.items()
    )


def test_engines_get_the_bytes_and_the_report_says_what_happened(bench):
    one, two = bench.join("generator/0", "generator/1")
    report = bench.push(0)
    assert same(one, bench.parameters) and same(two, bench.parameters)
    assert sorted(report.engines) == ["generator/0", "generator/1"] and not report.dropped
    assert report.bytes >= sum(4 * p.numel() for p in bench.parameters.values())
    assert (report.load_s, report.digest_s, report.pause_s) == (0.5, 0.125, 0.25)
    assert report.gather_s > 0 and report.transfer_s > 0 and report.total_s >= report.transfer_s


def test_an_engine_that_did_not_move_with_the_trainer_is_dropped(bench):
    """verl #7495; TRL #5312, #5313; OpenRLHF #660: engines that go on with old weights, and nobody can tell."""
    good, stale = bench.join("generator/0", "generator/1", keeps=True)
    good.keeps = False
    bench.push(0)
    bench.parameters["head"] += 1e-6
    report = bench.push(1)
    assert report.engines == ["generator/0"] and stale.versions == [0, 1]
    before, now = combined(tensor_digests(stale.weights.values())), combined(tensor_digests(good.weights.values()))
    reason = f"it loaded weights of digest {before}, the trainer's is {now}"
    assert bench.drops == [("generator/1", f"did not load and commit: {reason}")]
    assert bench.served == [("generator/0", 0, before), ("generator/1", 0, before), ("generator/0", 1, now)]
    assert before != now == report.digest


def test_all_workers_of_an_engine_take_part(bench):
    (engine,) = bench.join("generator/0", workers=2)
    bench.push(0)
    assert engine.versions == [0] and same(engine, bench.parameters)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "float32", ""])
def test_tensors_travel_in_the_wire_dtype(wire):
    bench = Bench(wire_dtype=wire)
    try:
        (engine,) = bench.join("generator/0")
        bench.push(0)
        dtype = getattr(torch, wire) if wire else torch.float32
        assert same(engine, {name: p.to(dtype) for name, p in bench.parameters.items()})
        assert {t.dtype for t in engine.weights.values()} == {dtype}
    finally:
        bench.close()


def test_nobody_there_nothing_sent(bench):
    report = bench.push(0)
    assert report.engines == [] and report.bytes == 0


def test_who_joins_later_gets_the_current_version_and_the_others_nothing(bench):
    (old,) = bench.join("generator/0")
    bench.push(3)
    (new,) = bench.join("generator/1")
    report = bench.push(3)
    assert report.engines == ["generator/1"] and new.versions == [3]
    assert old.versions == [3] and old.announced == [3]
    assert bench.push(3).engines == []


def test_a_restarted_engine_gets_the_version_again(bench):
    (first,) = bench.join("generator/0")
    bench.push(1)
    first.close()
    bench.engines.clear()
    second = bench.join("generator/0")[0]
    assert bench.push(1).engines == ["generator/0"]
    assert second.versions == [1] and same(second, bench.parameters)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "announce",
            "did not get ready: publisher waited 1 s for frontend/1 to answer announce of version 0 with ready",
        ),
        ("load", "did not load and commit: publisher waited 1 s for frontend/1 to answer load of version 0"),
    ],
)
def test_an_engine_that_misses_a_deadline_is_dropped_and_the_others_go_on(impatient, kind, reason):
    (good,) = impatient.join("generator/0")
    (bad,) = impatient.join("generator/1", deaf_to=(kind,))
    report = impatient.push(0)
    assert report.engines == ["generator/0"] and same(good, impatient.parameters)
    assert list(report.dropped) == ["generator/1"] and reason in report.dropped["generator/1"]
    assert impatient.drops == [("generator/1", report.dropped["generator/1"])]
    impatient.publisher.publish(1)
    assert impatient.publisher.wait_committed(60).engines == ["generator/0"]
    assert bad.told == report.dropped["generator/1"]


PHASES = {
    "announce": "did not get ready",
    "chunk": "did not stage bytes",
    "verify": "did not hold all bytes",
    "load": "did not load and commit",
}


@pytest.mark.parametrize("phase", PHASES)
def test_an_engine_killed_in_any_phase_is_dropped_at_once_and_the_others_go_on(bench, monkeypatch, phase):
    """prime-rl #2337, #3050: a peer that dies inside the handshake leaves nobody waiting."""
    (good,) = bench.join("generator/0")
    (bad,) = bench.join("generator/1", deaf_to=(phase,))
    method = "move" if phase == "chunk" else phase
    send, handle = getattr(Subscribers, method), bad.receivers[0]._handle
    kill = threading.Thread(target=bad.close)  # from another thread, as a process that ends would

    async def leave(self, *arguments):
        if kill.ident is None:
            kill.start()
        return await send(self, *arguments)

    monkeypatch.setattr(bad.receivers[0], "_handle", lambda m: None if m.kind == phase else handle(m))
    with monkeypatch.context() as m:
        m.setattr(Subscribers, method, leave)
        report = bench.push(0)
    assert report.engines == ["generator/0"] and same(good, bench.parameters)
    assert PHASES[phase] in report.dropped["generator/1"]
    assert "waited" not in report.dropped["generator/1"], "a lost link must not wait for the deadline"
    assert bench.push(1).engines == ["generator/0"] and good.versions == [0, 1]


def test_bytes_do_not_depend_on_parameters_after_wait_gathered(bench, monkeypatch):
    """The worker stages nothing until the parameters have changed."""
    (engine,) = bench.join("generator/0")
    before = {name: p.clone() for name, p in bench.parameters.items()}
    changed = threading.Event()
    write = Staged.write

    def late(self, offset, data):
        assert changed.wait(30)
        write(self, offset, data)

    monkeypatch.setattr(Staged, "write", late)
    bench.publisher._window_bytes = 1 << 20
    bench.publisher.publish(0)
    bench.publisher.wait_gathered(30)
    for parameter in bench.parameters.values():
        parameter.zero_()
    changed.set()
    bench.publisher.wait_committed(30)
    assert same(engine, before)


def test_gathered_bytes_are_bounded_by_the_window(bench, monkeypatch):
    """While the worker does not take the first chunk no more than the window is gathered."""
    bench.join("generator/0")
    go = threading.Event()
    write = Staged.write

    def late(self, offset, data):
        assert go.wait(30)
        write(self, offset, data)

    monkeypatch.setattr(Staged, "write", late)
    bench.publisher.publish(0)
    with pytest.raises(DeadlineExpired, match=r"trainer rank 0 waited 0\.5 s for version 0 to be gathered"):
        bench.publisher.wait_gathered(0.5)
    go.set()
    assert bench.publisher.wait_committed(30).engines == ["generator/0"]


def test_waiting_without_a_push_returns(bench):
    bench.publisher.wait_gathered(0.1)
    assert bench.publisher.wait_committed(0.1) is None


def test_versions_follow_each_other(bench):
    (engine,) = bench.join("generator/0")
    for version in range(5):
        bench.publisher.publish(version)
    bench.publisher.wait_committed(30)
    assert engine.versions == [0, 1, 2, 3, 4]


def test_what_a_push_dies_of_is_raised_in_the_trainers_thread(bench):
    bench.join("generator/0")
    bench.parameters["broken"] = torch.zeros(3, dtype=torch.int64)
    bench.publisher.publish(0)
    with pytest.raises(PublishFailed, match=r"rank 0 failed: broken: weights travel as .*, not torch\.int64"):
        bench.publisher.wait_gathered(30)
    with pytest.raises(PublishFailed):
        bench.publisher.publish(1)
