"""In the place of vLLM's AsyncLLM under an ``Engine``: it does nothing, or stops wherever a test wants it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from asyncrl.actors import engine
from asyncrl.actors.engine import Engine
from asyncrl.config.schema import GeneratorConfig

HANGS = ("pause_scheduler_async", "start_weight_update", "update_weights", "finish_weight_update", "resume_generation")


class FakeLLM:
    """``hang``: the method that never returns. No request is ever answered; ``draw`` gives one a token."""

    errored = False

    def __init__(self, hang: str = "") -> None:
        self._hang = hang
        self.called: list[str] = []
        self.engine_core = SimpleNamespace(
            pause_scheduler_async=lambda **_: self._step("pause_scheduler_async"), outputs_queue=_Booked()
        )
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self.output_handler = None

    async def _step(self, name: str) -> None:
        self.called.append(name)
        if name == self._hang:
            await asyncio.Event().wait()

    async def start_weight_update(self) -> None:
        await self._step("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self._step("update_weights")

    async def finish_weight_update(self) -> None:
        await self._step("finish_weight_update")

    async def resume_generation(self) -> None:
        await self._step("resume_generation")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._step("init_weight_transfer_engine")

    async def abort(self, request_ids: list[str]) -> None:
        await self._step("abort")

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.output_processor.external_req_ids[request_id] = [request_id]
        tokens = SimpleNamespace(count=0)
        tokens.num_output_tokens = lambda: tokens.count
        self.output_processor.request_states[request_id] = SimpleNamespace(detokenizer=tokens)
        await asyncio.Event().wait()
        yield  # makes this a generator

    def draw(self, request_id: str) -> None:
        self.output_processor.request_states[request_id].detokenizer.count += 1


class _Booked:
    def put_nowait(self, outputs: Any) -> None:
        """Booked at once."""

    def empty(self) -> bool:
        return True


def fake_engine(monkeypatch: Any, llm: FakeLLM) -> Engine:
    """A real ``Engine`` over ``llm``. Needs a running event loop."""
    monkeypatch.setattr(engine, "_start_llm", lambda cfg, model: llm)
    monkeypatch.setattr(engine, "stop_token_ids", lambda model: [1])
    return Engine(GeneratorConfig(), "", seed=0)
