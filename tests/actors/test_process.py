"""No child outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from asyncrl.actors import process

WAIT_S = 20.0


def gone(pid: int) -> bool:
    """Whether ``pid`` is no running process (a zombie counts as gone)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, what: str) -> None:
    end_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_at, f"waited {WAIT_S} s for {what}"
        time.sleep(0.02)


def script(tmp_path: Path, name: str, body: str) -> dict[str, str]:
    """Make a module ``name`` for ``spawn``; returns the environment that finds it."""
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(process.__file__).resolve().parents[2])])}


def test_a_grandchild_dies_when_its_parent_is_killed(tmp_path):
    env = script(tmp_path, "leaf", "import time\ntime.sleep(600)\n")
    env |= script(
        tmp_path,
        "middle",
        """
        import sys, time
        from asyncrl.actors.process import spawn
        print(spawn("leaf", []).pid, flush=True)
        time.sleep(600)
        """,
    )
    middle = subprocess.Popen(
        [sys.executable, "-m", "middle"], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    )
    assert middle.stdout is not None
    leaf = int(middle.stdout.readline())
    assert not gone(leaf)
    middle.send_signal(signal.SIGKILL)
    middle.wait()
    wait_until(lambda: gone(leaf), "the grandchild to die")


def test_a_child_started_in_the_race_with_its_parents_death_ends_itself(tmp_path):
    body = """
        import os, signal
        from asyncrl.config.processes import die_with_parent
        die_with_parent(signal.SIGKILL, parent=os.getppid() + 1)  # the parent we expected is not there any more
        print("survived")
    """
    env = script(tmp_path, "racer", body)
    done = subprocess.run([sys.executable, "-m", "racer"], env={**os.environ, **env}, capture_output=True)
    assert done.returncode == -signal.SIGKILL and b"survived" not in done.stdout


def test_end_kills_a_child_that_ignores_sigterm_and_what_it_started(tmp_path):
    body = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(inner.pid, flush=True)
        time.sleep(600)
    """
    env = script(tmp_path, "stubborn", body)
    log = tmp_path / "log"
    child = process.spawn("stubborn", [], log=log, extra_env=env)
    wait_until(lambda: log.read_text().strip().isdigit(), "the child to start")
    inner = int(log.read_text())
    assert process.end(child, grace_s=0.2) == -signal.SIGKILL
    wait_until(lambda: gone(inner), "the inner process to die")


def test_read_line_says_what_it_waited_for():
    read_end, write_end = os.pipe()
    with pytest.raises(RuntimeError, match=r"waited 0.05 s for the endpoint"):
        process.read_line(read_end, deadline_s=0.05, what="the endpoint")
    os.write(write_end, b"half a line")
    os.close(write_end)
    with pytest.raises(RuntimeError, match="ended before"):
        process.read_line(read_end, deadline_s=5, what="the endpoint")


def test_last_words_are_of_this_life_of_the_process(tmp_path):
    log = tmp_path / "log"
    log.write_text("generator/0: an earlier end\n")
    began = log.stat().st_size
    assert process.last_words(log, "generator/0", began) == ""
    with log.open("a") as file:
        file.write("noise\n")
    assert process.last_words(log, "generator/0", began) == "noise"
    with log.open("a") as file:
        file.write("generator/0: vLLM did not start: no room\nterminate called\n\n")
    assert process.last_words(log, "generator/0", began) == "vLLM did not start: no room"


def test_a_pipe_is_read_without_waiting():
    read_end, write_end = os.pipe()
    assert process.what_is_there(read_end) == ""
    os.write(write_end, b"why")
    assert process.what_is_there(read_end) == "why"
    os.close(write_end)
    assert process.what_is_there(read_end) == ""
