"""The supervisor: starts and watches the controller and the generators of this machine.

It is a process of its own, a child of rank 0, so that a dead generator is restarted while the trainers compute.

- A generator that dies is restarted, at most ``generator.max_restarts`` times each; it rejoins the controller, which
  gives it the current weights. One more death ends the run with the reason.
- The controller's end is the run's end.
- SIGTERM (from rank 0, or from the kernel when rank 0 dies) ends every child in order, then by force. Which of the two
  it was, rank 0 itself says: it writes down how the run has ended before it sends one.
- However it ends, ``summary.json`` says so: if the controller could not write it, it is written here.

Exit codes: 0 finished, 1 failed (``summary.json`` has the reason), 143 stopped by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.actors.news import tell
from asyncrl.actors.process import LONGEST_REASON, end, kill_session, last_words, read_line, spawn
from asyncrl.config.files import load_config
from asyncrl.config.machine import assign_gpus, visible_gpus
from asyncrl.config.processes import describe_exit
from asyncrl.config.schema import Config
from asyncrl.report.summary import Ended, ensure_summary

CONTROLLER_START_S = 60.0
WORD_S = 5.0  # for a rank 0 that is dying to be gone, or for one that got the same signal to say so
CODES: dict[Ended, int] = {"finished": 0, "failed": 1, "interrupted": 128 + signal.SIGTERM}


@dataclass
class Generators:
    """The generator processes, by name."""

    config: Path
    logs: Path
    controller: str
    max_restarts: int
    news_fd: int  # a pipe to the controller, see ``news``
    gpus: dict[str, list[str]] = field(default_factory=dict)  # of each generator; none on a machine without
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    _log_began: dict[str, int] = field(default_factory=dict)  # size of the log when the process was started

    def log(self, name: str) -> Path:
        return self.logs / f"{name.replace('/', '_')}.log"

    def start(self, name: str) -> None:
        arguments = ["--config", str(self.config), "--name", name, "--controller", self.controller]
        log = self.log(name)
        self._log_began[name] = log.stat().st_size if log.exists() else 0
        env = {"ASYNCRL_GENERATOR": name}
        if gpus := self.gpus.get(name):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self.running[name] = spawn("asyncrl.actors.generator", arguments, log=log, extra_env=env)

    def heal(self, name: str) -> str | None:
        """Restart ``name`` after its death; a reason to end the run when its budget is spent, else None."""
        process = self.running.pop(name)
        code = process.wait()
        kill_session(process.pid)
        if code == 0:
            return None  # the controller told it to stop
        how = describe_exit(code)
        if code > 0 and (words := last_words(self.log(name), name, self._log_began[name])):
            how = f"{how}: {words}"
        self.restarts[name] = self.restarts.get(name, 0) + 1
        if self.restarts[name] > self.max_restarts:
            return f"{name} died {self.restarts[name]} times, the last time with {how} (its log is {self.log(name)})"
        print(f"{name} died ({how}); restart {self.restarts[name]} of {self.max_restarts}", file=sys.stderr)
        self.start(name)
        tell(self.news_fd, restarted=name)
        return None


class Stopped(Exception):
    """SIGTERM arrived."""


def _on_sigterm(signum: int, _frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # each thread of a dying rank 0 may send one more
    raise Stopped


def gpus_of_generators(cfg: Config, local_ranks: int) -> dict[str, list[str]]:
    """The GPUs of each generator of this machine, by name; none on a machine without."""
    usable = visible_gpus()
    if cfg.weights.backend == "ipc":  # on the GPU of trainer rank 0, or there is nothing to share
        usable = usable[:1]
    gpus = assign_gpus(usable, local_ranks, cfg.generator.replicas, cfg.generator.tensor_parallel)
    return {f"generator/{index}": own for index, own in enumerate(gpus)}


def _why_stopped(word_fd: int) -> tuple[Ended, str]:
    """What SIGTERM means: what rank 0 has written to the pipe ``word_fd``, whose end of file says that it died.

    The kernel's signal does not tell, and neither does ``os.getppid``: see ``die_with_parent``.
    """
    if not select.select([word_fd], [], [], WORD_S)[0]:  # rank 0 lives, and knows nothing of it
        return "interrupted", "stopped by SIGTERM"
    word = os.read(word_fd, select.PIPE_BUF * 2)
    if not word:
        return "failed", "trainer/0 died"
    said = json.loads(word)
    return said["ended"], said["reason"]


def supervise(
    cfg: Config, run_dir: Path, ranks: int, local_ranks: int, ready_fd: int, word_fd: int
) -> tuple[Ended, str]:
    """Run the children until the controller ends. ``local_ranks``: trainers on this machine.

    Returns how the run ended, and why.
    """
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    gpus = gpus_of_generators(cfg, local_ranks)
    news_fd, tell_fd = os.pipe()
    generators = Generators(run_dir / "config.json", logs, "", cfg.generator.max_restarts, tell_fd, gpus)
    controller = None
    how: tuple[Ended, str] = ("failed", "the supervisor failed")
    try:
        try:
            controller, answer_fd = _start_controller(generators.config, ranks, news_fd)
            generators.controller = _pass_on_endpoint(answer_fd, ready_fd)
            for name in gpus:
                generators.start(name)
            how = _watch(controller, generators)
        except RuntimeError as error:
            how = ("failed", str(error))
    except Stopped:  # around all of the above, which it may interrupt anywhere
        how = _why_stopped(word_fd)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if how[0] == "failed":
            tell(tell_fd, failed=how[1][:LONGEST_REASON])
        if controller is not None:
            end(controller, grace_s=cfg.deadline.shutdown_s / 2)
        for process in generators.running.values():
            process.terminate()
        for process in generators.running.values():
            end(process, grace_s=cfg.deadline.shutdown_s / 4)
    return how


def _start_controller(config: Path, ranks: int, news_fd: int) -> tuple[subprocess.Popen[bytes], int]:
    """The controller, and a pipe on which it answers with its endpoint or with a reason."""
    answer_fd, write_end = os.pipe()
    controller = spawn(
        "asyncrl.actors.controller",
        ["--config", str(config), "--ranks", str(ranks), "--ready-fd", str(write_end), "--news-fd", str(news_fd)],
        pass_fds=[write_end, news_fd],
        extra_env={"PYTHONHASHSEED": "0"},  # some reasoning-gym tasks draw their items from the order of a set
    )
    os.close(write_end)
    return controller, answer_fd


def _pass_on_endpoint(answer_fd: int, ready_fd: int) -> str:
    """The controller's endpoint, which rank 0 waits for as well. Raises ``RuntimeError`` with the reason."""
    answer = json.loads(read_line(answer_fd, deadline_s=CONTROLLER_START_S, what="the controller's endpoint"))
    os.close(answer_fd)
    if "reason" in answer:
        raise RuntimeError(answer["reason"])
    os.write(ready_fd, (json.dumps(answer) + "\n").encode())
    os.close(ready_fd)
    return answer["endpoint"]


def _watch(controller: subprocess.Popen[bytes], generators: Generators) -> tuple[Ended, str]:
    """Wait for any child to end: heal generators, return how the run ended when the controller is gone."""
    while True:
        _wait_any([controller, *generators.running.values()])
        if controller.poll() is not None:
            if controller.returncode == 0:
                return "finished", ""
            return "failed", f"the controller ended ({describe_exit(controller.returncode)})"
        for name in [n for n, p in generators.running.items() if p.poll() is not None]:
            reason = generators.heal(name)
            if reason is not None:
                return "failed", reason


def _wait_any(processes: list[subprocess.Popen[bytes]]) -> None:
    """Sleep until one of ``processes`` has ended."""
    fds = [os.pidfd_open(p.pid) for p in processes]
    try:
        select.select(fds, [], [])
    finally:
        for fd in fds:
            os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description="starts and watches the controller and the generators")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--ranks", type=int, required=True, help="trainer ranks of the whole run")
    parser.add_argument("--local-ranks", type=int, required=True, help="trainer ranks on this machine")
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="a pipe that gets the controller's endpoint as JSON"
    )
    parser.add_argument(
        "--word-fd", type=int, required=True, help="a pipe: how rank 0 ended the run, as JSON; closed when it died"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cfg = load_config(arguments.run_dir / "config.json")
    ended, reason = supervise(
        cfg, arguments.run_dir, arguments.ranks, arguments.local_ranks, arguments.ready_fd, arguments.word_fd
    )
    return CODES[ensure_summary(arguments.run_dir, cfg.mode, cfg.seed, ended, reason).ended]


if __name__ == "__main__":
    sys.exit(main())
