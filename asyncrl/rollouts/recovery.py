"""Going on from a ledger.

Resume from the checkpoint of version c: ``recover(ledger, c)`` checks every payload that is still needed and returns a
:class:`Recovery`. The caller then applies the cuts c .. version-1 again, in order, on the same samples
(``ledger.cuts_since(c)``), restores ``Slots`` from ``recovery.slots``, decides about ``recovery.finished`` (for the
slots they are in flight until ``finish``, ``filter`` or ``fail``: a kill may have come between the last score and that)
and dispatches ``recovery.pending`` again, each under its old ordinal and only for the indices that are missing; those
in ``slots.waiting`` only once ``slots.readmit`` gives them out.

A payload that is missing, torn or changed costs its group: the group is pending again. If the group was in a cut, that
cut and the later ones cannot be applied again; they are abandoned (:func:`truncate_after`), their intact groups are
finished groups again, and training continues from the version before. So every group is in at most one surviving cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.rollouts.ledger import Ledger, LedgerError
from asyncrl.rollouts.segments import Location, LostRecord, read_record
from asyncrl.rollouts.slot_state import SlotState
from asyncrl.rollouts.types import Group, Prompt, Sample


@dataclass
class Pending:
    """A group to dispatch again. ``prompt`` is None if it was lost: the environment's item ``item_index`` has it."""

    ordinal: int
    item_id: str
    item_index: int
    epoch: int
    size: int
    prompt: Prompt | None
    samples: list[Sample]  # finished before; scored or not

    @property
    def missing(self) -> list[int]:
        """Indices of the samples that are still to be generated."""
        return sorted(set(range(self.size)) - {sample.index for sample in self.samples})


@dataclass
class Recovery:
    """``version`` is reached once the surviving cuts from the checkpoint on have been applied."""

    version: int
    finished: list[Group]
    pending: list[Pending]
    slots: SlotState
    cursor: dict[str, Any] | None
    lost: list[int] = field(default_factory=list)  # ordinals with a payload that could not be read
    abandoned: list[int] = field(default_factory=list)  # versions of the cuts that had to go


def recover(ledger: Ledger, checkpoint: int) -> Recovery:
    """Make the ledger fit for going on from the checkpoint of version ``checkpoint``; see the module's docstring.

    Raises:
        LedgerError: the ledger knows fewer batches than the checkpoint has consumed.
    """
    cuts = ledger.next_version()
    if cuts < checkpoint:
        raise LedgerError(f"the checkpoint has consumed {checkpoint} batches, the ledger knows {cuts}")
    abandoned: list[int] = []
    for number in range(checkpoint, cuts):
        if _unreadable(ledger, ledger.cut_ordinals(number)):
            abandoned = list(range(number, cuts))
            truncate_after(ledger, number)
            break
    version = ledger.next_version()
    _report_unreported(ledger, checkpoint)
    outstanding = ledger.with_status("in_flight") + ledger.with_status("finished")
    lost = _drop_unreadable(ledger, sorted(outstanding))
    ledger.event("resumed", checkpoint=checkpoint, version=version, lost=lost, abandoned=abandoned)
    finished = ledger.finished_uncut_groups()
    pending = [_pending(ledger, ordinal) for ordinal in ledger.with_status("in_flight")]
    return Recovery(
        version=version,
        finished=finished,
        pending=pending,
        slots=_slot_state(ledger, checkpoint, version),
        cursor=ledger.prompt_cursor,
        lost=lost,
        abandoned=abandoned,
    )


def truncate_after(ledger: Ledger, version: int) -> list[int]:
    """Abandon every cut that comes after the weights of ``version`` and return the ordinals to be dispatched again.

    Their groups are finished groups again. Samples with tokens of weights that are gone (newer than ``version``) are
    removed, in whichever group; such a group is in flight again, under its old ordinal.
    """
    db = ledger.db
    with ledger.transaction():
        gone = [row[0] for row in db.execute("SELECT version FROM cuts WHERE version >= ?", (version,))]
        db.execute("UPDATE groups SET status = 'finished', cut_version = NULL WHERE cut_version >= ?", (version,))
        db.execute("DELETE FROM cuts WHERE version >= ?", (version,))
        db.execute("DELETE FROM steps WHERE version >= ?", (version,))
        db.execute("DELETE FROM commits WHERE version > ?", (version,))
        db.execute("DELETE FROM checkpoints WHERE version > ?", (version,))
        future = db.execute(
            "SELECT ordinal, sample_index FROM samples JOIN groups USING (ordinal) "
            "WHERE status IN ('in_flight', 'finished') AND max_version > ?",
            (version,),
        ).fetchall()
        redo = sorted({ordinal for ordinal, _ in future})
        _forget_samples(ledger, future, set(redo))
        ledger.event("abandoned", after=version, cuts=gone, dispatched_again=redo)
    return redo


def _forget_samples(ledger: Ledger, keys: list[tuple[int, int]], ordinals: set[int]) -> None:
    """Remove these samples; the groups wait for them again."""
    ledger.db.executemany("DELETE FROM samples WHERE ordinal = ? AND sample_index = ?", keys)
    ledger.db.executemany(
        "UPDATE groups SET status = 'in_flight' WHERE ordinal = ?", [(ordinal,) for ordinal in ordinals]
    )
    ledger.refresh()


def _drop_unreadable(ledger: Ledger, ordinals: list[int]) -> list[int]:
    """Forget what cannot be read of these outstanding groups; return the groups that lost something."""
    lost = []
    with ledger.transaction():
        for ordinal in ordinals:
            prompt_ok = _readable(ledger, _GROUP_LOCATION, (ordinal,))
            samples = ledger.db.execute(_SAMPLE_LOCATIONS, (ordinal,)).fetchall()
            bad = [index for index, *where in samples if not prompt_ok or not _intact(ledger, where)]
            if bad or not prompt_ok:
                lost.append(ordinal)
                _forget_samples(ledger, [(ordinal, index) for index in bad], {ordinal})
            if not prompt_ok:
                ledger.db.execute("UPDATE groups SET segment = NULL WHERE ordinal = ?", (ordinal,))
    return lost


_GROUP_LOCATION = "SELECT segment, offset, length, crc FROM groups WHERE ordinal = ?"
_SAMPLE_LOCATIONS = (
    "SELECT sample_index, segment, offset, length, crc FROM samples WHERE ordinal = ? ORDER BY sample_index"
)


def _readable(ledger: Ledger, query: str, key: tuple[int, ...]) -> bool:
    return _intact(ledger, ledger.db.execute(query, key).fetchone())


def _intact(ledger: Ledger, where: Any) -> bool:
    if where[0] is None:
        return False
    try:
        read_record(ledger.segments, Location(*where))
    except LostRecord:
        return False
    return True


def _unreadable(ledger: Ledger, ordinals: list[int]) -> list[int]:
    return [
        ordinal
        for ordinal in ordinals
        if not _readable(ledger, _GROUP_LOCATION, (ordinal,))
        or not all(_intact(ledger, where) for _, *where in ledger.db.execute(_SAMPLE_LOCATIONS, (ordinal,)).fetchall())
    ]


def _pending(ledger: Ledger, ordinal: int) -> Pending:
    item_id, item_index, epoch, size, segment = ledger.db.execute(
        "SELECT item_id, item_index, epoch, size, segment FROM groups WHERE ordinal = ?", (ordinal,)
    ).fetchone()
    prompt = None if segment is None else ledger.prompt(ordinal, item_id, item_index)
    return Pending(ordinal, item_id, item_index, epoch, size, prompt, ledger.samples(ordinal))


def _report_unreported(ledger: Ledger, checkpoint: int) -> None:
    """A checkpoint proves that the batches before it were applied, even if a kill came before the step's report."""
    unknown = ledger.db.execute(
        "SELECT version FROM cuts LEFT JOIN steps USING (version) WHERE outcome IS NULL AND version < ?", (checkpoint,)
    ).fetchall()
    with ledger.transaction():
        for (version,) in unknown:
            ledger.step(version, "trained", {}, "not reported before the restart")


def _slot_state(ledger: Ledger, checkpoint: int, version: int) -> SlotState:
    """Cuts from the checkpoint on are in training again; their slots are free, since all generators join at version."""
    db = ledger.db
    counters = ledger.counters()
    again = dict(
        db.execute("SELECT cut_version, count(*) FROM groups WHERE cut_version >= ? GROUP BY 1", (checkpoint,))
    )
    outcome = (
        "SELECT steps.reason, count(*) FROM groups JOIN steps ON version = cut_version "
        "WHERE outcome = ? AND version < ? GROUP BY 1"
    )
    open_groups = sorted(ledger.with_status("in_flight") + ledger.with_status("finished"))
    return SlotState(
        version=version,
        floor=version,
        next_ordinal=ledger.next_ordinal(),
        open=dict.fromkeys(open_groups, False),
        untrained=again,
        trained=sum(count for _, count in db.execute(outcome, ("trained", checkpoint))),
        skipped=dict(db.execute(outcome, ("skipped", checkpoint))),
        filtered=counters["filtered"],
        failed=counters["failed"],
    )
