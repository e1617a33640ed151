"""Asynchronous GRPO: the loop of one trainer rank.

A rank does what the controller says, in the order it says it, and knows nothing of prompts, rewards or generators:

    batch v      train version v into v + 1, start pushing v + 1 to the engines, report the step
    publish      push the current version to engines that lack it (one has joined)
    checkpoint   save
    stop         leave

The push of version v + 1 overlaps with the next forward and backward: the trainer waits only until the bytes no longer
depend on live parameters, just before the optimizer changes them (``publisher.wait_gathered``).

Local rank 0 starts the supervisor, which starts the controller and the generators, before it imports torch: the
engines load while the trainer does.
"""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl.actors.children import Children
from asyncrl.config.context import RunContext
from asyncrl.config.schema import Config


def run(cfg: Config, context: RunContext) -> None:
    """Train as one rank until the controller says stop. Raises on any failure, which ends the run."""
    with Children(cfg, context) as children:
        train(cfg, context, children.controller)


def train(cfg: Config, context: RunContext, controller: str) -> None:
    """The rank's loop; ``controller`` is the endpoint it takes commands from."""
    from asyncrl.actors.messages import CONTROLLER_SCHEMA
    from asyncrl.training.checkpoint import latest_checkpoint
    from asyncrl.training.setup import open_rank
    from asyncrl.transport.blocking import BlockingDialer

    trainer, publisher = open_rank(cfg, context)
    if cfg.resume:
        trainer.load(latest_checkpoint(context.run_dir))
    with BlockingDialer(f"trainer/{context.rank}", CONTROLLER_SCHEMA, controller) as link, publisher:
        ready = {"rank": context.rank, "version": trainer.version, "publisher": publisher.endpoint}
        link.send("trainer_ready", ready)
        while True:
            waited = time.monotonic()
            command = link.recv(deadline_s=cfg.deadline.batch_s, waiting_for="the controller's next command")
            began = time.monotonic()
            match command.kind:
                case "batch":
                    report = trainer.step(command, before_update=publisher.wait_gathered)
                    publisher.publish(trainer.version)
                    if context.rank == 0:
                        link.send("step", step_report(report, began - waited, time.monotonic() - began))
                case "publish":
                    publisher.publish(trainer.version)
                case "checkpoint":
                    path: Path = trainer.save(context.run_dir / "checkpoints")
                    link.send("saved", {"version": trainer.version, "path": str(path)})
                case "stop":
                    break
            link.done(command)
