"""What the supervisor tells the controller, one JSON object a line of a pipe: restarts, and why the run has failed.

The controller reads when it needs to know, so the pipe must hold what comes between two steps: some 1500 restarts.
"""

from __future__ import annotations

import json
import os

from asyncrl.actors.process import what_is_there


class News:
    """The controller's end of the pipe; the supervisor's is ``tell``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._restarts = 0
        self._failure = ""

    @property
    def restarts(self) -> int:
        """Generator processes that were started in the place of one that had died, in this attempt."""
        self._read()
        return self._restarts

    @property
    def failure(self) -> str:
        """Why the run has failed; empty if the supervisor has not said so."""
        self._read()
        return self._failure

    def _read(self) -> None:
        for line in what_is_there(self._fd).splitlines():  # whole lines: one write each
            news = json.loads(line)
            self._restarts += "restarted" in news
            self._failure = news.get("failed", self._failure)


def tell(fd: int, **news: str) -> None:
    """``restarted=NAME`` or ``failed=REASON``, to the controller."""
    os.write(fd, (json.dumps(news) + "\n").encode())
