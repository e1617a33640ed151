"""What a data plane must stand, with engines in processes of their own.

    python -m tests.weights.plane_trainer PLANE SCENARIO...

runs scenarios one after the other and prints what happened and when; the tests of planes call or start it. A scenario
ends with an ``AssertionError`` or another exception if something is wrong.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from asyncrl.transport.errors import DeadlineExpired
from asyncrl.weights.digest import tensor_digests
from asyncrl.weights.errors import PlaneFailed
from asyncrl.weights.groups import Line
from asyncrl.weights.publisher import SyncReport, WeightPublisher
from tests.weights.cpu_planes import sending
from tests.weights.plane_engine import LINK

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
START_S = 60.0
BEGAN = time.monotonic()


def note(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.2f} s  {text}", flush=True)


class EngineProcess:
    def __init__(self, plane: str, endpoint: str, name: str, deadline_s: float) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if "NCCL_HOSTID" in environment:  # two ranks on one GPU: NCCL must believe in two hosts
            environment["NCCL_HOSTID"] = f"{name}-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "tests.weights.plane_engine", plane, endpoint, name, str(deadline_s)]
        self.name, self.said = name, queue.SimpleQueue[dict[str, Any]]()
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.said.put(json.loads(line))
            else:
                note(f"{self.name}: {line.rstrip()}")
        self.said.put({"ended": self.process.wait()})

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.until("did")

    def until(self, key: str) -> dict[str, Any]:
        """The next line with ``key``."""
        while True:
            try:
                said = self.said.get(timeout=START_S)
            except queue.Empty:
                raise AssertionError(f"{self.name} said nothing for {START_S:g} s while {key} was due") from None
            if key in said:
                return said
            assert "ended" not in said, f"{self.name} ended with {said['ended']} while {key} was due"


class Bench:
    """A publisher of random tensors and its engines."""

    def __init__(
        self, plane: str, mib: int = 12, *, chunk: int = MIB, window: int = 4 * MIB, deadline_s: float = 20
    ) -> None:
        self.name, self.deadline_s = plane, deadline_s
        self.device = torch.device("cuda", 0) if plane in ("ipc", "nccl") else torch.device("cpu")
        shapes = [(mib * MIB // 16,), (3, 5), (), (mib * MIB // 8 - 777,), (1000, 11), *[(MIB // 4,)] * (mib // 2)]
        torch.manual_seed(0)
        self.parameters = {f"p{i}": torch.randn(shape, device=self.device) for i, shape in enumerate(shapes)}
        self.plane = sending(plane, chunk)
        self.publisher = WeightPublisher(
            lambda: self.parameters.items(), wire_dtype="bfloat16", plane=self.plane, chunk_bytes=chunk,
            window_bytes=window, deadline_s=deadline_s, **LINK,
        )  # fmt: skip
        self.engines: dict[str, EngineProcess] = {}

    def start(self, *names: str) -> list[EngineProcess]:
        new = [EngineProcess(self.name, self.publisher.endpoint, name, self.deadline_s) for name in names]
        self.engines |= {engine.name: engine for engine in new}
        for engine in new:
            engine.until("started")
        self.publisher.wait_for_engines(len(self.engines), START_S)
        note(f"engines here: {', '.join(self.engines)}")
        return new

    def change(self) -> None:
        """Move every parameter; on a GPU behind work that takes long, which a push must wait for."""
        if self.device.type == "cuda":
            torch.cuda._sleep(200_000_000)
        for parameter in self.parameters.values():
            parameter.mul_(1.01).add_(0.001)

    def push(self, version: int) -> SyncReport:
        self.publisher.publish(version)
        return self.report()

    def report(self) -> SyncReport:
        report = self.publisher.wait_committed(60)
        assert report is not None
        times = " ".join(f"{k}={getattr(report, k):.3f}" for k in ("ready_s", "gather_s", "transfer_s", "total_s"))
        note(f"version {report.version}: {report.engines}, {report.bytes} bytes, {times}, dropped {report.dropped}")
        return report

    def digests(self) -> list[int]:
        return tensor_digests(p.to(torch.bfloat16) for p in self.parameters.values())

    def line(self, name: str) -> Any:
        assert self.publisher._hub is not None
        return self.publisher._hub.subscribers._engines[name].line

    def close(self) -> None:
        for engine in self.engines.values():
            engine.process.kill()
            engine.process.wait()
        self.publisher.close()


def life(bench: Bench) -> None:
    """Equal bytes, places used again only when they are free, a killed engine, its successor."""
    first, second = bench.start("generator/0", "generator/1")
    for version in range(2):
        bench.change()
        bench.publisher.publish(version)
        wanted = bench.digests()
        bench.publisher.wait_gathered(30)
        for parameter in bench.parameters.values():  # gathered: nothing reads parameters any more
            parameter.neg_()
        assert len(bench.report().engines) == 2
        for engine in (first, second):
            assert engine.until("loaded")["digests"] == wanted, f"{engine.name} holds other bytes"
    note("both hold what was published; one of them now keeps the first bytes waiting")
    bench.change()
    second.tell("hold")
    bench.publisher.publish(2)
    second.until("held")
    try:
        bench.publisher.wait_gathered(0.5)
    except DeadlineExpired as error:
        note(f"as it should be: {error}")
    else:
        raise AssertionError("bytes were gathered into places that an engine had not read")
    second.tell("go")
    assert len(bench.report().engines) == 2
    for engine in (first, second):
        assert engine.until("loaded")["digests"] == bench.digests()
    killed(bench, first, second)


def killed(bench: Bench, first: EngineProcess, second: EngineProcess) -> None:
    """SIGKILL in the middle of a transfer."""
    bench.change()
    line, broken = bench.line(first.name), bench.line(second.name)
    second.tell("hold")
    bench.publisher.publish(3)
    second.until("held")
    note(f"killing {second.name}")
    second.process.kill()
    report = bench.report()
    assert report.engines == [first.name] and list(report.dropped) == [second.name], report
    if isinstance(broken, Line):
        given_up(broken, torch.zeros(1, dtype=torch.uint8, device=bench.device))
    assert first.until("loaded")["digests"] == bench.digests()
    del bench.engines[second.name]
    (successor,) = bench.start(second.name)
    assert bench.push(3).engines == [second.name]
    assert successor.until("loaded")["digests"] == bench.digests()
    bench.change()
    assert len(bench.push(4).engines) == 2
    for engine in (first, successor):
        said = engine.until("loaded")
        assert said["digests"] == bench.digests() and said["loaded"] == 4
    assert said["announced"] == [3, 4]
    assert bench.line(first.name) is line, "the engine that lived on was made to begin anew"


def given_up(line: Line, data: torch.Tensor) -> None:
    """The group is aborted, in a thread that may still be about to."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            line.group.broadcast(data, 0.1)
        except PlaneFailed as error:
            if "was given up" in str(error):
                return
        time.sleep(0.05)
    raise AssertionError(f"the group with {line.name} was not given up")


def silence(bench: Bench) -> None:
    """An engine that lives but takes nothing is given up at the deadline."""
    first, second = bench.start("generator/0", "generator/1")
    assert len(bench.push(0).engines) == 2
    second.tell("hold")
    bench.publisher.publish(1)
    second.until("held")
    report = bench.report()
    assert report.engines == [first.name] and "did not stage bytes" in report.dropped[second.name], report
    second.until("dropped")
    second.tell("go")
    bench.change()
    assert bench.push(2).engines == [first.name]
    wanted = [first.until("loaded")["digests"] for _ in range(3)][-1]
    assert wanted == bench.digests()


def throughput(bench: Bench) -> None:
    bench.start("generator/0")
    for version in range(4):
        report = bench.push(version)
        speed = report.bytes / report.transfer_s / 1e9
        note(f"{bench.name}: {speed:.2f} GB/s from parameters to staging, the trainer's digests included")


SCENARIOS = {"life": life, "silence": silence, "throughput": throughput}


def main() -> None:
    plane, *names = sys.argv[1:]
    for name in names:
        note(f"{plane}: {name}")
        sizes: dict[str, Any] = {"mib": 24}
        if name == "throughput":
            sizes = {"mib": 1640 if plane == "ipc" else 400, "chunk": 64 * MIB, "window": 256 * MIB}
        elif name == "silence":
            sizes = {"mib": 24, "deadline_s": 8}
        bench = Bench(plane, **sizes)
        try:
            SCENARIOS[name](bench)
        finally:
            bench.close()
    note("done")


if __name__ == "__main__":
    main()
