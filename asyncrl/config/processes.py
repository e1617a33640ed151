"""What children inherit, and how processes end: with their parent, in order on a signal, with what exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

TORCHRUN_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}


def clean_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """``environ`` (default: ours) without what torchrun added, plus ``extra`` and an import path that finds asyncrl."""
    env = {
        key: value
        for key, value in (os.environ if environ is None else environ).items()
        if key not in TORCHRUN_VARIABLES and not key.startswith(("TORCHELASTIC_", "PET_"))
    }
    root = str(Path(__file__).resolve().parents[2])  # a child must find us whatever its working directory is
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    return {**env, **(extra or {})}


def die_with_parent(sig: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send ``sig`` to this process when the thread that started it ends.

    In a parent that dies, other threads may end later: until the last has, ``os.getppid`` still gives the parent's pid,
    and the signal comes again with each that has become the parent meanwhile.

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


def die_with_torchrun() -> None:
    """SIGTERM for this rank when torchrun ends, at once if it has: SIGKILL of torchrun would leave its ranks behind.

    Does nothing in a process that torchrun did not start.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    die_with_parent(signal.SIGTERM)
    try:
        there = os.path.samefile("/proc/self/exe", f"/proc/{os.getppid()}/exe")  # torchrun starts ranks with its Python
    except OSError:  # the parent is another user's: init, not torchrun
        there = False
    if not there:
        os.kill(os.getpid(), signal.SIGTERM)


class EndSignal(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; the text is its name."""


NOTICE_S = 3.0
_stuck: list[Callable[[str], object]] = []


def end_in_order() -> None:
    """Have the first SIGINT or SIGTERM raise ``EndSignal`` in the main thread; later ones are ignored.

    The end that the first one starts takes its time, and a Ctrl-C reaches a rank twice: from the terminal and from
    torchrun, which passes its own on. A main thread that does not notice within ``NOTICE_S``, because it is in a
    collective that never returns, is not waited for: the process does what ``if_stuck`` was told and ends.
    Must be called from the main thread.
    """
    signalled = False  # a flag, not the event: a handler may interrupt itself, and would wait for the event's lock
    noticed = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        nonlocal signalled
        if not signalled:
            signalled = True
            noticed.set()
            raise EndSignal(signal.Signals(signum).name)

    def watch() -> None:
        ours = (signal.SIGINT, signal.SIGTERM)
        while (signum := os.read(read_end, 1)[0]) not in ours:
            pass
        if not noticed.wait(NOTICE_S):
            for act in _stuck:
                act(signal.Signals(signum).name)
            os._exit(128 + signum)

    signal.set_wakeup_fd(write_end)  # written to when the signal arrives, whatever the main thread is in
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    threading.Thread(target=watch, name="signals", daemon=True).start()


def if_stuck(act: Callable[[str], object]) -> None:
    """What to do before the process is ended because its main thread did not notice a signal; it gets its name."""
    _stuck.append(act)


def is_running(pid: int) -> bool:
    """Whether process ``pid`` of this machine runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def describe_exit(code: int) -> str:
    """A return code of subprocess as text: ``exit code 1`` or ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"
