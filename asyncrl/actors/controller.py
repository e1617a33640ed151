"""The controller process: wires the conductor's parts, recovers a resumed run, writes the summary however it ends.

    python -m asyncrl.actors.controller --config RUN/config.json --ranks 1 --ready-fd 5

It binds its port before anything slow is imported, writes ``{"endpoint": ...}`` to the pipe ``--ready-fd``, and ends
with 0 when the run finished, 1 when it failed (the reason is the last line on stderr), 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.errors import RunFailed, RunInterrupted
from asyncrl.config.files import load_config
from asyncrl.config.schema import Config
from asyncrl.transport.links import Listener

if TYPE_CHECKING:
    from asyncrl.actors.conductor import Conductor
    from asyncrl.actors.progress import Progress


async def control(cfg: Config, run_dir: Path, ranks: int, ready_fd: int) -> int:
    """Run the controller; returns its exit code."""
    from asyncrl.actors.linking import listener_options
    from asyncrl.actors.messages import CONTROLLER_SCHEMA

    listener = Listener("controller", CONTROLLER_SCHEMA, **listener_options(cfg.transport))
    endpoint = await listener.start()
    os.write(ready_fd, (json.dumps({"endpoint": endpoint}) + "\n").encode())
    os.close(ready_fd)
    stop = asyncio.current_task()
    assert stop is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.cancel)
    try:
        return await _conduct(cfg, run_dir, ranks, listener)
    finally:
        await listener.close()


async def _conduct(cfg: Config, run_dir: Path, ranks: int, listener: Listener) -> int:
    from asyncrl.actors.progress import Progress
    from asyncrl.report.reporter import Reporter

    progress = Progress(cfg, Reporter(run_dir, cfg), time.monotonic)
    progress.reporter.status("starting the generators and trainers")
    counters: Callable[[], dict[str, Any] | None] = lambda: None  # noqa: E731
    try:
        async with opened(cfg, run_dir, ranks, listener, progress) as conductor:
            counters = conductor.desk.slots.counters
            await conductor.run()
        progress.finish("finished", "", counters())
        return 0
    except asyncio.CancelledError:
        progress.finish("interrupted", "stopped by SIGTERM", counters())
        return 143
    except BaseException as raised:  # noqa: BLE001 - the summary is written whatever ended the run
        error = _first(raised)
        reason = _reason(error, run_dir)
        progress.finish("interrupted" if isinstance(error, RunInterrupted) else "failed", reason, counters())
        print(f"controller: {reason}", file=sys.stderr)
        return 1


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


def _reason(error: BaseException, run_dir: Path) -> str:
    """One line for the user; the traceback of anything but a named failure goes to the run's log folder."""
    if isinstance(error, RunFailed):
        return str(error)
    log = run_dir / "logs" / "controller.log"
    with log.open("a") as file:
        traceback.print_exception(error, file=file)
    return f"{type(error).__name__}: {error} (traceback in {log})"


def main() -> int:
    parser = argparse.ArgumentParser(description="the controller of one run")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--ready-fd", required=True, type=int)
    arguments = parser.parse_args()
    cfg = load_config(arguments.config)
    return asyncio.run(control(cfg, arguments.config.parent, arguments.ranks, arguments.ready_fd))


if __name__ == "__main__":
    sys.exit(main())
