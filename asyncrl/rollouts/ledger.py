"""The ledger: what happened to every group, so that nothing is lost and nothing is trained twice.

Two stores under ``<run>/ledger``: small rows in SQLite (``ledger.sqlite``, tables in asyncrl.rollouts.ledger_schema)
and payloads in checksummed append-only files (asyncrl.rollouts.segments).

Invariants
  - A payload is written before the row that names it is committed.
  - What a method recorded survives the death of any process as soon as the method returns (inside ``transaction()``:
    as soon as that ends). Acknowledge a sample to its generator only then.
  - A cut survives the death of the machine as soon as ``cut`` returns: segments are fsynced first, then the write-ahead
    log, with every row before it. Other rows are not fsynced one by one (WAL mode, synchronous = NORMAL).
  - Recording the same sample twice changes nothing.
  - One process writes: the folder is locked while a Ledger is open.
  - An error (a full disk) raises LedgerError and leaves what was there as it was.

Reading back and resuming is in asyncrl.rollouts.recovery. Not thread-safe: use it from one thread at a time.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.rollouts.ledger_schema import SCHEMA_VERSION, TABLES
from asyncrl.rollouts.segments import SegmentWriter, encode_prompt, encode_sample, segment_numbers, segment_path
from asyncrl.rollouts.types import Group, Sample

SEGMENT_BYTES = 256 * 2**20


class LedgerError(RuntimeError):
    """The ledger cannot be opened or written, or the caller contradicts it; the message says which and what to do."""


class Ledger:
    """Opens ``directory`` or makes it. See the module's docstring for what holds when a method returns."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        meta: dict[str, Any] | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            meta: JSON-able facts that a resumed run must agree with: seed, dataset fingerprint, group size, ...
            segment_bytes: a new segment file is begun beyond this size.

        Raises:
            LedgerError: another process has it open, it is damaged, or ``meta`` differs from what was recorded.
        """
        self.directory = Path(directory)
        self.segments = self.directory / "segments"
        self.dropped: Counter[str] = Counter()  # samples not recorded, by reason, since this start
        self._clock = clock
        self._nested = False
        with _errors("open"), ExitStack() as stack:
            self.segments.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.directory / "lock")
            stack.callback(os.close, self._lock)
            self.db = sqlite3.connect(self.directory / "ledger.sqlite", isolation_level=None, check_same_thread=False)
            stack.callback(self.db.close)
            _prepare(self.db)
            self._check_meta(meta or {})
            self._writer = SegmentWriter(self.segments, segment_bytes)
            stack.pop_all()

    def close(self) -> None:
        with _errors("close"):
            self._writer.close()
            self.db.close()
            os.close(self._lock)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything recorded inside becomes visible and survives together, at the end; nested ones join the outer.

        Raises:
            LedgerError: the disk is full or fails; nothing of the transaction is recorded.
        """
        if self._nested:
            yield
            return
        with _errors("write"):
            self.db.execute("BEGIN IMMEDIATE")
        self._nested = True
        try:
            yield
            with _errors("write"):
                self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # some errors have rolled back already
                self.db.execute("ROLLBACK")
            raise
        finally:
            self._nested = False

    @contextmanager
    def _write(self) -> Iterator[None]:
        with self.transaction(), _errors("write"):
            yield

    # groups and samples

    def dispatched(
        self, group: Group, generator: str, *, size: int, version: int, cursor: dict[str, Any] | None = None
    ) -> None:
        """``group`` goes to ``generator``, for the first time or again.

        Args:
            size: samples asked for.
            version: of the slowest live generator.
            cursor: the prompt cursor's state behind this group's prompt; kept for ``prompt_cursor``.
        """
        prompt, now = group.prompt, self._clock()
        with self._write():
            row = self.db.execute("SELECT status, segment FROM groups WHERE ordinal = ?", (group.ordinal,)).fetchone()
            if row is None:
                # in order, so that a kill between two admissions leaves no hole in the ordinals
                self._expect(group.ordinal == self.next_ordinal(), f"group {group.ordinal} is dispatched out of order")
                where = self._writer.append(encode_prompt(prompt))
                self.db.execute(
                    "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, 1, 0, 'in_flight', NULL, NULL, ?, ?, ?, ?, ?)",
                    (group.ordinal, prompt.item_id, prompt.index, group.epoch, size, version, generator, *where, now),
                )
            else:
                self._expect(row[0] == "in_flight", f"group {group.ordinal} is dispatched again, but it is {row[0]}")
                self.db.execute(
                    "UPDATE groups SET generator = ?, dispatches = dispatches + 1 WHERE ordinal = ?",
                    (generator, group.ordinal),
                )
                if row[1] is None:  # its prompt was lost
                    where = self._writer.append(encode_prompt(prompt))
                    self.db.execute(
                        "UPDATE groups SET segment = ?, offset = ?, length = ?, crc = ? WHERE ordinal = ?",
                        (*where, group.ordinal),
                    )
            if cursor is not None:
                self._set_meta("cursor", cursor)

    def sample(self, sample: Sample) -> bool:
        """Record a finished completion; False if it was known or its group no longer waits (counted in ``dropped``).

        A reward or failure that is set already is recorded with it.
        """
        with self._write():
            row = self.db.execute(
                "SELECT status, EXISTS (SELECT 1 FROM samples WHERE ordinal = ?1 AND sample_index = ?2) "
                "FROM groups WHERE ordinal = ?1",
                (sample.ordinal, sample.index),
            ).fetchone()
            self._expect(row is not None, f"sample of group {sample.ordinal}, which was never dispatched")
            if row[1] or row[0] != "in_flight":
                reason = "duplicate" if row[1] else "late"
                self.dropped[reason] += 1
                self.event("dropped_sample", ordinal=sample.ordinal, index=sample.index, reason=reason)
                return False
            where = self._writer.append(encode_sample(sample))
            versions = sample.versions
            low, high = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
            self.db.execute(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?, ?, ?, ?, ?)",
                (
                    sample.ordinal,
                    sample.index,
                    sample.generator,
                    len(sample.token_ids),
                    sample.finish_reason,
                    low,
                    high,
                    *where,
                    self._clock(),
                ),
            )
            if sample.reward is not None or sample.failure is not None:
                self.scored(sample.ordinal, sample.index, reward=sample.reward, failure=sample.failure)
            return True

    def scored(self, ordinal: int, index: int, *, reward: float | None = None, failure: str | None = None) -> None:
        """Exactly one of ``reward`` and ``failure``. The last sample of a group makes it finished."""
        self._expect(
            (reward is None) != (failure is None), f"sample {ordinal}/{index}: a reward or a failure, not both"
        )
        if reward is not None:
            reward = float(reward)
            self._expect(math.isfinite(reward), f"sample {ordinal}/{index}: reward {reward}; record it as a failure")
        with self._write():
            found = self.db.execute(
                "UPDATE samples SET reward = ?, failure = ? "
                "WHERE ordinal = ? AND sample_index = ? AND reward IS NULL AND failure IS NULL",
                (reward, failure, ordinal, index),
            ).rowcount
            self._expect(found == 1, f"sample {ordinal}/{index} is not there to be scored, or was scored before")
            self.db.execute(
                "UPDATE groups SET scored = scored + 1, "
                "status = CASE WHEN scored + 1 = size AND status = 'in_flight' THEN 'finished' ELSE status END "
                "WHERE ordinal = ?",
                (ordinal,),
            )

    def filtered(self, ordinal: int, reason: str) -> None:
        """The group has nothing to teach."""
        self._end(ordinal, "filtered", reason)

    def failed(self, ordinal: int, reason: str) -> None:
        """The group is given up for good."""
        self._end(ordinal, "failed", reason)

    # batches

    def cut(self, version: int, ordinals: Sequence[int]) -> None:
        """These finished groups are the batch that trains at ``version``. On the disk when this returns."""
        self._expect(not self._nested, "a cut inside a transaction would not be durable")
        with _errors("sync"):
            self._writer.sync()
            self.db.execute("PRAGMA synchronous = FULL")
        try:
            with self._write():
                self._expect(version == self.next_version(), f"cut {version}, but {self.next_version()} is next")
                found = self.db.executemany(
                    "UPDATE groups SET status = 'taken', cut_version = ? WHERE ordinal = ? AND status = 'finished'",
                    [(version, ordinal) for ordinal in ordinals],
                ).rowcount
                self._expect(found == len(ordinals), f"cut {version}: only {found} of {list(ordinals)} are finished")
                self.db.execute("INSERT INTO cuts VALUES (?, ?, ?)", (version, _json(ordinals), self._clock()))
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")

    def step(self, version: int, outcome: str, metrics: dict[str, Any], reason: str | None = None) -> None:
        """The batch of ``version`` was "trained", or "skipped" for a reason; again after a restart replaces it."""
        with self._write():
            self._expect(version < self.next_version(), f"step {version} was never cut")
            self.db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, 1, ?) ON CONFLICT (version) DO UPDATE SET "
                "outcome = excluded.outcome, reason = excluded.reason, metrics = excluded.metrics, "
                "applied = applied + 1, time = excluded.time",
                (version, outcome, reason, _json(metrics), self._clock()),
            )

    def committed(self, generator: str, version: int) -> None:
        """``generator`` samples with ``version`` from now on."""
        with self._write():
            self.db.execute("INSERT INTO commits VALUES (?, ?, ?)", (version, generator, self._clock()))

    def checkpoint(self, version: int) -> None:
        """A checkpoint of ``version`` is complete."""
        with self._write():
            self.db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (version, self._clock()))

    def event(self, kind: str, **detail: Any) -> None:
        with self._write():
            self.db.execute(
                "INSERT INTO events (time, kind, detail) VALUES (?, ?, ?)", (self._clock(), kind, _json(detail))
            )

    # reads

    def next_version(self) -> int:
        """Number of batches cut."""
        return self.db.execute("SELECT coalesce(max(version) + 1, 0) FROM cuts").fetchone()[0]

    def next_ordinal(self) -> int:
        """Number of groups ever admitted."""
        return self.db.execute("SELECT coalesce(max(ordinal) + 1, 0) FROM groups").fetchone()[0]

    @property
    def prompt_cursor(self) -> dict[str, Any] | None:
        """The cursor behind the last admitted group; None before the first."""
        row = self.db.execute("SELECT value FROM meta WHERE key = 'cursor'").fetchone()
        return None if row is None else json.loads(row[0])

    def counters(self) -> dict[str, Any]:
        """The terms of the conservation law as :meth:`Slots.counters` gives them, from the rows alone."""
        db = self.db
        status = dict(db.execute("SELECT status, count(*) FROM groups GROUP BY status"))
        reasons = "SELECT reason, count(*) FROM groups WHERE status = ? GROUP BY reason"
        outcome = (
            "SELECT steps.reason, count(*) FROM groups JOIN steps ON version = cut_version WHERE outcome = ? GROUP BY 1"
        )
        trained = sum(count for _, count in db.execute(outcome, ("trained",)))
        skipped = dict(db.execute(outcome, ("skipped",)))
        return {
            "dispatched": sum(status.values()),
            "trained": trained,
            "skipped": skipped,
            "filtered": dict(db.execute(reasons, ("filtered",))),
            "failed": dict(db.execute(reasons, ("failed",))),
            "buffered": status.get("finished", 0),
            "in_training": status.get("taken", 0) - trained - sum(skipped.values()),
            "in_flight": status.get("in_flight", 0),
        }

    def prune(self, version: int) -> int:
        """Delete the segment files that nobody can need once a checkpoint of ``version`` is the oldest one kept.

        Their rows stay. Returns the bytes freed.
        """
        with _errors("prune"):
            alive = "status IN ('in_flight', 'finished') OR cut_version >= ?1"
            needed = self.db.execute(
                f"SELECT segment FROM groups WHERE {alive} UNION "
                f"SELECT s.segment FROM groups JOIN samples AS s USING (ordinal) WHERE {alive}",
                (version,),
            )
            keep = {number for (number,) in needed}
            freed = 0
            for number in segment_numbers(self.segments):
                if number < self._writer.number and number not in keep:
                    path = segment_path(self.segments, number)
                    freed += path.stat().st_size
                    path.unlink()
        return freed

    def _end(self, ordinal: int, status: str, reason: str) -> None:
        with self._write():
            found = self.db.execute(
                "UPDATE groups SET status = ?, reason = ? WHERE ordinal = ? AND status IN ('in_flight', 'finished')",
                (status, reason, ordinal),
            ).rowcount
            self._expect(found == 1, f"group {ordinal} cannot be {status}: it is not in flight or finished")

    def _check_meta(self, meta: dict[str, Any]) -> None:
        known = dict(self.db.execute("SELECT key, value FROM meta"))
        wanted = {"schema_version": SCHEMA_VERSION, **meta}
        differing = [
            f"{key} was {known[key]}, now {_json(value)}"
            for key, value in wanted.items()
            if key in known and known[key] != _json(value)
        ]
        self._expect(not differing, f"{self.directory} was written by another run: {'; '.join(differing)}")
        with self._write():
            for key in wanted.keys() - known.keys():
                self._set_meta(key, wanted[key])

    def _set_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _json(value)))

    @staticmethod
    def _expect(condition: bool, message: str) -> None:
        if not condition:
            raise LedgerError(message)


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


def _json(value: Any) -> str:
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


@contextmanager
def _errors(action: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"cannot {action} the ledger: {error}") from error
