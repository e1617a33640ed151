"""A trainer rank's hold on the processes beside it: rank 0 starts the supervisor and watches it.

When the supervisor fails, this rank ends at once with the reason (torchrun then ends the others); when this rank ends,
for whatever reason, the supervisor is told to end, and the kernel tells it when nobody else can.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from types import TracebackType

from asyncrl.actors.process import end, read_line, spawn
from asyncrl.config.context import RunContext
from asyncrl.config.processes import describe_exit, die_with_parent, interrupt_once
from asyncrl.config.schema import Config

CONTROLLER_START_S = 90.0


class Children:
    """Context manager around a rank's training. ``controller`` is the endpoint of the run's controller."""

    def __init__(self, cfg: Config, context: RunContext) -> None:
        self.cfg, self.context = cfg, context
        self.controller = ""
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._leaving = False

    def __enter__(self) -> Children:
        interrupt_once()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(signal.SIGTERM)  # torchrun's own SIGKILL would leave its ranks behind
        if self.context.rank == 0:
            self.controller = self._start_supervisor()
            self.context.publish("controller", self.controller)
        else:
            self.controller = self.context.await_published("controller", CONTROLLER_START_S)
        return self

    def _start_supervisor(self) -> str:
        read_end, write_end = os.pipe()
        place = self.context.place
        arguments = ["--run-dir", str(self.context.run_dir), "--ranks", str(place.world_size)]
        arguments += ["--local-ranks", str(place.local_world_size)]
        self._supervisor = spawn(
            "asyncrl.actors.supervisor",
            [*arguments, "--ready-fd", str(write_end)],
            pass_fds=[write_end],
            death_signal=signal.SIGTERM,
        )
        os.close(write_end)
        try:
            line = read_line(read_end, deadline_s=CONTROLLER_START_S, what="the controller's endpoint")
        except RuntimeError:
            end(self._supervisor, grace_s=self.cfg.deadline.shutdown_s)
            raise
        finally:
            os.close(read_end)
        threading.Thread(target=self._watch, name="supervisor-watch", daemon=True).start()
        return json.loads(line)["endpoint"]

    def _watch(self) -> None:
        assert self._supervisor is not None
        code = self._supervisor.wait()
        if code != 0 and not self._leaving:
            print(
                f"rank {self.context.rank}: the supervisor ended ({describe_exit(code)})", file=sys.stderr, flush=True
            )
            os._exit(1)  # the main thread may be inside a collective that never returns

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._leaving = True
        if self._supervisor is None:
            return
        grace = self.cfg.deadline.shutdown_s
        if error is None:
            try:
                code = self._supervisor.wait(timeout=4 * grace)
            except subprocess.TimeoutExpired:
                end(self._supervisor, grace_s=grace)
                raise RuntimeError(f"the supervisor did not end within {4 * grace:g} s of the run's end") from None
            if code != 0:
                raise RuntimeError(f"the supervisor ended ({describe_exit(code)})")
        else:
            end(self._supervisor, grace_s=grace)
