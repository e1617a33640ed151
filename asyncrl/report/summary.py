"""``<run>/summary.json``: what one run came to, written once, atomically, whatever ended it.

Whoever outlives the reporter writes it in its place (``ensure_summary``); only when every process of the run is killed
at once there is none. Figures that no step reported are null. ``SummaryBuilder`` collects what the step metrics already
say, over all attempts of a resumed run, so that the controller only adds what it alone knows. Of an earlier attempt,
and of one whose reporter was killed, that is what its last step said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.config.files import replace_text
from asyncrl.report.metrics import read_lines

Ended = Literal["finished", "failed", "interrupted"]


@dataclass
class Conservation:
    """Counts of groups: dispatched = trained + skipped + filtered + failed + buffered + in training + in flight."""

    dispatched: int = 0
    trained: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> groups
    filtered: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # reason -> groups
    buffered: int = 0
    in_training: int = 0
    in_flight: int = 0

    @property
    def missing(self) -> int:
        """Groups unaccounted for; the law says 0."""
        ended = self.trained + sum(self.skipped.values()) + self.filtered + sum(self.failed.values())
        return self.dispatched - ended - self.buffered - self.in_training - self.in_flight


@dataclass
class Summary:
    """The fields of ``summary.json``. Seconds, tokens and counts are over all attempts of the run."""

    mode: str
    ended: Ended
    reason: str  # empty when it finished with its last step
    seed: int
    attempts: int = 1
    started: str = ""  # UTC, ISO 8601, of this attempt
    wall_s: float = 0.0
    steps: int = 0
    steps_skipped: int = 0
    steps_partial: int = 0  # with optim.in_backward: some layers stepped and others did not
    step_s_mean: float | None = None
    accuracy_initial: float | None = None  # greedy, held out, at the lowest step evaluated
    accuracy_final: float | None = None  # at the highest step evaluated
    accuracy_final_step: int | None = None
    accuracy_final_failed: int | None = None  # of its items, those whose answer got no score; they count as wrong
    reward_last: float | None = None
    tokens_generated: int = 0
    tokens_trained: int = 0
    tokens_generated_per_s: float | None = None  # over wall_s, starts and evaluations included
    tokens_trained_per_s: float | None = None
    staleness_max: int | None = None
    staleness_mean: float | None = None  # over trained tokens
    conservation: Conservation = field(default_factory=Conservation)
    idle_generator: float | None = None  # share of the training span
    idle_trainer: float | None = None
    weight_sync_s: float | None = None  # all pushes together
    weight_syncs: int = 0
    weight_sync_pause_s_mean: float | None = None
    mismatch_mean: float | None = None  # nat a token, over the tokens measured
    mismatch_max: float | None = None
    generator_restarts: int = 0
    nonfinite: int = 0
    lost_lines: int = 0
    wandb_dropped: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replaces the file as a whole.

        Raises:
            OSError: the file system refused; no half-written file stays behind.
            ValueError: a field holds NaN or an infinity.
        """
        replace_text(path, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")


def read_summary(path: Path) -> Summary:
    """The inverse of ``Summary.write``."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Summary(**{**data, "conservation": Conservation(**data["conservation"])})


def ensure_summary(run_dir: Path, mode: str, seed: int, ended: Ended, reason: str) -> Summary:
    """The summary of the attempt that has just ended; written here if whoever should have written it could not."""
    path = run_dir / "summary.json"
    if not path.exists():
        builder = SummaryBuilder()
        builder.attempt = 0
        for line in read_lines(run_dir / "metrics.jsonl"):
            builder.add(line)
        builder.build(mode, seed, ended, reason, 0.0).write(path)
    return read_summary(path)


class WeightedMean:
    """Mean of numbers with weights, added one by one; None of nothing."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._sum = 0.0

    def add(self, value: float | None, weight: float | None = 1.0) -> None:
        if value is not None and weight:
            self._sum += value * weight
            self.weight += weight

    @property
    def value(self) -> float | None:
        return self._sum / self.weight if self.weight else None


class SummaryBuilder:
    """Collects the figures that step metrics carry. Feed it every record in the order written."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {}  # newest value of each key
        self.steps = 0
        self.attempt = -1
        self._wall: dict[int, float] = {}  # attempt -> last time_s
        self._accuracy: dict[int, float] = {}  # step -> accuracy
        self._unscored: dict[int, int | None] = {}  # step -> held-out items without a score
        self._step_s, self._stale, self._pause, self._mismatch = (WeightedMean() for _ in range(4))
        self._max: dict[str, float] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """One record as ``MetricsWriter.write`` returned it, or as read back from the file."""
        attempt = record.get("attempt", 0)
        self.attempt = max(self.attempt, attempt)
        self._wall[attempt] = max(self._wall.get(attempt, 0.0), record.get("time_s", 0.0))
        if record.get("eval/accuracy") is not None:
            self._accuracy[record["step"]] = record["eval/accuracy"]
            self._unscored[record["step"]] = record.get("eval/failed")
        if "step_s" not in record:  # an evaluation, which may be of an older step
            return
        self.latest.update({key: value for key, value in record.items() if value is not None})
        self.steps = record["step"]
        if not self.steps:
            return
        self._step_s.add(record.get("step_s"))
        self._stale.add(record.get("staleness/mean"), record.get("train/tokens"))
        self._mismatch.add(record.get("mismatch/abs_mean"), record.get("mismatch/tokens"))
        self._pause.add(record.get("sync/pause_s"))
        for key in ("staleness/max", "mismatch/abs_max"):
            if record.get(key) is not None:
                self._max[key] = max(self._max.get(key, 0.0), record[key])

    def build(self, mode: str, seed: int, ended: Ended, reason: str, wall_s: float) -> Summary:
        """The summary so far; ``wall_s`` is the time of the present attempt."""
        wall = sum(self._wall.values()) - self._wall.get(self.attempt, 0.0) + wall_s
        steps_evaluated = sorted(self._accuracy)
        generated, trained = (int(self.latest.get(f"tokens/{kind}", 0)) for kind in ("generated", "trained"))
        return Summary(
            mode=mode,
            ended=ended,
            reason=reason,
            seed=seed,
            attempts=self.attempt + 1,
            wall_s=wall,
            steps=self.steps,
            steps_skipped=self.latest.get("train/skipped_total", 0),
            steps_partial=self.latest.get("train/partial_total", 0),
            step_s_mean=self._step_s.value,
            accuracy_initial=self._accuracy[steps_evaluated[0]] if steps_evaluated else None,
            accuracy_final=self._accuracy[steps_evaluated[-1]] if steps_evaluated else None,
            accuracy_final_step=steps_evaluated[-1] if steps_evaluated else None,
            accuracy_final_failed=self._unscored[steps_evaluated[-1]] if steps_evaluated else None,
            reward_last=self.latest.get("reward/mean"),
            tokens_generated=generated,
            tokens_trained=trained,
            tokens_generated_per_s=generated / wall if wall else None,
            tokens_trained_per_s=trained / wall if wall else None,
            staleness_max=int(self._max["staleness/max"]) if "staleness/max" in self._max else None,
            staleness_mean=self._stale.value,
            conservation=self._conservation(),
            idle_generator=self.latest.get("idle/generator"),
            idle_trainer=self.latest.get("idle/trainer"),
            weight_sync_s=self.latest.get("sync/seconds_total"),
            weight_syncs=self.latest.get("sync/count", 0),
            weight_sync_pause_s_mean=self._pause.value,
            mismatch_mean=self._mismatch.value,
            mismatch_max=self._max.get("mismatch/abs_max"),
            generator_restarts=self.latest.get("generators/restarts", 0),
        )

    def _conservation(self) -> Conservation:
        def by_reason(kind: str) -> dict[str, int]:
            prefix = f"groups/{kind}/"
            found = {key[len(prefix) :]: value for key, value in self.latest.items() if key.startswith(prefix)}
            total = self.latest.get(f"groups/{kind}", 0)
            unnamed = total - sum(found.values())
            return {**found, "unnamed": unnamed} if unnamed > 0 else found

        names = ("dispatched", "trained", "filtered", "buffered", "in_training", "in_flight")
        counts = {name: self.latest.get(f"groups/{name}", 0) for name in names}
        return Conservation(**counts, skipped=by_reason("skipped"), failed=by_reason("failed"))
