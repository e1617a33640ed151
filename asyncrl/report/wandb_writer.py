"""The one W&B writer of a run, used by the controller only.

Invariants
    - No call waits for W&B: records go into a bounded queue (count and bytes), a thread feeds the child process of
      ``wandb_process``, and every wait of that thread ends at a deadline with the child being killed.
    - Nothing is lost in silence: ``dropped`` counts the records that the queue refused and, at the end, those that
      wandb never confirmed; the first error is reported through ``on_event``, later ones only count.
    - A record that wandb confirmed is in its file under ``<run>/wandb``, from where ``wandb sync`` can send it later.
"""

from __future__ import annotations

import contextlib
import json
import numbers
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.config.processes import clean_environment
from asyncrl.config.schema import WandbConfig

INIT_TIMEOUT_S = 30.0  # wandb's own; after it the child goes offline
INIT_DEADLINE_S = 90.0  # ours, for a child that hangs: import, both tries
MAX_RECORDS = 2000
MAX_BYTES = 32 * 2**20


class WandbWriter:
    """Starts the child at once and returns; wandb itself becomes ready later.

    Args:
        run_dir: wandb's folder is made in it.
        cfg: project, entity, mode.
        name: the run's name.
        config: the composed configuration, as plain data.
        on_event: called from another thread with (text, is_warning).
        environ: of the child; None inherits ours.
    """

    def __init__(
        self,
        run_dir: Path,
        cfg: WandbConfig,
        name: str,
        config: Mapping[str, Any],
        on_event: Callable[[str, bool], None],
        environ: Mapping[str, str] | None = None,
        init_timeout_s: float = INIT_TIMEOUT_S,
        init_deadline_s: float = INIT_DEADLINE_S,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self.mode = ""  # known once wandb is ready
        self._on_event = on_event
        self._environ = clean_environment(environ=environ)
        self._init_deadline_s = init_deadline_s
        self._queue: queue.Queue[bytes] = queue.Queue(max_records)
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._sent = self._refused = self._confirmed = 0
        self._complained = self._closing = False
        self._started = threading.Event()  # ready, or ended before that
        self._ended = threading.Event()  # the child closed its output
        self._finished = False  # wandb confirmed the end of the run
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = run_dir / "wandb"
        self._folder.mkdir(exist_ok=True)
        self._init = {
            "kind": "init",
            **{key: value for key, value in asdict(cfg).items() if key in ("project", "entity", "group", "mode")},
            "name": name,
            "id": _run_id(self._folder / "run_id"),
            "dir": str(run_dir.resolve()),
            "config": dict(config),
            "init_timeout_s": init_timeout_s,
        }
        self._thread = threading.Thread(target=self._feed, name="wandb", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that did not and will not reach wandb, as far as is known now."""
        return self._refused + (self._sent - self._confirmed if self._ended.is_set() else 0)

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue one record of metrics, keys as in ``metrics.jsonl``."""
        self._put(kind="metrics", record=dict(record))

    def table(self, name: str, step: int, columns: Sequence[str], rows: list[dict[str, Any]]) -> None:
        """Queue one table under the key ``name``; a row is a dict with the keys ``columns``, an absent one is empty."""
        cells = [[row.get(column) for column in columns] for row in rows]
        self._put(kind="table", name=name, step=step, columns=list(columns), rows=cells)

    def finish(self, summary: Mapping[str, Any], exit_code: int, deadline_s: float = 10.0) -> int:
        """Send what is queued and end the run within ``deadline_s``; returns ``dropped``."""
        until = time.monotonic() + deadline_s
        with self._lock:
            self._closing = True
        try:
            self._queue.put(_line(kind="finish", summary=dict(summary), exit_code=exit_code), timeout=deadline_s)
        except queue.Full:
            self._complain("W&B takes no more records")
        if not self._ended.wait(max(0.0, until - time.monotonic())):
            where = f"; `wandb sync` can send what is in {self._folder}" if self.mode else ""
            self._complain(f"W&B did not finish within {deadline_s:g} s{where}")
            if self._child is not None:
                self._child.kill()
        self._thread.join(2.0)
        self._ended.set()
        return self.dropped

    def _put(self, **content: Any) -> None:
        with self._lock:
            line = _line(**content, n=self._sent + 1)
            taken = not (self._ended.is_set() or self._closing) and self._queued_bytes + len(line) <= MAX_BYTES
            if taken:
                try:
                    self._queue.put_nowait(line)
                    self._sent += 1
                    self._queued_bytes += len(line)
                except queue.Full:
                    taken = False
            self._refused += not taken
        if not taken:
            self._complain("W&B does not keep up: records are dropped (counted in report/wandb_dropped)")

    def _complain(self, text: str) -> None:
        """Show the first error only; the later ones are in the log file and in the counter."""
        with self._lock:
            first, self._complained = not self._complained, True
        if first:
            self._on_event(text, True)

    def _feed(self) -> None:
        """Thread: start the child, hand it the queue, see it end."""
        with open(self._folder / "writer.log", "ab") as log:
            command = [sys.executable, "-m", "asyncrl.report.wandb_process", str(os.getpid())]
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environ
            )
        self._child = child
        threading.Thread(target=self._listen, args=(child,), name="wandb-replies", daemon=True).start()
        try:
            _write(child, _line(**self._init))
            if not self._started.wait(self._init_deadline_s):
                self._complain(f"W&B did not start within {self._init_deadline_s:g} s; this run goes on without it")
                child.kill()
            while not self._ended.is_set():
                line = self._queue.get()  # the listener puts an empty line when the child ends
                with self._lock:
                    self._queued_bytes -= len(line)
                _write(child, line)
        except OSError as error:
            self._complain(f"W&B writer ended ({error}); see {self._folder / 'writer.log'}")
        # The kernel ends the child when the thread that started it ends, so this one stays until the child has gone.
        child.wait()

    def _listen(self, child: subprocess.Popen[bytes]) -> None:
        """Thread: read the child's replies until it ends."""
        assert child.stdout is not None
        for line in child.stdout:
            reply = json.loads(line)
            if reply["kind"] == "done":
                self._confirmed += 1
            elif reply["kind"] == "ready":
                self.mode = reply["mode"]
                where = reply["url"] or reply["folder"]
                if self.mode != "disabled":
                    self._on_event(f"W&B {self.mode}: {where}", False)
                if reply["note"]:
                    self._complain(reply["note"])
                self._started.set()
            elif reply["kind"] == "error":
                self._complain(f"W&B: {reply['text']}")
            else:
                self._finished = True
        self._ended.set()
        self._started.set()
        if not self._finished:
            self._complain(f"W&B writer ended; see {self._folder / 'writer.log'}")
        with contextlib.suppress(queue.Full):  # full: the feeder is writing, and finds the pipe closed
            self._queue.put_nowait(b"")


def _line(**content: Any) -> bytes:
    return (json.dumps(content, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    """numpy numbers as Python's own; anything else as its text, for it only ends in a table or the config."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


def _write(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(line)
    child.stdin.flush()


def _run_id(path: Path) -> str:
    """The W&B id of this run folder, so that a resumed run goes on in the same W&B run."""
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
