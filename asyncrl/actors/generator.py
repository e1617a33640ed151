"""One generator: a vLLM engine that serves prompts of the controller and takes weights from the publisher.

    python -m asyncrl.actors.generator --config RUN/config.json --name generator/0 --controller tcp://127.0.0.1:4711

It starts its engine, greets the controller, learns the publisher's address, subscribes there and says it is ready; the
weights that the trainers then push make it live. It ends with 0 when told to stop or when the run says goodbye, 1 when
it failed (the reason is the last line on stderr and goes to the controller), 143 after SIGTERM.

Invariants:
- no prompt is answered before weights are committed;
- every sample asked for is answered once, with tokens or with a failure that says why;
- nothing is drained on the way out: what was not answered is asked of another generator;
- an engine that hangs, in an update, with requests or inside a call that holds the event loop, ends this process with
  what was waited for; the publisher's word that it has given this engine up is heard at any moment;
- whatever ends this process ends the engine's processes too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from asyncrl.actors.engine import Completion, Engine, EngineBroken, Terms, prepare_environment
from asyncrl.actors.linking import keys_file, link_options
from asyncrl.actors.messages import CONTROLLER_SCHEMA, INTS, sample_message
from asyncrl.actors.watchdog import Watchdog
from asyncrl.config.files import load_config
from asyncrl.config.schema import Config
from asyncrl.rollouts.types import Sample
from asyncrl.transport.errors import DeadlineExpired, PeerLost, TransportError
from asyncrl.transport.frames import Message, array_of
from asyncrl.transport.links import Dialer
from asyncrl.weights.messages import PUBLISHER_SCHEMA, frontend_name

ENGINE_SHUTDOWN_S = 5.0
HELD = "a call that holds the event loop to return (generator.token_deadline_s, or half of deadline.batch_s)"


class Stop(Exception):
    """Told to stop, or found a reason to. ``code`` is the process's exit code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Generator:
    """Everything after the engine has started. ``run`` ends by raising ``Stop``."""

    def __init__(self, cfg: Config, name: str, engine: Engine, controller: str) -> None:
        self._cfg, self.name, self._engine = cfg, name, engine
        self._controller = Dialer(name, CONTROLLER_SCHEMA, controller, **link_options(cfg.transport))
        self._publisher: Dialer | None = None
        self._announced: tuple[float, int] = (0.0, 0)  # when, bytes
        self._ended: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, start_s: float) -> None:
        """Serve until a reason to end; raises ``Stop``. ``start_s``: seconds that the engine took to start."""
        self._spawn(self._live(start_s))
        self._spawn(self._watch_engine())
        self._spawn(self._watch_silence())
        self._spawn(self._watch_controller())
        raise await self._ended

    def end(self, stop: Stop) -> None:
        """Have ``run`` raise ``stop``; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(stop)

    async def close(self, reason: str) -> None:
        """Tell the controller ``reason``, if there is one, and leave."""
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(TransportError):  # it may be the controller's end that ends us
            if reason:
                await self._controller.send("generator_failed", {"reason": reason}, deadline_s=1)
                await self._controller.flush(deadline_s=1)
        for link in (self._publisher, self._controller):
            if link is not None:
                await link.close(linger_s=0.2)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def _live(self, start_s: float) -> None:
        cfg, controller = self._cfg, self._controller
        await controller.start(deadline_s=cfg.deadline.start_s)
        hello = {"pid": os.getpid(), "host": socket.gethostname(), "start_s": start_s}
        await controller.send("generator_hello", hello)
        while True:
            waiting_for = "prompts" if self._publisher else "the publisher's address (a trainer that is ready)"
            deadline_s = None if self._publisher else cfg.deadline.start_s
            self._from_controller(await controller.recv(deadline_s=deadline_s, waiting_for=waiting_for, auto_done=True))

    def _from_controller(self, message: Message) -> None:
        header = message.header
        match message.kind:
            case "generate":
                prompt = array_of(message.buffers[0], INTS, [message.buffers[0].nbytes // 4]).tolist()
                for index in header["indices"]:
                    terms = Terms(header["ordinal"], index, header["temperature"], header["max_tokens"])
                    self._spawn(self._answer(prompt, terms))
            case "welcome":
                self._spawn(self._follow(header["publisher"]))
            case "stop":
                self.end(Stop(0, header["reason"]))

    async def _answer(self, prompt: list[int], terms: Terms) -> None:
        completion = await self._engine.sample(prompt, terms)
        header, buffers = sample_message(_sample(terms, completion, self.name), completion.cached_tokens)
        await self._controller.send("sample", header, buffers, deadline_s=self._cfg.deadline.batch_s)

    async def _follow(self, endpoint: str) -> None:
        """Subscribe to the publisher and load what it sends."""
        cfg = self._cfg
        if self._publisher is not None:
            raise Stop(1, "the controller named a second publisher")
        self._publisher = link = Dialer(
            frontend_name(self.name), PUBLISHER_SCHEMA, endpoint, events=True, **link_options(cfg.transport)
        )
        await link.start(deadline_s=cfg.weights.deadline_s)
        await self._engine.link(
            publisher=endpoint,
            generator=self.name,
            keys_file=str(keys_file(cfg.transport) or ""),
            deadline_s=cfg.weights.deadline_s,
            plane=cfg.weights.backend,
            link={"heartbeat_s": cfg.transport.heartbeat_s, "dead_after_s": cfg.transport.dead_after_s},
        )
        commands: asyncio.Queue[Message] = asyncio.Queue()
        self._spawn(self._obey_publisher(link, commands))
        while True:
            message = await link.recv(deadline_s=None, waiting_for="new weights")
            if message.kind == "dropped":  # not behind the update that may be why
                raise Stop(1, f"the publisher gave this engine up: it {message.header['reason']}")
            commands.put_nowait(message)

    async def _obey_publisher(self, link: Dialer, commands: asyncio.Queue[Message]) -> None:
        """One after the other: a version is announced only to an engine that is done with the last one."""
        while True:
            message = await commands.get()
            await self._from_publisher(link, message)
            link.done(message)

    async def _from_publisher(self, link: Dialer, message: Message) -> None:
        header = message.header
        match message.kind:
            case "$joined":
                who = {"generator": self.name, "role": "frontend", "rank": -1, "workers": 0}
                # "generator_ready" makes the trainers push, and the publisher must know this engine by then.
                await link.send("subscribe", who, deadline_s=self._cfg.weights.deadline_s, wait="acked")
                await self._controller.send("generator_ready")
            case "announce":
                self._announced = (time.monotonic(), header["bytes"])
                await link.send("ready", {"version": header["version"]})
            case "load":
                await self._load(link, header["version"])

    async def _load(self, link: Dialer, version: int) -> None:
        try:
            pause_s = await self._engine.update(version, self._cfg.weights.deadline_s)
        except EngineBroken as error:
            with contextlib.suppress(DeadlineExpired):  # the publisher finds out by its own deadline
                await link.send("failed", {"version": version, "reason": str(error)}, deadline_s=5)
            raise
        await link.send("committed", {"version": version, "pause_s": pause_s})
        began, nbytes = self._announced
        seconds = time.monotonic() - began
        report = {"version": version, "seconds": seconds, "bytes": nbytes, "pause_s": pause_s}
        await self._controller.send("committed", report)

    async def _watch_engine(self) -> None:
        await self._engine.died()
        raise Stop(1, "vLLM's engine process ended")

    async def _watch_silence(self) -> None:
        await self._engine.stalled(silence_limit(self._cfg))

    async def _watch_controller(self) -> None:
        """A controller that says goodbye ends ``recv``; this is for one that has gone silent."""
        limit = self._cfg.transport.dead_after_s
        lost: float | None = None
        while True:
            await asyncio.sleep(limit / 10)
            if self._controller.connected or self._publisher is None:
                lost = None
            elif lost is None:
                lost = time.monotonic()
            elif time.monotonic() - lost > limit:
                raise Stop(1, f"no connection to the controller for {limit:g} s")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Stop):
            self.end(error)
        elif isinstance(error, PeerLost) and error.reason is not None:
            self.end(Stop(0, f"the run is over: {error.reason}"))
        elif error is not None:
            self.end(Stop(1, f"{type(error).__name__}: {error}"))


def silence_limit(cfg: Config) -> float:
    """Seconds without a token for a request, or without a turn of the event loop: replaced before the run is over."""
    return min(cfg.generator.token_deadline_s, cfg.deadline.batch_s / 2)


def _sample(terms: Terms, completion: Completion, name: str) -> Sample:
    return Sample(
        ordinal=terms.ordinal,
        index=terms.index,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        generator=name,
        failure=completion.failure,
    )


async def serve(cfg: Config, name: str, controller: str) -> int:
    """Start the engine and serve; returns the exit code."""
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    start_s = cfg.generator.start_deadline_s
    try:
        with Watchdog(loop, name, start_s, "vLLM to start (generator.start_deadline_s)"):
            engine = Engine(cfg.generator, cfg.model.path, cfg.seed)
    except Exception as error:  # noqa: BLE001 - whatever stops vLLM ends this process with its reason
        traceback.print_exc()
        print(f"{name}: vLLM did not start: {error}", file=sys.stderr, flush=True)
        return 1
    generator = Generator(cfg, name, engine, controller)
    # only now: EngineCore is a fork, and would share a wake-up descriptor installed before it
    terminated = Stop(128 + signal.SIGTERM, "")
    loop.add_signal_handler(signal.SIGTERM, generator.end, terminated)
    try:
        with Watchdog(loop, name, silence_limit(cfg), HELD):
            await generator.run(time.monotonic() - began)
        raise AssertionError("run ends by raising")
    except Stop as stop:
        if stop.code == 1:
            print(f"{name}: {stop}", file=sys.stderr, flush=True)
        await generator.close(str(stop) if stop.code == 1 else "")
        _shut_down(engine)
        return stop.code


def _shut_down(engine: Engine) -> None:
    """Ask vLLM to end its processes; those that do not are killed by the kernel when we end."""
    thread = threading.Thread(target=engine.shutdown, daemon=True)
    thread.start()
    thread.join(ENGINE_SHUTDOWN_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="one generator of a run")
    parser.add_argument("--config", required=True, type=Path, help="RUN/config.json")
    parser.add_argument("--name", required=True, help="generator/N, unique in the run")
    parser.add_argument("--controller", required=True, help="tcp://HOST:PORT")
    arguments = parser.parse_args()
    cfg = load_config(arguments.config)
    prepare_environment(cfg.generator, arguments.name)
    code = asyncio.run(serve(cfg, arguments.name, arguments.controller))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of vLLM and ZeroMQ may hold up an orderly end for seconds


if __name__ == "__main__":
    main()
