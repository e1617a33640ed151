"""asyncrl.rollouts.recovery: resume loses nothing, trains nothing twice, and survives damaged files."""

from __future__ import annotations

import pytest

from asyncrl.rollouts.ledger import Ledger, LedgerError
from asyncrl.rollouts.recovery import recover, truncate_after
from asyncrl.rollouts.segments import segment_path
from asyncrl.rollouts.slots import Slots, StaleGeneratorError
from tests.rollouts.books import assert_same_group, dispatch, finish, make_group, make_sample


def run_of_three_steps(path, **kwargs) -> dict[int, object]:
    """Cuts 0..2 trained, group 6 finished, 7 half done, 8 in flight, 9 filtered. Returns the groups by ordinal."""
    groups = {}
    with Ledger(path, **kwargs) as ledger:
        for ordinal in range(7):
            groups[ordinal] = finish(ledger, ordinal, version=max(0, ordinal // 2 - 1))
        for version in range(3):
            ledger.cut(version, [2 * version, 2 * version + 1])
            ledger.step(version, "trained", {"loss": 1.0})
        groups[7] = dispatch(ledger, 7, 2)
        sample = make_sample(7, 1, version=2)
        ledger.sample(sample)
        groups[7].samples.append(sample)
        groups[8] = dispatch(ledger, 8, 2)
        finish(ledger, 9)
        ledger.filtered(9, "equal rewards")
    return groups


def corrupt(ledger: Ledger, query: str, *, cut_to: int | None = None) -> None:
    """Damage the record that the query's row names, or cut its file inside it."""
    segment, offset, length = ledger.db.execute(query).fetchone()
    path = segment_path(ledger.segments, segment)
    if cut_to is not None:
        with open(path, "r+b") as file:
            file.truncate(offset + cut_to)
        return
    with open(path, "r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)[0]
        file.seek(offset + length // 2)
        file.write(bytes([byte ^ 1]))


def sample_of(ordinal: int, index: int) -> str:
    return f"SELECT segment, offset, length FROM samples WHERE ordinal = {ordinal} AND sample_index = {index}"


def test_nothing_damaged(tmp_path):
    groups = run_of_three_steps(tmp_path)
    with Ledger(tmp_path) as ledger:
        recovery = recover(ledger, 1)
        assert recovery.version == 3
        assert recovery.lost == recovery.abandoned == []
        assert recovery.cursor == {"position": 10}
        cuts = list(ledger.cuts_since(1))
        assert [version for version, _ in cuts] == [1, 2]
        for _, members in cuts:
            for group in members:
                assert_same_group(group, groups[group.ordinal])
        assert [group.ordinal for group in recovery.finished] == [6]
        assert_same_group(recovery.finished[0], groups[6])
        assert [(pending.ordinal, pending.missing) for pending in recovery.pending] == [(7, [0]), (8, [0, 1])]
        assert recovery.pending[0].samples[0].index == 1


def test_slots_go_on_from_the_ledger(tmp_path):
    run_of_three_steps(tmp_path)
    with Ledger(tmp_path) as ledger:
        recovery = recover(ledger, 1)
        slots = Slots.restore(2, 1, 1, recovery.slots)
        slots.finish(6)
        assert slots.counters() | {"slots": 0, "slots_held": 0} == {
            "dispatched": 10,
            "trained": 2,
            "skipped": {},
            "filtered": {"equal rewards": 1},
            "failed": {},
            "buffered": 1,
            "in_training": 4,  # cuts 1 and 2 are applied again
            "in_flight": 2,
            "slots": 0,
            "slots_held": 0,
        }
        slots.mark_trained(1)
        slots.mark_trained(2)
        with pytest.raises(StaleGeneratorError):
            slots.join("g0", 2)  # weights from before the restart
        slots.join("g0", 3)
        assert slots.admit() == 10
        assert slots.admit() is None
        slots.finish(7)
        assert slots.take() == [6, 7]
        assert slots.version == 4


@pytest.mark.parametrize("cut_to", [None, 0, 5])
def test_a_lost_sample_of_a_finished_group_is_generated_again(tmp_path, cut_to):
    run_of_three_steps(tmp_path, segment_bytes=1)
    with Ledger(tmp_path) as ledger:
        corrupt(ledger, sample_of(6, 1), cut_to=cut_to)
        recovery = recover(ledger, 1)
        assert recovery.lost == [6]
        assert recovery.abandoned == []
        assert recovery.finished == []
        assert [(pending.ordinal, pending.missing) for pending in recovery.pending] == [
            (6, [1]),
            (7, [0]),
            (8, [0, 1]),
        ]
        assert ledger.sample(make_sample(6, 1, version=3))
        ledger.scored(6, 1, reward=1.0)
        assert [group.ordinal for group in recover(ledger, 1).finished] == [6]


def test_a_missing_file_and_a_lost_prompt(tmp_path):
    run_of_three_steps(tmp_path, segment_bytes=1)
    with Ledger(tmp_path) as ledger:
        (segment,) = ledger.db.execute("SELECT segment FROM groups WHERE ordinal = 7").fetchone()
        segment_path(ledger.segments, segment).unlink()
        recovery = recover(ledger, 1)
        assert recovery.lost == [7]
        pending = recovery.pending[0]
        assert (pending.ordinal, pending.prompt, pending.missing) == (7, None, [0, 1])
        assert (pending.item_id, pending.item_index) == ("train:10", 10)
        ledger.dispatched(make_group(7), "g0", size=2, version=3)
        again = recover(ledger, 1)
        assert again.lost == []
        assert again.pending[0].prompt.item_id == "train:10"


def test_a_lost_sample_of_a_cut_abandons_that_cut_and_the_later_ones(tmp_path):
    groups = run_of_three_steps(tmp_path, segment_bytes=1)
    with Ledger(tmp_path) as ledger:
        corrupt(ledger, sample_of(3, 0))  # cut 1
        recovery = recover(ledger, 0)
        assert recovery.version == 1
        assert recovery.abandoned == [1, 2]
        assert recovery.lost == [3]
        assert [version for version, _ in ledger.cuts_since(0)] == [0]
        # groups 2, 4, 5 are whole and their tokens are of versions 0 and 1; group 6 was sampled by version 2, which
        # is gone, and so was the sample of group 7
        assert [group.ordinal for group in recovery.finished] == [2, 4, 5]
        assert [(pending.ordinal, pending.missing) for pending in recovery.pending] == [
            (3, [0]),
            (6, [0, 1]),
            (7, [0, 1]),
            (8, [0, 1]),
        ]
        for group in recovery.finished:
            assert_same_group(group, groups[group.ordinal])
        slots = Slots.restore(2, 1, 1, recovery.slots)
        assert slots.version == 1
        assert slots.admit() is None  # more groups than slots are outstanding
        ledger.cut(1, [2, 4])


def test_truncation_forgets_later_history(tmp_path):
    run_of_three_steps(tmp_path)
    with Ledger(tmp_path) as ledger:
        ledger.committed("g0", 1)
        ledger.committed("g0", 3)
        ledger.checkpoint(1)
        ledger.checkpoint(3)
        assert truncate_after(ledger, 1) == [6, 7]
        for table, left in (("cuts", [0]), ("steps", [0]), ("commits", [1]), ("checkpoints", [1])):
            assert [row[0] for row in ledger.db.execute(f"SELECT version FROM {table} ORDER BY 1")] == left
        assert ledger.next_version() == 1
        counters = ledger.counters()
        assert counters["buffered"] == 4 and counters["in_flight"] == 3 and counters["dispatched"] == 10


def test_a_step_that_was_not_reported_before_the_checkpoint(tmp_path):
    with Ledger(tmp_path) as ledger:
        finish(ledger, 0)
        ledger.cut(0, [0])
    with Ledger(tmp_path) as ledger:
        recovery = recover(ledger, 1)
        assert recovery.slots.trained == 1
        Slots.restore(1, 0, 1, recovery.slots)


def test_a_checkpoint_of_the_future_is_refused(tmp_path):
    run_of_three_steps(tmp_path)
    with Ledger(tmp_path) as ledger, pytest.raises(LedgerError, match="4 batches, the ledger knows 3"):
        recover(ledger, 4)


def test_applied_again_replaces_the_step(tmp_path):
    run_of_three_steps(tmp_path)
    with Ledger(tmp_path) as ledger:
        recover(ledger, 2)
        ledger.step(2, "trained", {"loss": 2.0})
        query = "SELECT applied, metrics ->> 'loss' FROM steps WHERE version = 2"
        assert ledger.db.execute(query).fetchone() == (2, 2.0)
        assert ledger.counters()["trained"] == 6
