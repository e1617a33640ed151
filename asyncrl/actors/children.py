"""A trainer rank's hold on the processes beside it: rank 0 starts the supervisor and watches it.

When the supervisor fails, this rank ends at once with the reason (torchrun then ends the others); when this rank ends,
for whatever reason, the supervisor is told to end and why, through a pipe that only this rank can write to: its end of
file without a word says that this rank was killed. The kernel's signal then ends the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from types import TracebackType

from asyncrl.actors.ending import end_rank, how_it_ended
from asyncrl.actors.process import LONGEST_REASON, end, read_line, spawn
from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.processes import describe_exit, if_stuck
from asyncrl.config.schema import Config
from asyncrl.report.summary import Ended, read_summary

CONTROLLER_START_S = 90.0


class ControllerGone(RunFailed):
    """The controller has left; the text is the reason that it gave."""


class Children:
    """Context manager around a rank's training. ``controller`` is the endpoint of the run's controller."""

    def __init__(self, cfg: Config, context: RunContext) -> None:
        self.cfg, self.context = cfg, context
        self.controller = ""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._leaving = False
        self._word: int | None = None  # a pipe to the supervisor: how the run has ended, and why

    def __enter__(self) -> Children:
        try:
            self._find_controller()
        except BaseException as error:  # Python calls __exit__ only after this method has returned
            self.__exit__(type(error), error, None)
            raise
        return self

    def _find_controller(self) -> None:
        if self.context.rank == 0:
            self.controller = self._start_supervisor()
            self.context.publish("controller", self.controller)
        else:
            self.controller = self.context.await_published("controller", CONTROLLER_START_S)

    def _start_supervisor(self) -> str:
        read_end, write_end = os.pipe()
        word, self._word = os.pipe()
        place = self.context.place
        arguments = ["--run-dir", str(self.context.run_dir), "--ranks", str(place.world_size)]
        arguments += ["--local-ranks", str(place.local_world_size)]
        supervisor = self._supervisor = spawn(
            "asyncrl.actors.supervisor",
            [*arguments, "--ready-fd", str(write_end), "--word-fd", str(word)],
            pass_fds=[write_end, word],
            death_signal=signal.SIGTERM,
        )
        os.close(write_end)
        os.close(word)
        if_stuck(lambda signal_name: self._end(supervisor, "interrupted", f"interrupted by {signal_name}"))
        try:
            line = read_line(read_end, deadline_s=CONTROLLER_START_S, what="the controller's endpoint")
        except RuntimeError as error:
            code = self._end(supervisor, "failed", str(error))
            raise RunFailed(self._reason(code) if code == 1 else str(error)) from None
        finally:
            os.close(read_end)
        threading.Thread(target=self._watch, name="supervisor-watch", daemon=True).start()
        return json.loads(line)["endpoint"]

    def _end(self, supervisor: subprocess.Popen[bytes], ended: Ended, reason: str) -> int:
        self._leaving = True
        if self._word is not None:
            word = json.dumps({"ended": ended, "reason": reason[:LONGEST_REASON]})
            with contextlib.suppress(BrokenPipeError):  # it has ended
                os.write(self._word, word.encode())
        return end(supervisor, grace_s=self.cfg.deadline.shutdown_s)

    def _watch(self) -> None:
        assert self._supervisor is not None
        code = self._supervisor.wait()
        if code != 0 and not self._leaving:
            # the main thread may be inside a collective that never returns
            end_rank(self.cfg, self.context.run_dir, 0, "failed", self._reason(code))

    def _reason(self, code: int) -> str:
        """Why the supervisor ended with ``code``: the run's own summary says it, unless the supervisor was killed."""
        path = self.context.run_dir / "summary.json"
        return (read_summary(path).reason if path.exists() else "") or f"the supervisor ended ({describe_exit(code)})"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._leaving = True
        try:
            if self._supervisor is not None:
                self._leave(self._supervisor, error)
        finally:
            word, self._word = self._word, None
            if word is not None:
                os.close(word)

    def _leave(self, supervisor: subprocess.Popen[bytes], error: BaseException | None) -> None:
        grace = self.cfg.deadline.shutdown_s
        if error is None or isinstance(error, ControllerGone):  # it ends by itself
            patience = grace if error else 4 * grace
            try:
                code = supervisor.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                reason = f"the supervisor did not end within {patience:g} s of the run's end"
                self._end(supervisor, "failed", reason)
                raise RunFailed(reason) from None
            if code != 0:
                raise RunFailed(self._reason(code)) from None
        else:
            self._end(supervisor, *how_it_ended(error))
