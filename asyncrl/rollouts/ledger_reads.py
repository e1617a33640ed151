"""Reading a ledger: by the run that writes it, and beside it (:class:`LedgerReader`)."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.rollouts.segments import Location, LostRecord, decode_prompt, decode_sample, read_record
from asyncrl.rollouts.store import expect
from asyncrl.rollouts.types import Group, Prompt, Sample


class LedgerReads:
    """The queries. Methods that return groups raise LostRecord if a payload is damaged or was pruned."""

    db: sqlite3.Connection
    segments: Path

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

    def group(self, ordinal: int) -> Group:
        """A group with its prompt and every sample recorded so far, in order of indices."""
        row = self.db.execute("SELECT item_id, item_index, epoch FROM groups WHERE ordinal = ?", (ordinal,)).fetchone()
        expect(row is not None, f"there is no group {ordinal}")
        item_id, item_index, epoch = row
        return Group(ordinal, self.prompt(ordinal, item_id, item_index), self.samples(ordinal), epoch)

    def prompt(self, ordinal: int, item_id: str, item_index: int) -> Prompt:
        """The prompt of a group, as it was tokenised."""
        query = "SELECT segment, offset, length, crc FROM groups WHERE ordinal = ?"
        where = self.db.execute(query, (ordinal,)).fetchone()
        if where[0] is None:
            raise LostRecord(f"the prompt of group {ordinal} was lost")
        return decode_prompt(read_record(self.segments, Location(*where)), item_id, item_index)

    def samples(self, ordinal: int) -> list[Sample]:
        """The samples recorded so far of a group, in order of indices."""
        rows = self.db.execute(
            "SELECT sample_index, generator, finish_reason, reward, failure, segment, offset, length, crc "
            "FROM samples WHERE ordinal = ? ORDER BY sample_index",
            (ordinal,),
        ).fetchall()
        samples = []
        for index, generator, finish_reason, reward, failure, *where in rows:
            ids, logprobs, versions, text = decode_sample(read_record(self.segments, Location(*where)))
            samples.append(
                Sample(ordinal, index, ids, logprobs, versions, finish_reason, generator, reward, failure, text)
            )
        return samples

    def cut_ordinals(self, version: int) -> list[int]:
        """The groups of the batch that trains at ``version``, in its order."""
        row = self.db.execute("SELECT ordinals FROM cuts WHERE version = ?", (version,)).fetchone()
        expect(row is not None, f"there is no cut {version}")
        return json.loads(row[0])

    def cuts_since(self, version: int) -> Iterator[tuple[int, list[Group]]]:
        """(version, groups in the order of the batch) for every cut from ``version`` on, read one at a time."""
        for number in range(version, self.next_version()):
            yield number, [self.group(ordinal) for ordinal in self.cut_ordinals(number)]

    def finished_uncut_groups(self) -> list[Group]:
        """Groups that are scored and in no batch, in order of ordinals."""
        return [self.group(ordinal) for ordinal in self.with_status("finished")]

    def with_status(self, status: str) -> list[int]:
        """Ordinals of the groups in flight, finished, filtered, failed or taken, ascending."""
        rows = self.db.execute("SELECT ordinal FROM groups WHERE status = ? ORDER BY ordinal", (status,))
        return [ordinal for (ordinal,) in rows]


class LedgerReader(LedgerReads):
    """A ledger to look at, also while its run goes on; it changes nothing."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises sqlite3.OperationalError if there is no ledger in ``directory``."""
        path = Path(directory).resolve()
        self.segments = path / "segments"
        self.db = sqlite3.connect(f"{(path / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.db.close()
