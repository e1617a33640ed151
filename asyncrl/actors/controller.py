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
from pathlib import Path

from asyncrl.config.files import load_config
from asyncrl.config.schema import Config
from asyncrl.transport.links import Listener


async def control(cfg: Config, run_dir: Path, ranks: int, ready_fd: int) -> int:
    """Run the controller; returns its exit code."""
    from asyncrl.actors.messages import CONTROLLER_SCHEMA

    listener = Listener(
        "controller",
        CONTROLLER_SCHEMA,
        address=f"tcp://{cfg.transport.host}:0",
        heartbeat_s=cfg.transport.heartbeat_s,
        dead_after_s=cfg.transport.dead_after_s,
    )
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
    from asyncrl.actors.outbox import Outbox
    from asyncrl.actors.progress import Progress
    from asyncrl.report.reporter import Reporter

    reporter = Reporter(run_dir, cfg)
    progress = Progress(cfg, reporter, time.monotonic)
    reporter.status("starting the generators and trainers")
    parts = Parts(cfg, run_dir, ranks, listener, progress, Outbox(listener))
    try:
        await parts.open()
        await parts.conductor.run()
        progress.finish("finished", "", parts.counters())
        return 0
    except asyncio.CancelledError:
        progress.finish("interrupted", "stopped by SIGTERM", parts.counters())
        return 143
    except BaseException as error:  # noqa: BLE001 - the summary is written whatever ended the run
        reason = _reason(error, run_dir)
        progress.finish("failed", reason, parts.counters())
        print(f"controller: {reason}", file=sys.stderr)
        return 1
    finally:
        await parts.close()


class Parts:
    """What a conductor needs, opened in order and closed in reverse."""

    def __init__(self, cfg: Config, run_dir: Path, ranks: int, listener: Listener, progress, outbox) -> None:  # type: ignore[no-untyped-def]
        self.cfg, self.run_dir, self.ranks = cfg, run_dir, ranks
        self.listener, self.progress, self.outbox = listener, progress, outbox
        self.ledger = None
        self.rewards = None
        self.desk = None

    async def open(self) -> None:
        from transformers import AutoTokenizer

        from asyncrl.actors.conductor import Conductor
        from asyncrl.actors.prompting import PromptSource
        from asyncrl.actors.rollout_desk import RolloutDesk
        from asyncrl.envs.rewards import RewardPool
        from asyncrl.rollouts.ledger import Ledger

        cfg = self.cfg
        prompts = PromptSource(cfg, AutoTokenizer.from_pretrained(cfg.model.path))
        meta = {
            "seed": cfg.seed,
            "group_size": cfg.batch.group_size,
            "groups": cfg.batch.groups,
            **prompts.fingerprints,
        }
        self.ledger = Ledger(self.run_dir / "ledger", meta)
        self.rewards = RewardPool(cfg.env, cfg.reward)
        await self.rewards.start()
        self.desk = RolloutDesk(cfg, prompts, self.rewards, self.ledger, self.progress, self.outbox)
        self.conductor = Conductor(cfg, self.ranks, self.listener, self.desk, self.ledger, self.progress, self.outbox)
        if cfg.resume:
            self._recover()

    def _recover(self) -> None:
        from asyncrl.actors.recovering import recover_run

        recover_run(self.conductor, self.run_dir)

    def counters(self):  # type: ignore[no-untyped-def]
        return None if self.desk is None else self.desk.slots.counters()

    async def close(self) -> None:
        if self.rewards is not None:
            await self.rewards.close()
        if self.ledger is not None:
            self.ledger.close()


def _reason(error: BaseException, run_dir: Path) -> str:
    """One line for the user; the traceback of anything but a named failure goes to the run's log folder."""
    from asyncrl.config.errors import RunFailed

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
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
