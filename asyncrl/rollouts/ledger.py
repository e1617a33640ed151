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

Reading is in asyncrl.rollouts.ledger_reads, resuming in asyncrl.rollouts.recovery. Not thread-safe: use it from one
thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from asyncrl.rollouts.ledger_reads import LedgerReads
from asyncrl.rollouts.segments import encode_prompt, encode_sample, segment_numbers, segment_path
from asyncrl.rollouts.store import LedgerError, Store, errors, expect, to_json
from asyncrl.rollouts.types import Group, Sample

__all__ = ["Ledger", "LedgerError"]


class _Waiting:
    """What a group in flight has so far; spares a query for every sample."""

    __slots__ = ("scored", "seen", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: set[int] = set()
        self.scored: set[int] = set()


class Ledger(Store, LedgerReads):
    """See the module's docstring for what holds when a method returns, and Store for how it is opened."""

    _waiting: dict[int, _Waiting]

    def refresh(self) -> None:
        self._waiting = {
            ordinal: _Waiting(size)
            for ordinal, size in self.db.execute("SELECT ordinal, size FROM groups WHERE status = 'in_flight'")
        }
        for ordinal, index, scored in self.db.execute(
            "SELECT ordinal, sample_index, reward IS NOT NULL OR failure IS NOT NULL "
            "FROM groups JOIN samples USING (ordinal) WHERE status = 'in_flight'"
        ):
            self._waiting[ordinal].seen.add(index)
            if scored:
                self._waiting[ordinal].scored.add(index)

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
        with self._scope:
            row = self.db.execute("SELECT status, segment FROM groups WHERE ordinal = ?", (group.ordinal,)).fetchone()
            if row is None:
                # in order, so that a kill between two admissions leaves no hole in the ordinals
                expect(group.ordinal == self.next_ordinal(), f"group {group.ordinal} is dispatched out of order")
                where = self._writer.append(encode_prompt(prompt))
                self.db.execute(
                    "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, 1, 'in_flight', NULL, NULL, ?, ?, ?, ?, ?)",
                    (group.ordinal, prompt.item_id, prompt.index, group.epoch, size, version, generator, *where, now),
                )
                self._waiting[group.ordinal] = _Waiting(size)
            else:
                expect(row[0] == "in_flight", f"group {group.ordinal} is dispatched again, but it is {row[0]}")
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
        """Record a finished completion; False if it was known or its group no longer waits: then see ``drop``.

        A reward or failure that is set already is recorded with it. Check it with validate.defect before.
        """
        group = self._waiting.get(sample.ordinal)
        if group is None or sample.index in group.seen:
            known = sample.ordinal < self.next_ordinal()
            expect(known, f"sample of group {sample.ordinal}, which was never dispatched")
            self.drop(sample, "duplicate" if group else "late")
            return False
        if not 0 <= sample.index < group.size:
            raise LedgerError(f"sample {sample.ordinal}/{sample.index} of a group of {group.size}")
        with self._scope:
            where = self._writer.append(encode_sample(sample))
            versions = sample.versions  # weights only get newer: the first is the oldest
            low, high = (int(versions[0]), int(versions[-1])) if len(versions) else (None, None)
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
            group.seen.add(sample.index)
            if sample.reward is not None or sample.failure is not None:
                self.scored(sample.ordinal, sample.index, reward=sample.reward, failure=sample.failure)
        return True

    def drop(self, sample: Sample, reason: str) -> None:
        """``sample`` came, and is not recorded: an event ``dropped_sample`` says so. A negative ordinal: evaluation."""
        self.event(
            "dropped_sample",
            ordinal=sample.ordinal,
            index=sample.index,
            generator=sample.generator,
            n_tokens=len(sample.token_ids),
            reason=reason,
        )

    def scored(self, ordinal: int, index: int, *, reward: float | None = None, failure: str | None = None) -> None:
        """Exactly one of ``reward`` and ``failure``. The last sample of a group makes it finished."""
        if (reward is None) == (failure is None):
            raise LedgerError(f"sample {ordinal}/{index}: a reward or a failure, not both")
        if reward is not None:
            reward = float(reward)
            if not math.isfinite(reward):
                raise LedgerError(f"sample {ordinal}/{index}: reward {reward}; record it as a failure")
        with self._scope:
            found = self.db.execute(
                "UPDATE samples SET reward = ?, failure = ? "
                "WHERE ordinal = ? AND sample_index = ? AND reward IS NULL AND failure IS NULL",
                (reward, failure, ordinal, index),
            ).rowcount
            if found != 1:
                raise LedgerError(f"sample {ordinal}/{index} is not there to be scored, or was scored before")
            group = self._waiting.get(ordinal)
            if group is None:  # given up meanwhile
                return
            group.scored.add(index)
            if len(group.scored) == group.size:
                self.db.execute("UPDATE groups SET status = 'finished' WHERE ordinal = ?", (ordinal,))
                del self._waiting[ordinal]

    def filtered(self, ordinal: int, reason: str) -> None:
        """The group has nothing to teach."""
        self._end(ordinal, "filtered", reason)

    def failed(self, ordinal: int, reason: str) -> None:
        """The group is given up for good."""
        self._end(ordinal, "failed", reason)

    # batches

    def cut(self, version: int, ordinals: Sequence[int]) -> None:
        """These finished groups are the batch that trains at ``version``. On the disk when this returns."""
        expect(not self._depth, "a cut inside a transaction would not be durable")
        with errors("sync"):
            self._writer.sync()
            self.db.execute("PRAGMA synchronous = FULL")
        try:
            with self._scope:
                expect(version == self.next_version(), f"cut {version}, but {self.next_version()} is next")
                found = self.db.executemany(
                    "UPDATE groups SET status = 'taken', cut_version = ? WHERE ordinal = ? AND status = 'finished'",
                    [(version, ordinal) for ordinal in ordinals],
                ).rowcount
                expect(found == len(ordinals), f"cut {version}: only {found} of {list(ordinals)} are finished")
                self.db.execute("INSERT INTO cuts VALUES (?, ?, ?)", (version, to_json(ordinals), self._clock()))
        finally:
            self.db.execute("PRAGMA synchronous = NORMAL")

    def step(self, version: int, outcome: str, metrics: dict[str, Any], reason: str | None = None) -> None:
        """The batch of ``version`` was "trained", or "skipped" for a reason; again after a restart replaces it."""
        with self._scope:
            expect(version < self.next_version(), f"step {version} was never cut")
            self.db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, 1, ?) ON CONFLICT (version) DO UPDATE SET "
                "outcome = excluded.outcome, reason = excluded.reason, metrics = excluded.metrics, "
                "applied = applied + 1, time = excluded.time",
                (version, outcome, reason, to_json(metrics), self._clock()),
            )

    def committed(self, generator: str, version: int) -> None:
        """``generator`` samples with ``version`` from now on."""
        with self._scope:
            self.db.execute("INSERT INTO commits VALUES (?, ?, ?)", (version, generator, self._clock()))

    def checkpoint(self, version: int) -> None:
        """A checkpoint of ``version`` is complete."""
        with self._scope:
            self.db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", (version, self._clock()))

    def prune(self, keep: int) -> int:
        """Delete the segment files that no restart can need while the ``keep`` newest checkpoints exist.

        Their rows stay. With fewer checkpoints nothing goes. Returns the bytes freed.
        """
        expect(not self._depth, "files deleted inside a transaction would not come back with it")
        with errors("prune"):
            newest = self.db.execute(
                "SELECT version FROM checkpoints ORDER BY version DESC LIMIT ?", (keep,)
            ).fetchall()
            if len(newest) < keep:
                return 0
            alive = "status IN ('in_flight', 'finished') OR cut_version >= ?1"
            needed = self.db.execute(
                f"SELECT segment FROM groups WHERE {alive} UNION "
                f"SELECT s.segment FROM groups JOIN samples AS s USING (ordinal) WHERE {alive}",
                newest[-1],
            )
            alive_in = {number for (number,) in needed}
            freed = 0
            for number in segment_numbers(self.segments):
                if number < self._writer.number and number not in alive_in:
                    path = segment_path(self.segments, number)
                    freed += path.stat().st_size
                    path.unlink()
        return freed

    def _end(self, ordinal: int, status: str, reason: str) -> None:
        with self._scope:
            found = self.db.execute(
                "UPDATE groups SET status = ?, reason = ? WHERE ordinal = ? AND status IN ('in_flight', 'finished')",
                (status, reason, ordinal),
            ).rowcount
            expect(found == 1, f"group {ordinal} cannot be {status}: it is not in flight or finished")
            self._waiting.pop(ordinal, None)
