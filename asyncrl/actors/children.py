"""A trainer rank's hold on the processes beside it: rank 0 starts the supervisor and watches it.

When the supervisor fails, this rank ends at once with the reason (torchrun then ends the others); when this rank ends,
for whatever reason, the supervisor is told to end, and the kernel tells it when nobody else can.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from types import TracebackType

from asyncrl.actors.ending import end_rank
from asyncrl.actors.process import end, read_line, spawn
from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.processes import describe_exit, if_stuck
from asyncrl.config.schema import Config
from asyncrl.report.summary import read_summary

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
        place = self.context.place
        arguments = ["--run-dir", str(self.context.run_dir), "--ranks", str(place.world_size)]
        arguments += ["--local-ranks", str(place.local_world_size)]
        supervisor = self._supervisor = spawn(
            "asyncrl.actors.supervisor",
            [*arguments, "--ready-fd", str(write_end)],
            pass_fds=[write_end],
            death_signal=signal.SIGTERM,
        )
        os.close(write_end)
        if_stuck(lambda: self._end(supervisor))
        try:
            line = read_line(read_end, deadline_s=CONTROLLER_START_S, what="the controller's endpoint")
        except RuntimeError as error:
            code = self._end(supervisor)
            raise RunFailed(self._reason(code) if code == 1 else str(error)) from None
        finally:
            os.close(read_end)
        threading.Thread(target=self._watch, name="supervisor-watch", daemon=True).start()
        return json.loads(line)["endpoint"]

    def _end(self, supervisor: subprocess.Popen[bytes]) -> int:
        self._leaving = True
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
        if self._supervisor is None:
            return
        grace = self.cfg.deadline.shutdown_s
        if error is None or isinstance(error, ControllerGone):  # it ends by itself
            patience = grace if error else 4 * grace
            try:
                code = self._supervisor.wait(timeout=patience)
            except subprocess.TimeoutExpired:
                self._end(self._supervisor)
                raise RunFailed(f"the supervisor did not end within {patience:g} s of the run's end") from None
            if code != 0:
                raise RunFailed(self._reason(code)) from None
        else:
            self._end(self._supervisor)
