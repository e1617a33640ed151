"""The controller process: wires the conductor's parts, recovers a resumed run, writes the summary however it ends.

    python -m asyncrl.actors.controller --config RUN/config.json --ranks 1 --ready-fd 5 --news-fd 6

It binds its port before anything slow is imported, writes ``{"endpoint": ...}`` to the pipe ``--ready-fd`` (or, when it
cannot, ``{"reason": ...}``), and ends
with 0 when the run finished, 1 when it failed, 143 after SIGTERM. The reason goes into the summary, to the console, and
with the goodbye to everyone who is linked. SIGTERM is an interruption, unless the supervisor has written to the pipe
``--news-fd`` why the run has failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.actors.news import News
from asyncrl.config.errors import RunFailed, RunInterrupted
from asyncrl.config.files import load_config
from asyncrl.config.schema import Config
from asyncrl.report.summary import Ended
from asyncrl.transport.links import Listener

if TYPE_CHECKING:
    from asyncrl.actors.conductor import Conductor
    from asyncrl.actors.progress import Progress
    from asyncrl.actors.rollout_desk import RolloutDesk


TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived during the start; a KeyboardInterrupt, because that is what asyncio lets through."""


async def control(cfg: Config, run_dir: Path, ranks: int, ready_fd: int, news: News) -> int:
    """Run the controller; returns its exit code."""
    from asyncrl.actors.linking import listener_options
    from asyncrl.actors.messages import CONTROLLER_SCHEMA

    listener = Listener("controller", CONTROLLER_SCHEMA, **listener_options(cfg.transport))
    try:
        endpoint = await listener.start()
    except OSError as error:
        os.write(ready_fd, (json.dumps({"reason": f"transport.host: {error}"}) + "\n").encode())
        return 1
    os.write(ready_fd, (json.dumps({"endpoint": endpoint}) + "\n").encode())
    os.close(ready_fd)
    ended, reason = await _conduct(cfg, run_dir, ranks, listener, news)
    with contextlib.suppress(asyncio.CancelledError):  # a SIGTERM that came as the run ended
        await listener.close(reason=reason or ended)
    return {"finished": 0, "failed": 1, "interrupted": TERMINATED}[ended]


async def _conduct(cfg: Config, run_dir: Path, ranks: int, listener: Listener, news: News) -> tuple[Ended, str]:
    """How the run ended, and why."""
    from asyncrl.actors.progress import Progress
    from asyncrl.report.reporter import Reporter

    stop = asyncio.current_task()
    assert stop is not None
    progress = Progress(cfg, Reporter(run_dir, cfg), time.monotonic, news)
    progress.reporter.status("starting the generators and trainers")
    desk: RolloutDesk | None = None
    try:
        async with opened(cfg, run_dir, ranks, listener, progress) as conductor:
            desk = conductor.desk
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop_once, stop)
            await conductor.run()
        how: tuple[Ended, str] = ("finished", "")
    except BaseException as raised:  # noqa: BLE001 - the summary is written whatever ended the run
        how = _end_of(_first(raised), run_dir, news)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun, and takes no longer than its own deadlines
    progress.finish(*how, desk.slots.counters() if desk else None)
    return how


@asynccontextmanager
async def opened(
    cfg: Config, run_dir: Path, ranks: int, listener: Listener, progress: Progress
) -> AsyncIterator[Conductor]:
    """The run's conductor with its tokenizer, environment, ledger and reward workers."""
    from transformers import AutoTokenizer

    from asyncrl.actors.conductor import Conductor
    from asyncrl.actors.outbox import Outbox
    from asyncrl.actors.prompting import PromptSource
    from asyncrl.actors.rollout_desk import RolloutDesk
    from asyncrl.envs.rewards import RewardPool
    from asyncrl.rollouts.ledger import Ledger

    prompts = PromptSource(cfg, AutoTokenizer.from_pretrained(cfg.model.path))
    meta = {
        "seed": cfg.seed,
        "groups": cfg.batch.groups,
        "group_size": cfg.batch.group_size,
        "max_staleness": cfg.staleness.max_steps,
        "window": cfg.staleness.window,
        **prompts.fingerprints,
    }
    outbox = Outbox(listener)
    with Ledger(run_dir / "ledger", meta) as ledger:
        async with RewardPool(cfg.env, cfg.reward) as rewards:
            desk = RolloutDesk(cfg, prompts, rewards, ledger, progress, outbox)
            yield Conductor(cfg, ranks, listener, desk, ledger, progress, outbox)


def _first(error: BaseException) -> BaseException:
    """What was raised first inside the task groups of the loop."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _end_of(error: BaseException, run_dir: Path, news: News) -> tuple[Ended, str]:
    """How a run that ``error`` ended has ended, and one line for the user.

    The traceback of anything but a named failure goes to the run's log folder.
    """
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return ("failed", news.failure) if news.failure else ("interrupted", "stopped by SIGTERM")
    if isinstance(error, RunFailed):
        return "interrupted" if isinstance(error, RunInterrupted) else "failed", str(error)
    log = run_dir / "logs" / "controller.log"
    with log.open("a") as file:
        traceback.print_exception(error, file=file)
    return "failed", f"{type(error).__name__}: {error} (traceback in {log})"


def _stop_once(task: asyncio.Task[int]) -> None:
    """Cancel ``task``; a second SIGTERM would cancel what it does to end in order."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task.cancel()


def _on_sigterm(signum: int, _frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise Terminated


def main() -> int:
    parser = argparse.ArgumentParser(description="the controller of one run")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--ready-fd", required=True, type=int, help="a pipe that gets the endpoint as JSON")
    parser.add_argument(
        "--news-fd", required=True, type=int, help="a pipe from the supervisor, see asyncrl.actors.news"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _on_sigterm)
    cfg = load_config(arguments.config)
    try:
        run = control(cfg, arguments.config.parent, arguments.ranks, arguments.ready_fd, News(arguments.news_fd))
        return asyncio.run(run)
    except KeyboardInterrupt:
        return TERMINATED


if __name__ == "__main__":
    sys.exit(main())
