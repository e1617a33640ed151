"""What the jobs of a sweep came to, side by side: one line while they train, one table when they have ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from asyncrl.config.evaluation import badness, best_by
from asyncrl.config.files import replace_text
from asyncrl.config.schema import Config
from asyncrl.report.console import Console, ConsoleThread, short, span
from asyncrl.report.metrics import read_lines
from asyncrl.report.summary import Ended

TABLE = "adapters.json"


@dataclass(frozen=True)
class Ending:
    """How the job in ``folder`` ended."""

    folder: Path
    how: Ended
    reason: str = ""


class SweepReport:
    """``jobs``: (folder, configuration) of each; ``folder``: of the sweep, None for a single job without one.

    ``adapter_of``: a job's folder -> that of the adapter to use, None if it has saved none.
    """

    def __init__(
        self,
        cfg: Config,
        jobs: Sequence[tuple[Path, Config]],
        folder: Path | None,
        adapter_of: Callable[[Path], Path | None],
        stream: TextIO | None = None,
    ) -> None:
        self.jobs, self.folder, self._adapter_of = list(jobs), folder or jobs[0][0], adapter_of
        self.endings: list[Ending] = []
        self.began = time.monotonic()
        self.steps = self.tokens = 0
        self.training_s = 0.0
        self.predicted: list[tuple[float, float]] = []  # (seconds of steps, what no plan can beat) of each pack
        self._console = ConsoleThread(Console(stream or sys.stdout, cfg.report.console))

    def event(self, text: str, warning: bool = False) -> None:
        """Shown above the live line."""
        self._console.message(text, warning)

    def step(self, tokens: int, running: int) -> None:
        """One step of the pack, of ``running`` jobs, has learnt ``tokens``."""
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        seconds = time.monotonic() - self.began
        rate = f"tok/s trained {short(self.tokens / max(seconds, 1e-9))}"
        done = f"{len(self.endings)} of {len(self.jobs)} ended"
        self._console.status([f"step {self.steps} of the pack", f"{running} jobs", done, rate, span(seconds)])

    def predict(self, seconds: float, bound: float) -> None:
        """The steps of a pack will take so long, and at least ``bound`` whatever is packed with what."""
        self.predicted.append((seconds, bound))
        self.event(
            f"predicted: the steps of the pack take {seconds:.1f} s; no plan of them takes less than {bound:.1f} s"
        )

    def trained(self, seconds: float) -> None:
        """The steps of a pack have taken ``seconds``."""
        self.training_s += seconds

    def ended(self, ending: Ending) -> None:
        """One job has ended."""
        self.endings.append(ending)
        told = f": {ending.reason}" if ending.reason else ""
        self.event(f"{ending.folder.name} {ending.how}{told}", ending.how != "finished")

    def close(self) -> None:
        """Writes and shows the table of the jobs, best first."""
        rows = table(self.jobs, self.endings, self._adapter_of)
        seconds = time.monotonic() - self.began
        predicted, bound = (sum(pair[i] for pair in self.predicted) for i in (0, 1))
        told: dict[str, Any] = {"makespan_s": seconds, "steps_s": self.training_s}
        told |= {"steps_predicted_s": predicted or None, "steps_bound_s": bound or None}
        replace_text(self.folder / TABLE, json.dumps({**told, "adapters": rows}, indent=1) + "\n")
        for line in lines(rows):
            self.event(line)
        steps = f"{self.training_s:.1f} s of it steps" + (f" (predicted {predicted:.1f} s)" if predicted else "")
        self.event(f"makespan {seconds:.1f} s, {steps}; table in {self.folder / TABLE}")
        self._console.close()


def table(
    jobs: Iterable[tuple[Path, Config]], endings: Iterable[Ending], adapter_of: Callable[[Path], Path | None]
) -> list[dict[str, Any]]:
    """One row a job, best first by the metric that it compares checkpoints by; those without a figure come last."""
    how = {ending.folder: ending for ending in endings}
    rows = []
    for folder, cfg in jobs:
        records = list(read_lines(folder / "metrics.jsonl"))
        metric = best_by(cfg)
        scored = [(badness(metric, r[metric]), r["step"], r[metric]) for r in records if r.get(metric) is not None]
        best = min(scored, default=None)
        ending = how.get(folder)
        rows.append(
            {
                "job": folder.name,
                "metric": metric,
                "best": best and best[2],
                "best_step": best and best[1],
                **{key: _last(records, key) for key in ("eval/loss", "eval/accuracy", "train/loss")},
                "steps": max((r["step"] for r in records), default=0),
                "ended": ending.how if ending else "interrupted",
                "reason": ending.reason if ending else "",
                "adapter": str(adapter_of(folder) or ""),
            }
        )
    rows.sort(key=lambda row: (row["best"] is None, _order(row)))
    return rows


def _order(row: dict[str, Any]) -> tuple[float, str]:
    return (0.0 if row["best"] is None else badness(row["metric"], row["best"]), row["job"])


def _last(records: Sequence[dict[str, Any]], key: str) -> Any:
    found = [record[key] for record in records if record.get(key) is not None]
    return found[-1] if found else None


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table as text."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    head = ["adapter", "best", "at step", "held-out loss", "accuracy", "train loss", "steps", "ended"]
    cells = [head]
    for row in rows:
        figures = [number(row[key]) for key in ("eval/loss", "eval/accuracy", "train/loss")]
        at = "-" if row["best_step"] is None else str(row["best_step"])
        cells.append([row["job"], number(row["best"]), at, *figures, str(row["steps"]), row["ended"]])
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
