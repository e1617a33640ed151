"""Which source a run is made from, if it is a git checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0


@cache
def git_revision(folder: Path = REPOSITORY) -> dict[str, Any] | None:
    """``{"revision": commit, "changed": whether tracked files differ from it}``; None if that cannot be known."""
    if not (folder / ".git").exists():  # not the checkout of something around it
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout.strip()

    try:
        return {"revision": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
