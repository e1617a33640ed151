"""What the ledger stands on: one SQLite file, one segment writer and transactions over both.

A transaction collects payloads and rows. At its end the payloads are written to the segment first and the rows are
committed then, so that a row never names a payload that was not written. Any error undoes both.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from asyncrl.rollouts.ledger_schema import SCHEMA_VERSION, TABLES
from asyncrl.rollouts.segments import SegmentWriter

SEGMENT_BYTES = 256 * 2**20


class LedgerError(RuntimeError):
    """The ledger cannot be opened or written, or the caller contradicts it; the message says which and what to do."""


class Store:
    """Opening, locking and transactions. :class:`asyncrl.rollouts.ledger.Ledger` says what is recorded."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        meta: dict[str, Any] | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open ``directory`` or make it.

        Args:
            meta: JSON-able facts that a resumed run must agree with: seed, dataset fingerprint, group size, ...
            segment_bytes: a new segment file is begun beyond this size.

        Raises:
            LedgerError: another process has it open, it is damaged, or ``meta`` differs from what was recorded.
        """
        self.directory = Path(directory)
        self.segments = self.directory / "segments"
        self._clock = clock
        self._depth = 0  # of nested transactions
        self._doomed = False  # a write inside the open transaction has failed
        self._scope = _Scope(self, converts=True)
        with errors("open"), ExitStack() as stack:
            self.segments.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.directory / "lock")
            stack.callback(os.close, self._lock)
            self.db = sqlite3.connect(self.directory / "ledger.sqlite", isolation_level=None, check_same_thread=False)
            stack.callback(self.db.close)
            self._writer = SegmentWriter(self.segments, segment_bytes)
            stack.callback(self._writer.close)
            _prepare(self.db)
            self._check_meta(meta or {})
            self.refresh()
            stack.pop_all()

    def close(self) -> None:
        with errors("close"):
            self._writer.close()
            self.db.close()
            os.close(self._lock)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Everything recorded inside becomes visible and survives together, at the end; nested ones join the outer.

        Recording the samples of one engine step in one transaction costs half of recording them one by one.

        Raises:
            LedgerError: the disk is full or fails; nothing of the transaction is recorded.
        """
        return _Scope(self, converts=False)

    def refresh(self) -> None:
        """Read again what is kept in memory; needed after rows were changed behind the ledger's back."""

    def event(self, kind: str, **detail: Any) -> None:
        """A line in the table of events."""
        with self._scope:
            self.db.execute(
                "INSERT INTO events (time, kind, detail) VALUES (?, ?, ?)", (self._clock(), kind, to_json(detail))
            )

    def _roll_back(self) -> None:
        self._doomed = False
        with errors("undo a write to"):
            self._writer.discard()
            if self.db.in_transaction:  # some errors have rolled back already
                self.db.execute("ROLLBACK")
            self.refresh()

    def _check_meta(self, meta: dict[str, Any]) -> None:
        known = dict(self.db.execute("SELECT key, value FROM meta"))
        wanted = {"schema_version": SCHEMA_VERSION, **meta}
        differing = [
            f"{key} was {known[key]}, now {to_json(value)}"
            for key, value in wanted.items()
            if key in known and known[key] != to_json(value)
        ]
        expect(not differing, f"{self.directory} was written by another run: {'; '.join(differing)}")
        with self._scope:
            for key in wanted.keys() - known.keys():
                self._set_meta(key, wanted[key])

    def _set_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, to_json(value)))


class _Scope:
    """One level of a transaction. A class, because a generator-based one costs as much as the write it guards."""

    def __init__(self, store: Store, converts: bool) -> None:
        self._store = store
        self._converts = converts  # errors of the disk into LedgerError: only for the ledger's own code

    def __enter__(self) -> None:
        store = self._store
        expect(not store._doomed, "a write in this transaction has failed: leave it first")
        if not store._depth:
            with errors("write"):
                store.db.execute("BEGIN IMMEDIATE")
        store._depth += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        store = self._store
        store._depth -= 1
        broken = self._converts and isinstance(error, sqlite3.Error | OSError)
        if store._depth:
            store._doomed = store._doomed or broken
        elif error is None and not store._doomed:
            self._commit()
        else:
            store._roll_back()
            expect(error is not None, "nothing of the transaction was recorded: a write in it has failed")
        if broken:
            raise LedgerError(f"cannot write the ledger: {error}") from error

    def _commit(self) -> None:
        try:
            self._store._writer.flush()
            self._store.db.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            self._store._roll_back()
            raise LedgerError(f"cannot write the ledger: {error}") from error


def expect(condition: bool, message: str) -> None:
    """Raise LedgerError with ``message`` unless ``condition``."""
    if not condition:
        raise LedgerError(message)


@contextmanager
def errors(action: str) -> Iterator[None]:
    """Errors of the disk and of SQLite as LedgerError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"cannot {action} the ledger: {error}") from error


def to_json(value: Any) -> str:
    """JSON that SQLite can query: numpy numbers as numbers, NaN and infinities as strings."""
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace")
        os.close(fd)
        raise LedgerError(f"{path.parent} is open in process {holder or 'unknown'}") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _prepare(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        db.executescript("BEGIN;" + TABLES + "COMMIT;")
