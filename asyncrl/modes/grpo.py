"""Asynchronous GRPO: the loop of one trainer rank.

A rank does what the controller says, in the order it says it, and knows nothing of prompts, rewards or generators:

    batch v      train version v into v + 1, start pushing v + 1 to the engines, report the step
    publish      push the current version to engines that lack it (one has joined)
    checkpoint   copy the state, have it written while training goes on, report when the checkpoint is complete
    stop         leave

The push of version v + 1 overlaps with the next forward and backward: the trainer waits only until the bytes no longer
depend on live parameters, just before the optimizer changes them (``publisher.wait_gathered``).

Rank 0 starts the supervisor, which starts the controller and the generators, before it imports torch: the
engines load while the trainer does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.actors.children import Children, ControllerGone
from asyncrl.actors.linking import link_options, listener_options
from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config

if TYPE_CHECKING:
    from asyncrl.training.step import StepReport, Trainer
    from asyncrl.transport.blocking import BlockingDialer
    from asyncrl.transport.frames import Message
    from asyncrl.weights.publisher import WeightPublisher


def run(cfg: Config, context: RunContext) -> None:
    """Train as one rank until the controller says stop. Raises on any failure, which ends the run."""
    with Children(cfg, context) as children:
        train(cfg, context, children.controller)


def train(cfg: Config, context: RunContext, controller: str) -> None:
    """The rank's loop; ``controller`` is the endpoint it takes commands from."""
    from asyncrl.actors.messages import CONTROLLER_SCHEMA
    from asyncrl.training.opening import open_trainer
    from asyncrl.training.step import Trainer
    from asyncrl.transport.blocking import BlockingDialer
    from asyncrl.transport.errors import PeerLost, TransportError

    trainer = open_trainer(cfg, context, Trainer)
    with (
        BlockingDialer(f"trainer/{context.rank}", CONTROLLER_SCHEMA, controller, **link_options(cfg.transport)) as link,
        _open_publisher(cfg, context, trainer, link) as publisher,
    ):
        hello = {"rank": context.rank, "version": trainer.version, "publisher": publisher.endpoint}
        link.send("trainer_ready", {**hello, "pid": os.getpid(), "host": socket.gethostname()})
        try:
            _obey(cfg, context, trainer, publisher, link)
        except PeerLost as error:
            raise ControllerGone(error.reason or str(error)) from None
        except KeyboardInterrupt as stop:
            with contextlib.suppress(TransportError):  # the controller may be gone already
                link.send("interrupted", {"signal": str(stop)}, deadline_s=5, wait="acked")
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("trainer rank %d failed", context.rank)
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(TransportError):
                link.send("trainer_failed", {"reason": reason}, deadline_s=5, wait="acked")
            raise RunFailed(f"trainer/{context.rank} failed: {reason}") from error


def _obey(cfg: Config, context: RunContext, trainer: Trainer, publisher: WeightPublisher, link: BlockingDialer) -> None:
    from asyncrl.training import checkpoint
    from asyncrl.training.keeping import keep_of

    while True:
        waiting_since = time.monotonic()
        command = _next_command(cfg, link)
        waited = time.monotonic() - waiting_since
        match command.kind:
            case "batch":
                report = _step(trainer, publisher, command)
                busy = time.monotonic() - waiting_since - waited
                if context.rank == 0:
                    link.send("step", _report(report, waited, busy, trainer.saves.metrics()))
            case "publish":
                publisher.publish(trainer.version)
            case "checkpoint":
                _save(cfg, context, trainer, link)
            case "stop":
                trainer.end()
                if context.rank == 0:  # the last evaluation may have come after the last checkpoint
                    checkpoint.tidy(context.run_dir / "checkpoints", checkpoint.PREFIX, keep_of(cfg, context.run_dir))
                link.done(command)
                return
        link.done(command)


def _next_command(cfg: Config, link: BlockingDialer) -> Message:
    """What the controller wants next, however long that takes: it alone knows what is waited for, and ends the run.

    Raises ``PeerLost`` when it says goodbye, and ``DeadlineExpired`` when it has not been heard for
    ``deadline.batch_s``: one that hangs or cannot be reached ends no run.
    """
    from asyncrl.transport.errors import DeadlineExpired

    limit_s, unheard_s = cfg.deadline.batch_s, 0.0
    look_s = min(cfg.transport.dead_after_s, limit_s)
    while True:
        try:
            return link.recv(deadline_s=look_s, waiting_for="the controller's next command")
        except DeadlineExpired as expired:
            unheard_s = 0.0 if link.connected else unheard_s + look_s
            if unheard_s >= limit_s:
                reason = "a sign of life of the controller (deadline.batch_s)"
                raise DeadlineExpired(link.name, limit_s, reason, str(expired)) from None


def _step(trainer: Trainer, publisher: WeightPublisher, command: Message) -> StepReport:
    from asyncrl.rollouts.cut import decode

    version = command.header["version"]
    if version != trainer.version:
        raise RunFailed(f"batch {version} arrived at a trainer of version {trainer.version}")
    report = trainer.step(decode(command.header, command.buffers), before_update=publisher.wait_gathered)
    publisher.publish(trainer.version)
    return report


def _save(cfg: Config, context: RunContext, trainer: Trainer, link: BlockingDialer) -> None:
    """Begin a checkpoint. The controller hears of its end: from rank 0 that it is complete, from any that it failed."""
    from asyncrl.training import checkpoint
    from asyncrl.training.keeping import keep_of
    from asyncrl.transport.errors import TransportError

    version = trainer.version

    def tell(kind: str, **header: Any) -> None:
        with contextlib.suppress(TransportError):  # the rank's loop hears of it as well
            link.send(kind, header)

    def saved(path: Path) -> None:
        if context.rank == 0:
            tell("saved", version=version, path=str(path))

    def failed(error: Exception) -> None:
        tell("trainer_failed", reason=f"{type(error).__name__}: {error}")

    checkpoint.begin(
        trainer,
        context.run_dir / "checkpoints",
        keep_of(cfg, context.run_dir),
        on_saved=saved,
        on_failed=failed,
    )


def _open_publisher(cfg: Config, context: RunContext, trainer: Trainer, link: BlockingDialer) -> WeightPublisher:
    """This rank's end of the weight push. An engine that misses a deadline of it is reported to the controller."""
    from asyncrl.transport.errors import PeerLost
    from asyncrl.weights.planes import sending_plane
    from asyncrl.weights.publisher import WeightPublisher

    def tell(kind: str, **header: Any) -> None:
        with contextlib.suppress(PeerLost):  # the rank's loop hears of it as well
            link.send(kind, header)

    return WeightPublisher(
        trainer.published,
        wire_dtype=cfg.weights.dtype or cfg.generator.dtype,
        rank=context.rank,
        world=context.world_size,
        chunk_bytes=cfg.weights.chunk_bytes,
        window_bytes=cfg.weights.window_bytes,
        deadline_s=cfg.weights.deadline_s,
        plane=sending_plane(cfg.weights.backend, cfg.weights.chunk_bytes),
        on_drop=lambda engine, reason: tell("dropped", generator=engine, reason=reason),
        on_served=lambda engine, version, digest: tell("served", generator=engine, version=version, digest=digest),
        **listener_options(cfg.transport),
    )


def _report(report: StepReport, waited: float, busy: float, more: dict[str, float]) -> dict[str, Any]:
    """The ``step`` message: the batch's version, why it was skipped if it was, and the trainer's metrics."""
    metrics = {**report.metrics(), "time/batch_wait_s": waited, **more}
    return {"version": report.version - 1, "skipped": report.skipped, "metrics": metrics, "busy_s": busy}
