"""Starting and ending child processes so that none outlives its parent.

Invariants:
- a child sees a clean environment: no variable of torchrun reaches vLLM or the controller;
- a child runs in its own session, so Ctrl-C reaches only the ranks that the user started, and they end the rest;
- a child asks the kernel for a signal when its parent dies (PR_SET_PDEATHSIG): SIGKILL of any process leaves no orphan.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.config.processes import clean_environment, die_with_parent

LONGEST_REASON = 1000  # characters


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path | None = None,
    extra_env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    death_signal: signal.Signals = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module arguments`` in its own session; its output goes to ``log`` or to ours."""
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(death_signal, parent)

    output = None if log is None else log.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=clean_environment(extra_env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        if output is not None:
            output.close()


def end(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """End a child and its session: SIGTERM, ``grace_s`` seconds, then SIGKILL. Returns the exit code."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
    kill_session(process.pid)
    return process.wait(timeout=30)


def kill_session(pid: int) -> None:
    """SIGKILL what is left in the process group that ``pid`` leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def what_is_there(fd: int) -> str:
    """What a pipe holds now, without waiting for more."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 2**16).decode()
    except BlockingIOError:
        return ""


def last_words(log: Path, name: str, since: int = 0) -> str:
    """Why process ``name`` ended: the last line of its log that begins with its name, else the last line; or nothing.

    ``since``: size of the log when the process was started.
    """
    with log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - 2**16))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix(f"{name}: ") for line in lines if line.startswith(f"{name}: ")]
    return (own or lines or [""])[-1].strip()[:LONGEST_REASON]


def read_line(fd: int, *, deadline_s: float, what: str) -> str:
    """One line from a pipe. Raises ``RuntimeError`` saying ``what`` was waited for when it closes or is late."""
    end_at = time.monotonic() + deadline_s
    data = b""
    while not data.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(end_at - time.monotonic(), 0))
        if not ready:
            raise RuntimeError(f"waited {deadline_s:g} s for {what}; it never came")
        chunk = os.read(fd, 4096)
        if not chunk:
            raise RuntimeError(f"the process that should send {what} ended before it did")
        data += chunk
    return data.decode().strip()
