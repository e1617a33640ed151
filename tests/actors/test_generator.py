"""A generator whose engine hangs: real links, a real publisher, a fake engine that never answers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from asyncrl.actors.engine import EngineBroken
from asyncrl.actors.generator import Generator, Stop
from asyncrl.actors.messages import CONTROLLER_SCHEMA
from asyncrl.config.schema import Config
from asyncrl.transport.links import Listener
from asyncrl.weights.publisher import WeightPublisher
from asyncrl.weights.staging import Receiver

LIMIT_S = 60  # of a test


class HungEngine:
    """Its worker is real and stages what comes; no update ever ends, and ``stalled`` ends when ``silent`` is set."""

    def __init__(self) -> None:
        self.updating, self.silent = asyncio.Event(), asyncio.Event()
        self.limits: list[float] = []

    async def link(self, *, deadline_s: float, publisher: str, generator: str, **_: Any) -> None:
        self.worker = Receiver(publisher, generator, 0, 1)
        await asyncio.to_thread(self.worker.start, deadline_s)

    async def update(self, version: int, deadline_s: float) -> float:
        self.limits.append(deadline_s)
        self.updating.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def died(self) -> None:
        await asyncio.Event().wait()

    async def stalled(self, limit_s: float) -> None:
        self.limits.append(limit_s)
        await self.silent.wait()
        raise EngineBroken("no token for any of 3 requests")


class Bench:
    """A generator that is ready, and both that it talks to. ``stop``: what ended it."""

    def __init__(self, deadline_s: float = 60) -> None:
        self.cfg = Config()
        self.cfg.weights.deadline_s = 50
        self.drops: list[tuple[str, str]] = []
        self.dropped = threading.Event()
        parameters = {"weight": torch.arange(6.0)}
        self.publisher = WeightPublisher(parameters.items, on_drop=self._note, deadline_s=deadline_s)

    def _note(self, *who: str) -> None:
        self.drops.append(who)
        self.dropped.set()

    async def __aenter__(self) -> Bench:
        self.controller = Listener("controller", CONTROLLER_SCHEMA)
        self.engine = HungEngine()
        self.generator = Generator(self.cfg, "generator/0", self.engine, await self.controller.start())
        self.running = asyncio.create_task(self.generator.run(1.0))
        await self.until("generator_hello")
        await self.controller.send("generator/0", "welcome", {"publisher": self.publisher.endpoint})
        await self.until("generator_ready")
        return self

    async def until(self, kind: str) -> None:
        while (message := await self.controller.recv(deadline_s=30, waiting_for=kind, auto_done=True)).kind != kind:
            assert message.kind.startswith("$"), message.kind

    async def stop(self) -> Stop:
        with pytest.raises(Stop) as caught:
            await self.running
        return caught.value

    async def __aexit__(self, *_: object) -> None:
        await self.generator.close("")
        await asyncio.to_thread(self.engine.worker.close)
        await asyncio.to_thread(self.publisher.close)
        await self.controller.close()


def within(scenario) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(bounded())


def test_being_given_up_is_heard_during_an_update_that_hangs():
    async def scenario() -> None:
        async with Bench(deadline_s=1.0) as bench:  # the publisher's; the engine's own is 50
            bench.publisher.publish(0)
            stop = await bench.stop()
            assert bench.engine.updating.is_set() and 50 in bench.engine.limits, "weights.deadline_s"
            assert stop.code == 1
            assert "the publisher gave this engine up: it did not load and commit: publisher waited 1 s" in str(stop)

    within(scenario)


def test_the_loss_of_the_worker_between_pushes_ends_the_generator():
    """It would serve the weights that it has for ever."""

    async def scenario() -> None:
        async with Bench() as bench:
            await asyncio.to_thread(bench.engine.worker.close)
            stop = await bench.stop()
            assert stop.code == 1 and "gave this engine up: it failed while nothing was asked of it" in str(stop)
            assert "worker/0/0 left" in str(stop)
            await asyncio.to_thread(bench.dropped.wait, 30)
            assert [name for name, _ in bench.drops] == ["generator/0"]

    within(scenario)


def test_a_silent_engine_ends_the_generator():
    async def scenario() -> None:
        async with Bench() as bench:
            bench.engine.silent.set()
            stop = await bench.stop()
            assert stop.code == 1 and str(stop) == "EngineBroken: no token for any of 3 requests"

    within(scenario)


@pytest.mark.parametrize(("token_s", "batch_s", "expected"), [(120, 600, 120), (120, 90, 45)])
def test_a_silent_engine_is_replaced_before_the_controller_gives_the_run_up(token_s, batch_s, expected):
    async def scenario() -> None:
        bench = Bench()
        bench.cfg.generator.token_deadline_s, bench.cfg.deadline.batch_s = token_s, batch_s
        async with bench:
            assert bench.engine.limits == [expected]

    within(scenario)
