"""Which checkpoints stay: the newest, and the best of those that have been evaluated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.evaluation import LARGER_IS_BETTER, best_by
from asyncrl.config.schema import Config
from asyncrl.report.metrics import read_lines
from asyncrl.training.files import numbered, remove

BEST_LINK = "best"


@dataclass(frozen=True)
class Keep:
    """``newest`` 0 keeps all. ``best`` more by ``metric`` (a key of LARGER_IS_BETTER), read from ``metrics_file``."""

    newest: int = 0
    best: int = 0
    metric: str = "eval/accuracy"
    metrics_file: Path | None = None


def keep_of(cfg: Config, run_dir: Path) -> Keep:
    """What the configuration wants kept of the run in ``run_dir``."""
    wanted = cfg.checkpoint
    return Keep(wanted.keep, wanted.keep_best, best_by(cfg), run_dir / "metrics.jsonl")


def tidy(root: Path, prefix: str, keep: Keep) -> None:
    """Removes the checkpoints in ``root`` that ``keep`` does not cover, and points ``root/best`` at the best.

    A score may come long after its checkpoint, because engines evaluate while training goes on. So one without a score
    stays until a later version has one: then its own will not come any more.
    """
    folders = {int(p.name.removeprefix(prefix)): p for p in numbered(root, prefix)}
    versions = sorted(folders)
    kept = set(versions[-keep.newest :] if keep.newest > 0 else versions)
    if keep.best:
        scores = read_scores(keep)
        sign = 1 if LARGER_IS_BETTER[keep.metric] else -1
        ranked = sorted(scores.keys() & folders.keys(), key=lambda v: (sign * scores[v], v), reverse=True)
        kept |= set(ranked[: keep.best])
        kept |= {v for v in versions if v > max(scores, default=-1)}
        if ranked:
            link(root, folders[ranked[0]].name)
    for version in versions:
        if version not in kept:
            remove(folders[version])
    best = root / BEST_LINK
    if best.is_symlink() and not best.exists():  # of a run that kept it and now does not
        best.unlink()


def read_scores(keep: Keep) -> dict[int, float]:
    """version -> ``keep.metric``. Steps that a resumed run has done again count with their newest score only."""
    scores: dict[int, float] = {}
    attempt, begun = 0, True
    for line in read_lines(keep.metrics_file) if keep.metrics_file else ():
        if line.get("attempt", 0) > attempt:
            attempt, begun = line["attempt"], False
        if "step_s" in line and not begun:
            scores = {v: s for v, s in scores.items() if v < line["step"]}
            begun = True
        if isinstance(line.get(keep.metric), int | float):
            scores[line["step"]] = float(line[keep.metric])
    return scores


def link(root: Path, name: str) -> None:
    """Points ``root/best`` at ``name``; a reader sees the old link or the new one."""
    temporary = root / f".{BEST_LINK}.tmp"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(name)
    os.replace(temporary, root / BEST_LINK)
