"""The child process that holds the W&B run: JSON lines in on stdin, JSON lines out on stdout.

It is a process and not a thread because importing and starting wandb takes seconds of CPU and may wait for a network,
and because only a process can be ended when a deadline passes. In: ``init``, then any number of ``metrics`` and
``rollouts``, then ``finish``. Out: ``ready`` or ``error``, ``done`` with the number of each record that wandb has
taken (it is in wandb's own file in the run folder then), ``finished``.

The end of stdin without ``finish`` means that the parent died: the run is marked as crashed and the process leaves
within ``LEAVE_S``. wandb's own service process leaves with this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

LEAVE_S = 5.0
_PR_SET_PDEATHSIG = 1


def choose_mode(wanted: str, environ: dict[str, str], key_configured: bool) -> str:
    """``online``, ``offline`` or ``disabled``.

    ``auto`` takes ``WANDB_MODE`` if that is set, else online if a key is configured, else offline. Any other value is
    what the user typed for this run and wins.
    """
    if wanted == "auto":
        wanted = environ.get("WANDB_MODE", "").strip().lower() or ("online" if key_configured else "offline")
    known = {"online": "online", "run": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
    if wanted not in known:
        raise ValueError(f"W&B mode {wanted!r} is none of auto, online, offline, disabled")
    return known[wanted]


def key_configured(wandb: Any) -> bool:
    """Whether wandb would find credentials without asking: environment, its settings files, netrc."""
    import netrc
    from pathlib import Path
    from urllib.parse import urlparse

    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlparse(settings.base_url).hostname
    for path in (os.environ.get("NETRC"), Path.home() / ".netrc", Path.home() / "_netrc"):
        try:
            if path and netrc.netrc(str(path)).authenticators(host or ""):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


class Run:
    """The wandb run behind the protocol."""

    def __init__(self, wandb: Any, init: dict[str, Any]) -> None:
        self._wandb = wandb
        self.note = ""
        self.mode = choose_mode(init["mode"], dict(os.environ), key_configured(wandb))
        try:
            self.run = self._start(init, self.mode)
        except wandb.errors.Error as error:
            if self.mode != "online":
                raise
            self.note = f"W&B does not answer ({type(error).__name__}: {error}); this run is kept offline"
            wandb.teardown()
            self.mode = "offline"
            self.run = self._start(init, self.mode)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("eval/accuracy", step_metric="step", summary="max,last")

    def _start(self, init: dict[str, Any], mode: str) -> Any:
        settings = self._wandb.Settings(
            init_timeout=init["init_timeout_s"], console="off", silent=True, disable_git=True, disable_code=True
        )
        return self._wandb.init(
            project=init["project"],
            entity=init["entity"] or None,
            group=init["group"] or None,
            name=init["name"],
            id=init["id"],
            dir=init["dir"],
            config=init["config"],
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=settings,
        )

    def metrics(self, record: dict[str, Any]) -> None:
        self.run.log({key: value for key, value in record.items() if value is not None})

    def table(self, name: str, step: int, columns: list[str], rows: list[list[Any]]) -> None:
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self.run.log({name: table, "step": step})

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        self.run.summary.update(summary)
        self.run.finish(exit_code=exit_code)


def serve(messages: Iterator[dict[str, Any]], replies: IO[str]) -> int:
    """Run the protocol; returns the exit status."""

    def reply(**content: Any) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    import wandb

    try:
        run = Run(wandb, next(messages))
    except (wandb.errors.Error, OSError, ValueError) as error:
        reply(kind="error", text=f"{type(error).__name__}: {error}")
        return 1
    reply(kind="ready", mode=run.mode, note=run.note, url=run.run.url or "", folder=os.path.dirname(run.run.dir))
    for message in messages:
        try:
            if message["kind"] == "finish":
                run.finish(message["summary"], message["exit_code"])
                reply(kind="finished")
                return 0
            if message["kind"] == "metrics":
                run.metrics(message["record"])
            else:
                run.table(message["name"], message["step"], message["columns"], message["rows"])
            reply(kind="done", n=message["n"])
        except (wandb.errors.Error, OSError, ValueError, TypeError) as error:
            reply(kind="error", text=f"{type(error).__name__}: {error}")
    leave_soon()
    run.finish({}, 1)
    return 1


def leave_soon() -> None:
    """End this process ``LEAVE_S`` from now, whatever it waits for then."""
    timer = threading.Timer(LEAVE_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end_of_input() -> None:
    """Make the next read of stdin find its end; a read that this signal interrupted is repeated and finds it too."""
    leave_soon()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def main() -> int:
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole foreground group; the parent decides
    # A fork of the parent may hold our stdin open after the parent's death, so the kernel is asked as well.
    signal.signal(signal.SIGTERM, lambda *_: end_of_input())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what wandb prints goes to the log file, not between the replies
    messages = (json.loads(line) for line in sys.stdin.buffer)
    return serve(messages, replies)


if __name__ == "__main__":
    sys.exit(main())
