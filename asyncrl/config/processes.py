"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import os
import signal
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(sig: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send ``sig`` to this process when the thread that started it ends.

    ``parent`` is the pid of the expected parent; if it is already gone (it died between fork and this call), the
    process ends at once.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def interrupt_once() -> None:
    """Let the first SIGINT raise KeyboardInterrupt and ignore the later ones, so that the end it starts is in order.

    A Ctrl-C reaches a rank twice: from the terminal and from torchrun, which passes on its own. Must be called from
    the main thread.
    """

    def on_sigint(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, on_sigint)


def describe_exit(code: int) -> str:
    """A return code of subprocess as text: ``exit code 1`` or ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"
