"""The last thing that a rank does when its run does not finish: it says why, where a user looks for it, and is gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from asyncrl.config.errors import RunFailed, tell_torchrun
from asyncrl.config.schema import Config
from asyncrl.report.summary import Ended, ensure_summary

FAILED_STATUS = 1
INTERRUPTED_STATUS = 130


def how_it_ended(error: BaseException) -> tuple[Ended, str]:
    """How a run that ``error`` of a rank ends has ended, and why, in one line."""
    if isinstance(error, RunFailed):
        return "failed", str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", f"interrupted by {str(error) or 'Ctrl-C'}"
    return "failed", f"{type(error).__name__}: {error}"


def end_rank(cfg: Config, run_dir: Path | None, rank: int, ended: Ended, reason: str) -> NoReturn:
    """Ends this process at once: threads of a broken process group must not keep it, and with it its peers, alive.

    The reason goes to stderr, into torchrun's own report, which comes after it, and from rank 0 into the summary, if
    there is none yet. ``run_dir``: None before there was one.
    """
    print(f"asyncrl: rank {rank}: {reason}", file=sys.stderr)
    tell_torchrun(reason)
    if rank == 0 and run_dir is not None and run_dir.is_dir():
        try:
            ensure_summary(run_dir, cfg.mode, cfg.seed, ended, reason)
        except OSError as error:
            print(f"asyncrl: rank {rank}: no summary.json: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED_STATUS if ended == "interrupted" else FAILED_STATUS)
