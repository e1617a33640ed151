"""Many adapters at once: the loops of mode=sft, one a job, over slots of one base.

    every loop: data -> batch  |  all batches -> one step of the pack -> every loop its own report  |  repeat

Each job is a run of its own, with folder, metrics, summary, checkpoints and adapter as mode=sft makes them, and either
goes on where the other ended. So nothing here knows of evaluation, checkpoints or resuming: a job that starts late,
ends early or fails is a loop that begins or ends, and a pack that was killed is loops that resume where each one was.

A job fails alone. One whose steps are not finite ``packing.strikes`` times in a row begins again at its last
checkpoint; if it comes to that again before the next one, it ends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl.actors.ending import how_it_ended
from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.packing import base_of
from asyncrl.config.schema import Config
from asyncrl.lora.forecast import Forecast, Left
from asyncrl.lora.pack import PackTrainer
from asyncrl.lora.slot import Slot
from asyncrl.modes import sft
from asyncrl.report.summary import ensure_summary
from asyncrl.report.sweep import Ending, SweepReport
from asyncrl.training import checkpoint
from asyncrl.training.errors import CheckpointError
from asyncrl.training.metrics import StepReport

log = logging.getLogger(__name__)
Runs = Sequence[tuple[Config, RunContext]]


def run(runs: Runs, sweep_dir: Path | None, ended_well: Callable[[RunContext], None]) -> None:
    """Trains all ``runs``, those with one base together. ``ended_well`` is told of each that finishes.

    Raises ``RunFailed``, when all have ended, if any has failed.
    """
    if not runs:
        return
    report = SweepReport(runs[0][0], [(context.run_dir, cfg) for cfg, context in runs], sweep_dir, adapter_of)
    try:
        for _, members in groupby(sorted(runs, key=lambda run: base_of(run[0])), key=lambda run: base_of(run[0])):
            Pack([Job(cfg, context) for cfg, context in members], report, ended_well).train()
    except BaseException as error:
        how = how_it_ended(error)
        for cfg, context in runs:
            ensure_summary(context.run_dir, cfg.mode, cfg.seed, *how)
        raise
    finally:
        report.close()
    if failed := [ending for ending in report.endings if ending.how != "finished"]:
        told = "; ".join(f"{ending.folder.name}: {ending.reason}" for ending in failed[:3])
        raise RunFailed(f"{len(failed)} of {len(runs)} jobs failed: {told}")


def adapter_of(run_dir: Path) -> Path | None:
    """Of the best checkpoint if that is kept, else of the newest."""
    chosen = checkpoint.preferred(run_dir / "checkpoints")
    return chosen and chosen / "adapter"


class Job:
    """One run: its loop while it goes, the slot it trains in, and what it waits to learn."""

    def __init__(self, cfg: Config, context: RunContext) -> None:
        wandb = cfg.report.wandb
        wandb = replace(wandb, group=wandb.group or context.run_dir.parent.name)
        # The pack has the console.
        self.cfg = replace(cfg, report=replace(cfg.report, console="none", wandb=wandb))
        self.context = context
        self.slot: Slot | None = None
        self.samples: list[Any] = []
        self.loop: sft.Loop | None = None
        self.begun_at = -1  # the checkpoint that it last began again from

    @property
    def name(self) -> str:
        return self.context.run_dir.name

    def begin(self, pack: PackTrainer) -> None:
        """A new loop, which goes on from the job's last checkpoint if the configuration says so."""

        def open_slot(cfg: Config, context: RunContext, kind: type, data: dict[str, Any], prepare: Any) -> Slot:
            self.slot = slot = Slot(pack, cfg)
            slot.data = data
            slot.saves.open()
            prepare(slot)
            if cfg.resume:
                slot.load_latest(context.run_dir / "checkpoints")
            return slot

        self.loop = sft.job(self.cfg, self.context, open_slot)

    def go_on(self, report: StepReport | None) -> Ending | None:
        """To the loop's next batch; how the job ended if there is none."""
        assert self.loop is not None
        try:
            _, self.samples = self.loop.send(report)  # type: ignore[arg-type]
            return None
        except StopIteration as end:
            ending = Ending(self.context.run_dir, "finished", end.value)
        except Exception as error:
            if not isinstance(error, RunFailed):
                log.exception("asyncrl: job %s failed", self.name)
            ending = Ending(self.context.run_dir, *how_it_ended(error))
        self.leave()
        return ending

    def stop(self, error: BaseException) -> Ending:
        """Throws ``error`` into the loop, which ends by it."""
        assert self.loop is not None
        try:
            self.loop.throw(error)
        except BaseException as same:  # noqa: BLE001 - it comes back, and is the caller's already
            ending = Ending(self.context.run_dir, *how_it_ended(same))
        self.leave()
        return ending

    def leave(self) -> None:
        """The slot is free."""
        if self.slot is not None:
            self.slot.close()
        self.slot = self.loop = None


class Pack:
    """Jobs with one base: as many at a time as there are slots, the next when one ends."""

    def __init__(self, jobs: Sequence[Job], report: SweepReport, ended_well: Callable[[RunContext], None]) -> None:
        self.waiting, self.active = deque(jobs), list[Job]()
        self.report, self.ended_well = report, ended_well
        self.packing = jobs[0].cfg.packing
        self.trainer = PackTrainer(jobs[0].cfg)
        self.forecast = Forecast(self.packing.slots or len(jobs), self.packing.token_cap)

    def train(self) -> None:
        """Until every job has ended. What ends the pack itself is thrown into every loop, and raised."""
        try:
            self.fill()
            while self.active:
                slots = {job.slot: job for job in self.active if job.slot is not None}
                reports = self.learn(slots)
                for slot, report in reports.items():
                    job = slots[slot]
                    if slot.strikes >= self.packing.strikes:
                        self.strike(job, report)
                    else:
                        self.see(job, job.go_on(report))
                self.fill()
            self.report.trained(self.forecast.seconds)
        except BaseException as error:
            for job in list(self.active):
                self.see(job, job.stop(error))
            raise

    def learn(self, slots: Mapping[Slot, Job]) -> dict[Slot, StepReport]:
        """A step of all ``slots`` on what their jobs wait to learn; says once how long the rest will take."""
        began = time.perf_counter()
        reports = self.trainer.learn({slot: job.samples for slot, job in slots.items()})
        seconds = time.perf_counter() - began
        self.report.step(sum(report.tokens for report in reports.values()), len(reports))
        batches = {job.name: (job.samples, slot.settings.rank) for slot, job in slots.items()}
        if self.forecast.see(batches, seconds):
            left = [
                Left(job.name, job.cfg.trainer.steps - slot.version, slot.settings.rank) for slot, job in slots.items()
            ]
            left += [Left(job.name, job.cfg.trainer.steps, job.cfg.lora.rank) for job in self.waiting]
            found = self.forecast.plan(left)
            self.report.predict(self.forecast.seconds + found.outcome.seconds, self.forecast.seconds + found.bound)
        return reports

    def fill(self) -> None:
        """Starts waiting jobs while there are slots."""
        most = self.packing.slots or len(self.waiting) + len(self.active)
        while self.waiting and len(self.active) < most:
            self.start(self.waiting.popleft())

    def start(self, job: Job) -> None:
        job.begin(self.trainer)
        self.active.append(job)
        self.see(job, job.go_on(None))

    def see(self, job: Job, ending: Ending | None) -> None:
        """Takes a job that has ended out of the pack."""
        if ending is None:
            return
        self.active.remove(job)
        self.report.ended(ending)
        if ending.how == "finished":
            self.ended_well(job.context)

    def strike(self, job: Job, report: StepReport) -> None:
        """A job whose steps are not finite goes back to its last checkpoint, or ends."""
        assert job.slot is not None
        with suppress(CheckpointError):  # one that could not be written is not the last
            job.slot.saves.wait()
        last = f"step {report.version}: {report.skipped or 'weights_not_finite'}"
        why = f"{self.packing.strikes} steps in a row were not finite ({last})"
        newest = checkpoint.latest(job.context.run_dir / "checkpoints")
        version = -1 if newest is None else int(newest.name.rpartition("_")[2])
        if version <= job.begun_at:
            remedy = "lower optim.lr, or find the batch with mode=sft and optim.max_loss"
            self.see(job, job.stop(RunFailed(f"{why}, and no checkpoint was saved since it last began: {remedy}")))
            return
        job.stop(RunFailed(f"{why}: it begins again at {newest}"))
        self.active.remove(job)
        self.report.event(f"{job.name}: {why}: begins again at step {version}")
        (job.context.run_dir / "summary.json").unlink(missing_ok=True)
        job.cfg.resume, job.begun_at = str(job.context.run_dir), version
        self.start(job)
