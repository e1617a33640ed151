"""The controller's figures: counts and busy time gathered as things happen, handed to the reporter once a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.actors.batches import Batch
from asyncrl.actors.evaluation import Evaluation
from asyncrl.actors.news import News
from asyncrl.config.schema import Config
from asyncrl.report.idle import BusyMeter, Clock, idle_share
from asyncrl.report.metrics import read_lines
from asyncrl.report.reporter import Reporter
from asyncrl.report.summary import Ended


class Progress:
    """Meters of one run. ``clock`` is monotonic seconds."""

    def __init__(self, cfg: Config, reporter: Reporter, clock: Clock, news: News) -> None:
        self.cfg, self.reporter, self.clock, self.news = cfg, reporter, clock, news
        self.totals: Counter[str] = Counter()
        self.sync: dict[str, Any] = {}
        self.sync_seconds = 0.0
        self._pushes: dict[int, dict[str, Any]] = {}  # the newest ones, by version
        self._trainer = BusyMeter(clock)
        self._generators: dict[str, BusyMeter] = {}
        self._busy: set[str] = set()
        self._span_began = False
        self._last_at = clock()
        self._last: Counter[str] = Counter()
        self.idle: dict[str, float | None] = {}

    def begin_training(self) -> None:
        """The span over which idle shares are taken begins: the first training prompt is dispatched."""
        if not self._span_began:
            self._span_began = True
            self.reporter.start_training()
            for meter in (self._trainer, *self._generators.values()):
                meter.start()

    def end_training(self) -> None:
        """The span ends with the last step; waiting for the final evaluation is not idleness."""
        for meter in (self._trainer, *self._generators.values()):
            meter.stop()

    def generator_load(self, name: str, samples_in_flight: int) -> None:
        """Note how many samples ``name`` now owes: it is busy while there is one."""
        meter = self._generators.get(name)
        if meter is None:
            meter = self._generators[name] = BusyMeter(self.clock)
            if self._span_began:
                meter.start()
        if samples_in_flight and name not in self._busy:
            self._busy.add(name)
            meter.begin()
        elif not samples_in_flight and name in self._busy:
            self._busy.remove(name)
            meter.end()

    def generated(self, tokens: int) -> None:
        self.totals["generated"] += tokens

    def synced(self, report: dict[str, Any]) -> None:
        """One engine committed a push; ``report`` is its ``committed`` message. Engines of one version are one push,
        as slow as the slowest."""
        version = report["version"]
        before = self._pushes.get(version, {})
        self.totals["syncs"] += not before
        found = {
            f"sync/{key}": max(report[key], before.get(f"sync/{key}", 0)) for key in ("seconds", "pause_s", "bytes")
        }
        self.sync_seconds += found["sync/seconds"] - before.get("sync/seconds", 0)
        self._pushes[version] = found
        newest = max(self._pushes)  # one engine's word of the push before may come after another's of this one
        self._pushes = {v: push for v, push in self._pushes.items() if v >= newest - 1}
        self.sync = self._pushes[newest]

    @property
    def restarts(self) -> int:
        """Generator processes started in the place of one that had died, over all attempts."""
        return self.totals["restarts"] + self.news.restarts

    def resume(self, checkpoint: int) -> None:
        """Go on counting from what earlier attempts of the run reported.

        Steps behind the ``checkpoint`` train again, so their tokens are not counted twice.
        """
        keys = {"generated": "tokens/generated", "restarts": "generators/restarts", "syncs": "sync/count"}
        earlier: dict[str, int] = {}
        for line in read_lines(self.reporter.run_dir / "metrics.jsonl"):
            earlier |= {name: int(line[key]) for name, key in keys.items() if key in line}
            self.sync_seconds = float(line.get("sync/seconds_total", self.sync_seconds))
            if line["step"] <= checkpoint:
                self.totals["trained"] = int(line.get("tokens/trained", self.totals["trained"]))
        self.totals.update(earlier)
        self._last = Counter(self.totals)

    def step(self, batch: Batch, report: dict[str, Any], counts: dict[str, Any], more: dict[str, Any]) -> None:
        """Report one step: the batch's figures, the trainer's, the conservation law, rates and idle shares."""
        now = self.clock()
        self._trainer.add(now - report["busy_s"], now)
        tokens = sum(len(s.token_ids) for s in batch.samples)
        self.totals["trained"] += 0 if report["skipped"] else tokens
        seconds = max(now - self._last_at, 1e-9)
        rates = {f"tokens/{k}_per_s": (self.totals[k] - self._last[k]) / seconds for k in ("generated", "trained")}
        self._last_at, self._last = now, Counter(self.totals)
        self.idle = {
            "idle/generator": idle_share(self._generators.values()),
            "idle/trainer": idle_share([self._trainer]),
        }
        self.reporter.step(
            {
                "step": batch.version + 1,
                **batch.metrics,
                **report["metrics"],
                **rates,
                "tokens/generated": self.totals["generated"],
                "tokens/trained": self.totals["trained"],
                **_groups(counts),
                **{key: share for key, share in self.idle.items() if share is not None},
                **self.sync,
                "sync/seconds_total": self.sync_seconds,
                "sync/count": self.totals["syncs"],
                "generators/restarts": self.restarts,
                # every skipped step skips a whole batch
                "train/skipped_total": sum(counts["skipped"].values()) // self.cfg.batch.groups,
                **more,
            }
        )

    def evaluated(self, evaluation: Evaluation, seconds: float) -> None:
        self.reporter.evaluation(
            evaluation.version,
            {
                "eval/accuracy": evaluation.accuracy,
                "eval/items": len(evaluation.results),
                "eval/failed": evaluation.failures,
                "eval/unreadable": evaluation.unreadable,
                "eval/too_long": evaluation.too_long,
                "eval/seconds": seconds,
            },
        )

    def event(self, text: str, warning: bool = False) -> None:
        self.reporter.event(text, warning=warning)

    def finish(self, ended: Ended, reason: str, counts: dict[str, Any] | None) -> None:
        """Write the summary; ``counts`` are the conservation law's terms at the end."""
        summary = self.reporter.summary(ended, reason)
        if counts is not None:
            law = summary.conservation
            law.dispatched, law.trained = counts["dispatched"], counts["trained"]
            law.skipped, law.failed = dict(counts["skipped"]), dict(counts["failed"])
            law.filtered = sum(counts["filtered"].values())
            law.buffered, law.in_training, law.in_flight = (
                counts["buffered"],
                counts["in_training"],
                counts["in_flight"],
            )
        summary.tokens_generated = self.totals["generated"]
        # since the last step too, if there ever was one
        summary.weight_syncs, summary.generator_restarts = self.totals["syncs"], self.restarts
        summary.weight_sync_s = self.sync_seconds if self.totals["syncs"] else None
        self.reporter.finish(summary)


def _groups(counts: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {
        f"groups/{k}": counts[k] for k in ("dispatched", "trained", "buffered", "in_training", "in_flight")
    }
    flat["groups/filtered"] = sum(counts["filtered"].values())
    for kind in ("skipped", "failed"):
        flat[f"groups/{kind}"] = sum(counts[kind].values())
        flat.update({f"groups/{kind}/{reason}": n for reason, n in counts[kind].items()})
    return flat
