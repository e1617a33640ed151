"""Runs the supervisor as a child of a rank 0 with many threads that is killed, or that ends it: ``KIND FOLDER ROUNDS``.

Each round leaves the supervisor's run folder, ``FOLDER/N``. Nothing is imported anew for a round: rank 0 and the
supervisor are forks of this process, and ``sleep`` is the controller.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from asyncrl.actors import supervisor
from asyncrl.config.files import save_config
from asyncrl.config.processes import die_with_parent
from asyncrl.config.schema import Config

PR_SET_CHILD_SUBREAPER = 36
THREADS = 40


def start_controller(_module: str, arguments: list[str], **options) -> subprocess.Popen[bytes]:
    fd = arguments[arguments.index("--ready-fd") + 1]
    script = f"""echo '{{"endpoint": "tcp://here"}}' >&{fd}; exec sleep 600"""
    return subprocess.Popen(["sh", "-c", script], pass_fds=options["pass_fds"], start_new_session=True)


def supervise(run_dir: Path, rank0: int, ready: int, word: int) -> None:
    die_with_parent(signal.SIGTERM, rank0)
    sys.argv = ["supervisor", "--run-dir", str(run_dir), "--ranks", "1", "--local-ranks", "1"]
    sys.argv += ["--ready-fd", str(ready), "--word-fd", str(word)]
    supervisor.main()


def rank_0(kind: str, run_dir: Path) -> None:
    ready, tell_ready = os.pipe()
    word, tell_word = os.pipe()
    pid, child = os.getpid(), os.fork()
    if not child:
        os.close(tell_word)
        supervise(run_dir, pid, tell_ready, word)
        return
    for _ in range(THREADS):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    os.read(ready, 1000)
    if kind == "asks":
        os.write(tell_word, json.dumps({"ended": "failed", "reason": "no such dtype"}).encode())
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    kind, folder, rounds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the supervisor outlives its parent: wait for it too
    supervisor.spawn = start_controller
    supervisor.gpus_of_generators = lambda *_: {}
    for number in range(rounds):
        run_dir = folder / str(number)
        run_dir.mkdir()
        save_config(Config(), run_dir)
        if not os.fork():
            try:
                rank_0(kind, run_dir)
            finally:
                sys.stderr.flush()
                os._exit(0)
        try:
            while True:
                os.wait()
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main()
