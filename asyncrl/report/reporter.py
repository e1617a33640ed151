"""The one place that the controller reports to: metrics file, console, W&B, events and the summary.

    reporter = Reporter(run_dir, cfg)
    reporter.status("starting vLLM")
    reporter.evaluation(0, {"eval/accuracy": 0.41})
    reporter.start_training()
    reporter.step({"step": 1, "reward/mean": 0.5, ...})
    reporter.event("generator/0 restarted", warning=True)
    if reporter.wants_rollouts(1):
        reporter.rollouts(1, rows)
    reporter.finish(reporter.summary("finished"))

No call waits for a terminal or a network; files in the run folder are written by the caller's thread (one small
``write`` each). ``finish`` is the only call that may take seconds, and has a deadline.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from asyncrl.config.schema import Config
from asyncrl.report.console import Console, ConsoleThread, short, span
from asyncrl.report.machine import machine, versions
from asyncrl.report.metrics import MetricsWriter, read_lines
from asyncrl.report.summary import Ended, Summary, SummaryBuilder
from asyncrl.report.wandb_writer import WandbWriter

ROLLOUT_COLUMNS = ("step", "prompt", "completion", "reward", "advantage", "version", "finish_reason", "generator")
GENERATION_COLUMNS = ("step", "prompt", "answer", "reference", "ended", "score", "failure")
_PACE = 0.2  # weight of the newest step in the running mean of seconds a step


class Reporter:
    """Opens ``<run>/metrics.jsonl``, ``<run>/events.jsonl`` and the W&B run; continues them when the run is resumed.

    Args:
        run_dir: the run's folder, which exists.
        cfg: composed configuration.
        clock: monotonic seconds.
        stream: the console's.
        wandb: a started writer instead of the one that ``cfg`` asks for.
    """

    def __init__(
        self,
        run_dir: Path | str,
        cfg: Config,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
        wandb: WandbWriter | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._cfg = cfg
        self._clock = clock
        self._began = clock()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._builder = SummaryBuilder()
        for line in read_lines(self.run_dir / "metrics.jsonl"):
            self._builder.add(line)
        self.attempt = self._builder.attempt + 1
        self._builder.attempt = self.attempt
        self._console = ConsoleThread(Console(stream or sys.stdout, cfg.report.console))
        self._metrics = MetricsWriter(self.run_dir / "metrics.jsonl", clock, lambda text: self.event(text, True))
        self._events = open(self.run_dir / "events.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._events_lock = threading.Lock()
        self._step_at = self._began
        self._training = False  # whether step_s measures steps alone yet
        self._pace: float | None = None
        self._accuracy: float | None = None
        self._heldout_loss: Any = None
        self._finished = False
        if wandb is None and cfg.report.wandb.enabled:
            name = cfg.run.name or self.run_dir.resolve().name
            wandb = WandbWriter(self.run_dir, cfg.report.wandb, name, asdict(cfg), self.event)
        self._wandb = wandb

    def start_training(self) -> None:
        """The training span starts now: the first step's ``step_s`` counts from here, not from the start of engines."""
        self._step_at, self._training = self._clock(), True

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Report one optimizer step: ``metrics`` has ``step`` (steps done) and any declared keys.

        ``time_s``, ``attempt``, ``step_s`` and ``report/*`` are filled in here.

        Raises:
            UndeclaredMetric, TypeError: a key that is not declared, a value of the wrong type; nothing is written.
        """
        now = self._clock()
        seconds = now - self._step_at
        record = {"step": metrics["step"], **self._axes(now), "step_s": seconds, **metrics}
        if "train/tokens" in metrics:  # a mode that generates knows its rates itself
            record.setdefault("tokens/trained_per_s", metrics["train/tokens"] / max(seconds, 1e-9))
        if self._wandb is not None and self._wandb.dropped:
            record["report/wandb_dropped"] = self._wandb.dropped
        record = self._metrics.write(record)
        self._step_at = now
        if self._training:
            self._pace = seconds if self._pace is None else (1 - _PACE) * self._pace + _PACE * seconds
        self._training = True
        self._builder.add(record)
        self._console.status(self._line(record))
        if self._wandb is not None:
            self._wandb.log(record)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report the held-out evaluation of version ``step``: ``eval/*`` keys. Later steps may be reported already."""
        undue = [key for key in metrics if not key.startswith("eval/")]
        if undue:
            raise ValueError(f"an evaluation reports eval/* keys only, not {', '.join(undue)}")
        record = self._metrics.write({"step": step, **self._axes(self._clock()), **metrics})
        self._builder.add(record)
        self._heldout_loss = record.get("eval/loss", self._heldout_loss)
        accuracy = record.get("eval/accuracy")
        if isinstance(accuracy, float | int):
            self._accuracy = accuracy
            self.event(f"held-out accuracy {accuracy:.3f} at step {step}")
        if self._wandb is not None:
            self._wandb.log(record)

    def wants_rollouts(self, step: int) -> bool:
        """Whether a table is due at ``step``; ask before decoding texts for it."""
        every = self._cfg.report.wandb.rollouts_every
        return self._wandb is not None and every > 0 and (step % every == 0 or step == 1)

    def rollouts(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Send the first ``report.wandb.rollouts_rows`` of ``rows`` (keys: ``ROLLOUT_COLUMNS``) as a table."""
        self._table("rollouts", step, ROLLOUT_COLUMNS, rows)

    def generations(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Held-out answers of version ``step``: a line of ``generations.jsonl`` each, the first ones as a table.

        ``rows``: dicts with the keys ``GENERATION_COLUMNS``. The first is shown on the console.
        """
        if not rows:
            return
        records = [{"step": step, "attempt": self.attempt, **row} for row in rows]
        try:
            with open(self.run_dir / "generations.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:  # a full disk, which costs these lines and not the run
            self.event(f"generations.jsonl: lines lost: {error}", warning=True)
        first = rows[0]
        asked, answer, known = first["prompt"][-60:], first["answer"][:80], first["reference"][:60]
        self.event(f"step {step} answers {asked!r} with {answer!r} (in the data {known!r})")
        self._table("generations", step, GENERATION_COLUMNS, records)

    def _table(self, name: str, step: int, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        if self._wandb is not None:
            self._wandb.table(name, step, columns, rows[: self._cfg.report.wandb.rollouts_rows])

    def event(self, text: str, warning: bool = False) -> None:
        """Show ``text`` above the live line and keep it in ``events.jsonl``. Any thread may call it."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "step": self._builder.steps, "level": "warning" if warning else "info", "text": text}
        with self._events_lock:
            if not self._events.closed:
                try:
                    self._events.write(json.dumps(record) + "\n")
                except OSError as error:  # a full disk; the console still says it
                    self._console.message(f"events.jsonl: line lost: {error}", True)
        self._console.message(text, warning)

    def status(self, text: str) -> None:
        """What the run does while there is no step to show, e.g. starting engines."""
        self._console.status([text, span(self._clock() - self._began)])

    def summary(self, ended: Ended, reason: str = "") -> Summary:
        """The summary that the reported steps give; set what they do not carry before ``finish``."""
        cfg = self._cfg
        result = self._builder.build(cfg.mode, cfg.seed, ended, reason, self._clock() - self._began)
        result.started, result.versions, result.machine = self._started, versions(), machine()
        result.nonfinite, result.lost_lines = self._metrics.nonfinite, self._metrics.lost_lines
        return result

    def finish(self, summary: Summary, deadline_s: float = 10.0) -> None:
        """End W&B, write ``summary.json``, close everything. A second call does nothing.

        Raises:
            OSError: ``summary.json`` cannot be written.
        """
        if self._finished:
            return
        self._finished = True
        for kind in ("generated", "trained"):  # the caller may have corrected the counts
            rate = getattr(summary, f"tokens_{kind}") / summary.wall_s if summary.wall_s else None
            setattr(summary, f"tokens_{kind}_per_s", rate)
        try:
            summary.write(self.run_dir / "summary.json")  # first: nothing after it may cost us the summary
            if self._wandb is not None:
                fields = asdict(summary)
                failed = 0 if summary.ended == "finished" else 1
                summary.wandb_dropped = self._wandb.finish(fields, failed, deadline_s)
                if summary.wandb_dropped:
                    summary.write(self.run_dir / "summary.json")
        finally:
            self.event(closing_line(summary), summary.ended != "finished")
            self._metrics.close()
            with self._events_lock:
                self._events.close()
            self._console.close()

    def _axes(self, now: float) -> dict[str, Any]:
        return {"time_s": now - self._began, "attempt": self.attempt}

    def _line(self, record: Mapping[str, Any]) -> list[str]:
        total = self._cfg.trainer.steps
        left = None if self._pace is None else self._pace * max(0, total - record["step"])

        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:.3f}"

        step, trained = f"step {record['step']}/{total}", short(record.get("tokens/trained_per_s"))
        if self._cfg.mode == "sft":
            losses = f"loss {number(record.get('train/loss'))}", f"held out {number(self._heldout_loss)}"
            known = [f"accuracy {number(self._accuracy)}"] if self._accuracy is not None else []
            return [step, *losses, *known, f"left {span(left)}", f"tok/s trained {trained}"]
        stale, most = record.get("staleness/mean"), record.get("staleness/max")
        return [
            step,
            f"reward {number(record.get('reward/mean'))}",
            f"accuracy {number(self._accuracy)}",
            "staleness -" if stale is None else f"staleness {stale:.2f} (max {most})",
            f"left {span(left)}",
            f"tok/s generated {short(record.get('tokens/generated_per_s'))}",
            f"trained {trained}",
        ]


def closing_line(summary: Summary) -> str:
    """The run in one line, for the end of the console."""
    how = f"{summary.ended}: {summary.reason}" if summary.reason else summary.ended
    accuracy = ""
    if summary.accuracy_initial is not None and summary.accuracy_final is not None:
        accuracy = f", held-out accuracy {summary.accuracy_initial:.3f} -> {summary.accuracy_final:.3f}"
    dropped = f", {summary.wandb_dropped} records not in W&B" if summary.wandb_dropped else ""
    return f"{how} after {summary.steps} steps in {span(summary.wall_s)}{accuracy}{dropped}"
