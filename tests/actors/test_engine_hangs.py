"""A vLLM that never answers is found out, whatever was asked of it. vLLM is a fake, ``Engine`` is real."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest

from asyncrl.actors.engine import Engine, EngineBroken, Terms
from tests.actors.fake_llm import HANGS, FakeLLM, fake_engine

LIMIT_S = 60  # of a test; what is tested ends in less than a second
STEPS = dict(
    zip(
        HANGS,
        ("pause generation", "start the update", "load the weights", "finish the update", "resume generation"),
        strict=True,
    )
)


def within(scenario) -> None:
    """Run a scenario; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.parametrize("step", HANGS)
def test_an_update_that_hangs_is_broken_off_and_says_in_which_step(monkeypatch, step):
    async def scenario() -> None:
        engine = fake_engine(monkeypatch, FakeLLM(hang=step))
        reason = f"the update to version 7 failed: waited 0.1 s for vLLM to {STEPS[step]} (weights.deadline_s)"
        with pytest.raises(EngineBroken, match=re.escape(reason)):
            await engine.update(7, deadline_s=0.1)

    within(scenario)


def test_an_update_that_does_not_hang_takes_all_its_steps(monkeypatch):
    async def scenario() -> None:
        llm = FakeLLM()
        engine = fake_engine(monkeypatch, llm)
        assert await engine.update(7, deadline_s=LIMIT_S) >= 0
        assert llm.called == list(HANGS) and engine.version == 7

    within(scenario)


def test_what_fails_in_an_update_is_not_called_late(monkeypatch):
    async def scenario() -> None:
        llm = FakeLLM()
        engine = fake_engine(monkeypatch, llm)

        async def fail(request: object) -> None:
            raise RuntimeError("no room")

        llm.update_weights = fail
        with pytest.raises(EngineBroken, match="the update to version 7 failed: no room"):
            await engine.update(7, deadline_s=LIMIT_S)

    within(scenario)


def test_workers_that_do_not_link_are_not_waited_for_for_ever(monkeypatch):
    async def scenario() -> None:
        monkeypatch.setattr("asyncrl.actors.engine.LINK_GRACE_S", 0.1)
        engine = fake_engine(monkeypatch, FakeLLM(hang="init_weight_transfer_engine"))
        with pytest.raises(EngineBroken, match=r"linking the workers .* waited 0\.3 s for vLLM's workers to answer"):
            await engine.link(deadline_s=0.1, publisher="tcp://127.0.0.1:1", generator="generator/0")

    within(scenario)


async def asked(engine: Engine, count: int) -> list[asyncio.Task]:
    """That many requests, all in the engine."""
    tasks = [asyncio.create_task(engine.sample([5, 6], Terms(0, i, 1.0, 16))) for i in range(count)]
    while engine.running < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_requests_that_get_no_token_break_the_engine(monkeypatch):
    async def scenario() -> None:
        engine = fake_engine(monkeypatch, FakeLLM())
        await engine.update(0, deadline_s=LIMIT_S)
        tasks = await asked(engine, 3)
        reason = r"waited 0\.2 s for vLLM to draw a token for any of 3 requests \(generator\.token_deadline_s"
        with pytest.raises(EngineBroken, match=reason):
            await engine.stalled(0.2)
        for task in tasks:
            task.cancel()

    within(scenario)


def test_a_request_that_a_dead_engine_fails_is_no_answer(monkeypatch):
    """verl-omni #433: what a dead engine raised was swallowed, its requests came back, and the trainer waited."""

    async def scenario() -> None:
        llm = FakeLLM()

        async def fail(prompt: object, params: object, request_id: str) -> AsyncIterator[object]:
            raise RuntimeError("EngineCore died")
            yield  # makes this a generator

        llm.generate = fail
        engine = fake_engine(monkeypatch, llm)
        await engine.update(0, deadline_s=LIMIT_S)
        with pytest.raises(EngineBroken, match="the engine failed a request: EngineCore died"):
            await engine.sample([5, 6], Terms(0, 0, 1.0, 16))

    within(scenario)


def test_a_token_of_any_request_is_progress(monkeypatch):
    async def scenario() -> None:
        llm = FakeLLM()
        engine = fake_engine(monkeypatch, llm)
        await engine.update(0, deadline_s=LIMIT_S)
        tasks = await asked(engine, 3)
        seen = [engine._progress()]
        for request_id in engine._running:
            llm.draw(request_id)
            seen.append(engine._progress())
        tasks[0].cancel()  # it takes its token with it
        await asyncio.wait(tasks[:1])
        seen.append(engine._progress())
        assert len(set(seen)) == 5, seen
        for task in tasks:
            task.cancel()

    within(scenario)


def test_requests_that_wait_for_an_update_are_not_held_against_the_engine(monkeypatch):
    """The update has a deadline of its own."""

    async def scenario() -> None:
        engine = fake_engine(monkeypatch, FakeLLM(hang="update_weights"))
        engine._serving.set()
        await asked(engine, 2)
        updating = asyncio.create_task(engine.update(1, deadline_s=LIMIT_S))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stalled(0.05), 0.5)
        assert not updating.done()

    within(scenario)
