"""The controller's loop: who is there, which version is where, what the trainers do next.

All state changes happen in one asyncio task, in reaction to a message or a finished score, followed by ``_pump``, which
does everything that has become possible. Nothing polls. Samples are acknowledged to their generator only after the
ledger has them.

Commands to the trainers, the same order on every rank so that their collectives match: ``batch v`` for v = 0, 1, ...;
``publish`` when a generator has joined; ``checkpoint``; ``stop``.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.actors.batches import Batch, cut, payloads
from asyncrl.actors.messages import sample_of
from asyncrl.actors.outbox import Outbox
from asyncrl.actors.patience import Patience
from asyncrl.actors.progress import Progress
from asyncrl.actors.recovering import recover_run
from asyncrl.actors.rollout_desk import RolloutDesk
from asyncrl.config.errors import RunFailed, RunInterrupted
from asyncrl.config.processes import is_running
from asyncrl.config.schema import Config
from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.types import Group
from asyncrl.transport.frames import Message
from asyncrl.transport.links import Listener

BATCHES_AHEAD = 2  # one in training and one waiting at the trainer, so that it never waits for a cut


class Conductor:
    """One run's conductor over ``ranks`` trainers. ``version`` counts the batches that the trainers have consumed."""

    def __init__(
        self,
        cfg: Config,
        ranks: int,
        listener: Listener,
        desk: RolloutDesk,
        ledger: Ledger,
        progress: Progress,
        outbox: Outbox,
    ) -> None:
        self.cfg, self.ranks, self.listener, self.desk = cfg, ranks, listener, desk
        self.ledger, self.progress, self.outbox = ledger, progress, outbox
        self.version = 0
        self.cut_version = 0
        self.saved_version = -1
        self._pruned_version = -1
        self.batches: dict[int, Batch] = {}  # cut, not yet reported
        self.trainers: dict[int, str] = {}
        self.publisher = ""
        self._pids: dict[str, int] = {}  # of the trainers on this host
        self._starting_versions: set[int] = set()
        self._replay: list[Batch] = []
        self._stopping = False
        self._inbox: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._handled: list[Message] = []  # to be acknowledged once the ledger has them
        self._patience = Patience(cfg.deadline, time.monotonic)

    def resume(self, version: int, replay: list[tuple[int, list[Group]]]) -> None:
        """Go on from a checkpoint of ``version``; ``replay`` are the cuts made since, applied again in order."""
        self.version = self.saved_version = self.cut_version = version
        for number, groups in replay:
            self._replay.append(cut(number, groups, self.cfg))
            self.desk.groups.update({group.ordinal: group for group in groups})

    # ---- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the last version is trained, evaluated and saved. Raises ``RunFailed`` with the reason."""
        async with asyncio.TaskGroup() as tasks:
            self.desk.tasks, self.desk.post = tasks, self._inbox.put_nowait
            self.outbox.start(tasks)
            receiving = tasks.create_task(self._receive())
            while not self._stopping:
                reactions = [await self._next_reaction()]
                while not self._inbox.empty():
                    reactions.append(self._inbox.get_nowait())
                with self.ledger.transaction():
                    for react in reactions:
                        react()
                self._acknowledge()
                self._pump()
                self._check_patience()
            await self.outbox.flush(self.cfg.deadline.shutdown_s)
            receiving.cancel()
            self.outbox.stop()

    async def _next_reaction(self) -> Callable[[], None]:
        if not self._inbox.empty():
            return self._inbox.get_nowait()  # it may be the progress that is waited for, however late it is read
        try:
            return await asyncio.wait_for(self._inbox.get(), self._patience.left_s)
        except TimeoutError:
            raise self._out_of_patience() from None

    def _check_patience(self) -> None:
        """However much happens: what is no progress does not prolong the wait. See ``patience``."""
        progress = (self.cut_version, self.version, self.saved_version, self.desk.advances)
        self._patience.note(progress, serving=bool(self.desk.fleet.live), saving=self._unsaved)
        if self._patience.left_s <= 0 and self._inbox.empty():
            raise self._out_of_patience()

    def _out_of_patience(self) -> RunFailed:
        return RunFailed(f"the controller waited {self._patience.limit_s:g} s for {self._waiting_for()}")

    def _waiting_for(self) -> str:
        if not self._complete:
            missing = sorted(set(range(self.ranks)) - set(self.trainers))
            return f"trainer ranks {missing} to start (deadline.start_s)"
        live = self.desk.fleet.live
        if not live:
            return f"a generator to serve version {self.version} (deadline.start_s); see the run's logs folder"
        waits = [f"{engine.name} to answer {engine.load} samples" for engine in live if engine.load]
        waits += [f"{engine.name} to serve version {self.version}" for engine in live if engine.version < self.version]
        if self.desk.scoring:
            waits.append(f"rewards of {self.desk.scoring} samples")
        if self.batches:
            waits.append(f"the trainers to report step {self.version + 1}")
        elif self._unsaved:
            waits.append(f"the trainers to save version {self.cut_version}")
        key = "checkpoint_s" if self._unsaved else "batch_s"
        return f"{' and '.join(waits) or f'batch {self.cut_version} to be full'} (deadline.{key})"

    async def _receive(self) -> None:
        while True:
            message = await self.listener.recv(deadline_s=None, waiting_for="any message to the controller")
            self._inbox.put_nowait(partial(self._handle, message))

    def _handle(self, message: Message) -> None:
        getattr(self, "_on_" + message.kind.replace("$", ""))(message)
        if not message.kind.startswith("$"):
            self._handled.append(message)

    def _acknowledge(self) -> None:
        for message in self._handled:
            self.listener.done(message)
        self._handled.clear()

    @property
    def _complete(self) -> bool:
        """Every trainer rank has reported."""
        return len(self.trainers) == self.ranks

    # ---- messages -------------------------------------------------------------------------------------------

    def _on_joined(self, message: Message) -> None:
        self.ledger.event("joined", peer=message.peer)

    def _on_left(self, message: Message) -> None:
        reason = message.header.get("reason", "connection lost")
        if message.peer.startswith("trainer/"):
            raise RunFailed(f"{message.peer} is gone: {reason}")
        self.ledger.event("left", peer=message.peer, reason=reason)
        if message.peer in self.desk.fleet:
            self.progress.event(f"{message.peer} is gone ({reason}); what it owed is asked for again", warning=True)
            self.desk.lose(message.peer)

    def _on_trainer_ready(self, message: Message) -> None:
        self.trainers[message.header["rank"]] = message.peer
        if message.header["host"] == socket.gethostname():
            self._pids[message.peer] = message.header["pid"]
        self.publisher = message.header["publisher"] or self.publisher
        self._starting_versions.add(message.header["version"])
        if not self._complete:
            return
        if len(self._starting_versions) > 1:
            raise RunFailed(f"the trainer ranks start from different versions: {sorted(self._starting_versions)}")
        if self.cfg.resume:
            recover_run(self, self._starting_versions.pop())
        for batch in self._replay:
            self._send_batch(batch)
        self._replay.clear()
        for engine in self.desk.fleet.joining:
            self._welcome(engine.name)

    def _on_trainer_failed(self, message: Message) -> None:
        self._blame_the_dead(message.peer)
        raise RunFailed(f"{message.peer} failed: {message.header['reason']}")

    def _on_interrupted(self, message: Message) -> None:
        self._blame_the_dead(message.peer)
        raise RunInterrupted(f"{message.peer} got {message.header['signal']}")

    def _blame_the_dead(self, witness: str) -> None:
        """A killed rank says nothing: the others fail in a collective, or get the SIGTERM that torchrun then sends."""
        for peer, pid in self._pids.items():
            if peer != witness and not is_running(pid):
                raise RunFailed(f"{peer} died (process {pid})")

    def _on_generator_hello(self, message: Message) -> None:
        if message.peer in self.desk.fleet:
            self.desk.lose(message.peer)
        self.desk.fleet.join(message.peer)
        if self._complete:
            self._welcome(message.peer)

    def _welcome(self, generator: str) -> None:
        self.outbox.put(generator, "welcome", {"publisher": self.publisher})

    def _on_generator_ready(self, message: Message) -> None:
        """The publisher knows its workers and its frontend: have the trainers push what they hold."""
        self._command("publish")

    def _on_generator_failed(self, message: Message) -> None:
        self.progress.event(f"{message.peer}: {message.header['reason']}", warning=True)

    def _on_committed(self, message: Message) -> None:
        self.desk.committed(message.peer, message.header["version"])
        self.progress.synced(message.header)

    def _on_dropped(self, message: Message) -> None:
        """A generator missed a deadline of the weight push. The publisher tells it so; it ends and is started again."""
        name, reason = message.header["generator"], message.header["reason"]
        if name in self.desk.fleet:
            self.progress.event(f"{name} is given up: {reason}", warning=True)
            self.desk.lose(name)

    def _on_served(self, message: Message) -> None:
        header = message.header
        self.desk.fleet.serves(header["generator"], header["version"], header["digest"])

    def _on_sample(self, message: Message) -> None:
        self.desk.sample(sample_of(message), message.peer)

    def _on_step(self, message: Message) -> None:
        report = message.header
        batch = self.batches.pop(report["version"])
        self.version = batch.version + 1
        if report["skipped"]:
            self.desk.slots.mark_skipped(batch.version, report["skipped"])
        else:
            self.desk.slots.mark_trained(batch.version)
        outcome = "skipped" if report["skipped"] else "trained"
        self.ledger.step(batch.version, outcome, report["metrics"], report["skipped"])
        self.progress.step(batch, report, self.desk.slots.counters(), self.desk.metrics())
        if self.progress.reporter.wants_rollouts(self.version):
            self.progress.reporter.rollouts(self.version, self.desk.rows(batch))
        self.desk.trained(batch.groups)
        if self.version == self.cfg.trainer.steps:
            self.progress.end_training()

    def _on_saved(self, message: Message) -> None:
        if message.peer == self.trainers[0]:
            self.saved_version = message.header["version"]
            self.ledger.checkpoint(self.saved_version)
            self.progress.event(f"checkpoint {message.header['path']}")

    # ---- what has become possible ---------------------------------------------------------------------------

    def _pump(self) -> None:
        if not self._complete:
            return
        self.desk.pump(self.version)
        self._cut()
        self._prune()
        if self._finished:
            for peer in [*(engine.name for engine in self.desk.fleet.live), *self.trainers.values()]:
                self.outbox.put(peer, "stop", {"reason": "finished"})
            self._stopping = True

    def _prune(self) -> None:
        """After every checkpoint but the last, which leaves the end of the run to be read."""
        if self._pruned_version < self.saved_version < self.cfg.trainer.steps:
            self.ledger.prune(self.cfg.checkpoint.keep)
            self._pruned_version = self.saved_version

    def _cut(self) -> None:
        while len(self.batches) < BATCHES_AHEAD and self.cut_version < self.cfg.trainer.steps:
            groups = self.desk.take()
            if groups is None:
                return
            batch = cut(self.cut_version, groups, self.cfg)
            self.ledger.cut(batch.version, [group.ordinal for group in groups])
            self._send_batch(batch)

    def _send_batch(self, batch: Batch) -> None:
        self.batches[batch.version] = batch
        self.cut_version = batch.version + 1
        budget, tp = self.cfg.trainer.token_budget, self.cfg.parallel.tp
        for rank, (header, buffers) in enumerate(payloads(batch, self.ranks, budget, tp)):
            self.outbox.put(self.trainers[rank], "batch", header, buffers)
        every = self.cfg.checkpoint.every
        if self.cut_version == self.cfg.trainer.steps or (every and self.cut_version % every == 0):
            self._command("checkpoint")

    def _command(self, kind: str, header: dict[str, Any] | None = None) -> None:
        """The same command to every trainer rank, in the same place of its stream."""
        for peer in self.trainers.values():
            self.outbox.put(peer, kind, header or {})

    @property
    def _unsaved(self) -> bool:
        """Everything is trained, and the last checkpoint is not complete."""
        return self.version == self.cfg.trainer.steps != self.saved_version

    @property
    def _finished(self) -> bool:
        last = self.cfg.trainer.steps
        return self.version == last and last in self.desk.evaluated and self.saved_version == last
