"""A signal ends a process once and in order, even when its main thread is stuck in a call that never returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asyncrl.config import processes
from asyncrl.config.processes import clean_environment, describe_exit, is_running

WAIT_S = 30


def test_no_variable_of_torchrun_reaches_a_child(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_OWN", "kept")
    env = clean_environment({"EXTRA": "added"})
    assert not {k for k in env if k.startswith("TORCHELASTIC_")} | (env.keys() & processes.TORCHRUN_VARIABLES)
    assert env["MY_OWN"] == "kept" and env["EXTRA"] == "added"


def test_the_import_path_finds_this_package():
    code = "import asyncrl; print(asyncrl.__file__)"
    out = subprocess.check_output([sys.executable, "-c", code], env=clean_environment(), cwd="/", text=True)
    assert Path(out.strip()).parents[1] == Path(processes.__file__).resolve().parents[2]


def script(body: str) -> subprocess.Popen[str]:
    """A process that runs ``body`` after ``end_in_order``; returns once it has printed "ready"."""
    code = "from asyncrl.config import processes\nprocesses.NOTICE_S = 0.2\nprocesses.end_in_order()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code + textwrap.dedent(body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


WAITING = """
    import signal, sys
    try:
        print("ready", flush=True)
        signal.pause()
    except processes.EndSignal as stop:
        print(stop, flush=True)
        sys.stdin.read()  # the end takes its time
        print("in order", flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_starts_the_end_and_later_ones_do_not_disturb_it(signum):
    code = "from asyncrl.config import processes\nprocesses.end_in_order()\n" + textwrap.dedent(WAITING)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    assert process.stdout.readline() == f"{signum.name}\n"
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(again)
    out, err = process.communicate("", timeout=WAIT_S)
    assert (process.returncode, out, err) == (0, "in order\n", "")


def test_a_main_thread_that_notices_nothing_is_not_waited_for():
    process = script("""
        import ctypes, os, threading
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)

        def tell():
            while hex(ctypes.addressof(mutex)) not in open(f"/proc/self/task/{os.getpid()}/syscall").read().split():
                pass
            print("ready", flush=True)

        processes.if_stuck(lambda name: print("left", name, flush=True))
        threading.Thread(target=tell).start()
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # for ever, whatever signals come
    """)
    process.terminate()
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + signal.SIGTERM and out == "left SIGTERM\n"


def test_a_process_that_ended_but_was_not_waited_for_does_not_run():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(process.pid) and is_running(os.getpid())
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process.pid)
    process.wait()
    assert not is_running(process.pid)


def test_exit_codes_have_names():
    assert [describe_exit(code) for code in (1, -9, -40)] == ["exit code 1", "killed by SIGKILL", "killed by signal 40"]


RANK = """
import time
from asyncrl.config import processes
processes.die_with_torchrun()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["before", "after"])
def test_a_rank_ends_with_torchrun_whenever_that_is_killed(killed):
    """``before``: torchrun was gone when the rank began, so that the kernel has nobody to tell it of."""
    torchrun = f"""
import os, signal, subprocess, sys
code = {RANK!r} if {killed == "after"} else "import sys; sys.stdin.read()\\n" + {RANK!r}
rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
print(rank.pid, flush=True)
signal.pause()
"""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    parent = subprocess.Popen([sys.executable, "-c", torchrun], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    if killed == "after":
        assert parent.stdout.readline() == "ready\n"
    parent.kill()  # closes the rank's stdin as well
    parent.wait()
    end = time.monotonic() + WAIT_S
    while is_running(rank):
        assert time.monotonic() < end
        time.sleep(0.02)
