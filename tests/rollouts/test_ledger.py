"""asyncrl.rollouts.ledger: what is recorded, what is refused, what an error leaves behind."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.rollouts import ledger_schema
from asyncrl.rollouts.ledger import Ledger, LedgerError
from asyncrl.rollouts.ledger_reads import LedgerReader
from asyncrl.rollouts.recovery import recover
from tests.rollouts.books import SIZE, assert_same_group, dispatch, finish, make_group, make_sample


def dropped(ledger: Ledger) -> list[tuple]:
    """(ordinal, index, reason) of the samples that came and were not recorded."""
    keys = ", ".join(f"detail ->> '{key}'" for key in ("ordinal", "index", "reason"))
    return ledger.db.execute(f"SELECT {keys} FROM events WHERE kind = 'dropped_sample'").fetchall()


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path, {"seed": 1}) as opened:
        yield opened


class TestRecording:
    def test_a_group_comes_back_as_it_was(self, ledger):
        want = finish(ledger, 0, version=3)
        assert_same_group(ledger.group(0), want)
        assert [group.ordinal for group in ledger.finished_uncut_groups()] == [0]

    def test_empty_completion_and_odd_text(self, ledger):
        want = finish(ledger, 0, tokens=0, text="\ud800 \u2028 \x00")
        assert_same_group(ledger.group(0), want)

    def test_a_sample_twice_changes_nothing_and_is_counted(self, ledger):
        dispatch(ledger, 0)
        assert ledger.sample(make_sample(0, 1))
        assert not ledger.sample(make_sample(0, 1, version=5))
        assert dropped(ledger) == [(0, 1, "duplicate")]
        assert ledger.group(0).samples[0].versions.max() == 0

    def test_a_sample_of_an_ended_group_is_late(self, ledger):
        dispatch(ledger, 0)
        ledger.failed(0, "engine died 3 times")
        assert not ledger.sample(make_sample(0, 0))
        assert dropped(ledger) == [(0, 0, "late")]

    def test_a_score_that_comes_with_the_sample(self, ledger):
        dispatch(ledger, 0)
        for index in range(SIZE):
            sample = make_sample(0, index)
            sample.failure = "logprob not finite"
            ledger.sample(sample)
        assert ledger.counters()["buffered"] == 1
        assert ledger.group(0).samples[0].failure == "logprob not finite"

    def test_dispatched_again_keeps_ordinal_and_samples(self, ledger):
        group = dispatch(ledger, 0)
        ledger.sample(make_sample(0, 0))
        ledger.dispatched(group, "g1", size=SIZE, version=0)
        assert ledger.counters()["dispatched"] == 1
        assert ledger.db.execute("SELECT generator, dispatches FROM groups").fetchall() == [("g1", 2)]
        assert len(ledger.group(0).samples) == 1

    def test_the_prompt_cursor_is_that_of_the_last_group(self, ledger):
        assert ledger.prompt_cursor is None
        dispatch(ledger, 0)
        dispatch(ledger, 1)
        assert ledger.prompt_cursor == {"position": 2}

    def test_contradictions_are_refused_and_change_nothing(self, ledger):
        finish(ledger, 0)
        refused = [
            lambda: ledger.sample(make_sample(7, 0)),  # never dispatched
            lambda: dispatch(ledger, 2),  # leaves a hole
            lambda: dispatch(ledger, 0),  # finished already
            lambda: ledger.scored(0, 0, reward=1.0),  # twice
            lambda: ledger.scored(0, 5, reward=1.0),
            lambda: ledger.scored(0, 0),
            lambda: ledger.scored(0, 0, reward=1.0, failure="both"),
            lambda: ledger.cut(1, [0]),  # 0 is next
            lambda: ledger.cut(0, [0, 1]),
            lambda: ledger.step(0, "trained", {}),
            lambda: ledger.filtered(3, "unknown"),
        ]
        before = list(ledger.db.iterdump())
        for call in refused:
            with pytest.raises(LedgerError):
                call()
            assert list(ledger.db.iterdump()) == before
        ledger.cut(0, [0])
        with pytest.raises(LedgerError):
            ledger.cut(1, [0])  # nothing is trained twice
        with pytest.raises(LedgerError):
            ledger.failed(0, "in training")

    def test_a_reward_that_is_no_number_is_refused(self, ledger):
        dispatch(ledger, 0)
        ledger.sample(make_sample(0, 0))
        with pytest.raises(LedgerError, match="failure"):
            ledger.scored(0, 0, reward=float("nan"))
        ledger.scored(0, 0, reward=np.float32(0.5))
        assert ledger.db.execute("SELECT reward, typeof(reward) FROM samples").fetchone() == (0.5, "real")

    def test_counters_follow_every_state(self, ledger):
        for ordinal in range(8):
            finish(ledger, ordinal)
        dispatch(ledger, 8)
        ledger.filtered(0, "equal rewards")
        ledger.failed(1, "lost")
        ledger.cut(0, [2])
        ledger.cut(1, [4, 3])
        ledger.cut(2, [5])
        ledger.step(0, "trained", {})
        ledger.step(1, "skipped", {}, "no variance")
        assert ledger.counters() == {
            "dispatched": 9,
            "trained": 1,
            "skipped": {"no variance": 2},
            "filtered": {"equal rewards": 1},
            "failed": {"lost": 1},
            "buffered": 2,
            "in_training": 1,
            "in_flight": 1,
        }
        assert [(version, [group.ordinal for group in groups]) for version, groups in ledger.cuts_since(1)] == [
            (1, [4, 3]),
            (2, [5]),
        ]

    def test_metrics_are_json_that_sqlite_can_query(self, ledger):
        finish(ledger, 0)
        ledger.cut(0, [0])
        ledger.step(0, "trained", {"loss": np.float32(0.5), "norm": float("nan"), "ages": np.array([1, 2])})
        query = "SELECT metrics ->> 'loss', metrics ->> 'norm', metrics -> 'ages' FROM steps"
        assert ledger.db.execute(query).fetchone() == (0.5, "nan", "[1,2]")

    def test_a_transaction_is_all_or_nothing(self, ledger):
        dispatch(ledger, 0)
        with pytest.raises(KeyError), ledger.transaction():
            ledger.sample(make_sample(0, 0))
            raise KeyError
        assert ledger.group(0).samples == []
        with ledger.transaction():
            assert ledger.sample(make_sample(0, 0))
            with pytest.raises(LedgerError, match="durable"):
                ledger.cut(0, [])
        assert len(ledger.group(0).samples) == 1


class TestDurability:
    def test_a_cut_syncs_the_payloads_then_the_rows(self, ledger, monkeypatch):
        """What a power cut would show, as far as it can be seen without one: every fsync in its place."""
        finish(ledger, 0)
        seen = []
        fsync = os.fsync
        monkeypatch.setattr(
            os, "fsync", lambda fd: (seen.append("fsync " + os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
        )
        ledger.db.set_trace_callback(seen.append)
        ledger.cut(0, [0])
        ledger.db.set_trace_callback(None)
        place = [
            next(i for i, what in enumerate(seen) if pattern in what)
            for pattern in (
                "000001.seg",
                "synchronous = FULL",
                "BEGIN",
                "INSERT INTO cuts",
                "COMMIT",
                "synchronous = NORMAL",
            )
        ]
        assert place == sorted(place)
        assert ledger.db.execute("PRAGMA synchronous").fetchone() == (1,)

    def test_full_segments_are_synced_too(self, tmp_path, monkeypatch):
        synced = []
        fsync = os.fsync
        with Ledger(tmp_path, segment_bytes=1) as ledger:
            monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
            finish(ledger, 0)
            ledger.cut(0, [0])
            assert {Path(path).name for path in synced} >= {f"{number:06d}.seg" for number in range(1, 2 + SIZE)}


class TestOpening:
    def test_a_second_writer_is_refused(self, tmp_path):
        with Ledger(tmp_path), pytest.raises(LedgerError, match=f"open in process {os.getpid()}"):
            Ledger(tmp_path)
        Ledger(tmp_path).close()

    def test_another_run_is_refused_by_name(self, tmp_path):
        Ledger(tmp_path, {"seed": 1, "data": "abc"}).close()
        with pytest.raises(LedgerError, match="seed was 1, now 2"):
            Ledger(tmp_path, {"seed": 2, "data": "abc"})
        Ledger(tmp_path, {"seed": 1, "more": 3}).close()

    def test_a_damaged_database_is_an_error_with_words(self, tmp_path):
        Ledger(tmp_path).close()
        (tmp_path / "ledger.sqlite").write_bytes(b"not a database" * 1000)
        with pytest.raises(LedgerError, match="cannot open"):
            Ledger(tmp_path)

    def test_users_read_while_the_run_writes(self, ledger):
        want = finish(ledger, 0)
        with LedgerReader(ledger.directory) as reader:
            assert reader.db.execute("SELECT avg(reward) FROM samples").fetchone() == (0.5,)
            finish(ledger, 1)
            assert reader.counters()["buffered"] == 2
            assert_same_group(reader.group(0), want)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader.db.execute("DELETE FROM groups")

    def test_the_example_of_the_schema(self, ledger):
        finish(ledger, 0)
        ledger.cut(0, [0])
        query = next(line for line in (ledger_schema.__doc__ or "").splitlines() if "SELECT" in line).split('"')[1]
        assert ledger.db.execute(query).fetchall() == [(0, 0.5)]

    def test_every_query_of_the_documentation_runs(self, ledger):
        finish(ledger, 0)
        ledger.cut(0, [0])
        text = (Path(__file__).resolve().parents[2] / "docs" / "ledger.md").read_text()
        (python,) = re.findall(r'"""(.*?)"""', text, re.DOTALL)
        (block,) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
        assert ledger.db.execute(python).fetchall() == [(0, 0.5, 5.0, 0)]
        queries = [query for query in block.split(";") if query.strip()]
        assert len(queries) == 4
        for query in queries:
            ledger.db.execute(query).fetchall()

    def test_no_ledger_to_read(self, tmp_path):
        with pytest.raises(sqlite3.OperationalError):
            LedgerReader(tmp_path / "nowhere")


FULL_DISK = """
import resource, signal, sys
from asyncrl.rollouts import ledger_schema
from asyncrl.rollouts.ledger import Ledger, LedgerError
from asyncrl.rollouts.ledger_reads import LedgerReader
from tests.rollouts.books import dispatch, finish, make_sample
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(sys.argv[1])
finish(ledger, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
done = 0
try:
    while True:
        finish(ledger, done + 1, tokens=int(sys.argv[3]))
        done += 1
except LedgerError as error:
    print("error", error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("last", done)
ledger.cut(0, [0])
finish(ledger, ledger.next_ordinal())
"""


class TestDiskFull:
    @pytest.mark.parametrize("tokens, limit", [(5000, 400_000), (1, 300_000)], ids=["segment", "database"])
    def test_the_error_is_typed_and_nothing_is_harmed(self, tmp_path, tokens, limit):
        """The file size limit makes the kernel refuse writes half-way, as a full disk does."""
        run = subprocess.run(
            [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit), str(tokens)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert "error cannot write the ledger" in run.stdout
        last = int(run.stdout.split("last ")[1])
        with Ledger(tmp_path) as ledger:
            recovery = recover(ledger, 0)
            assert recovery.lost == []
            assert recovery.version == 1
            finished = [group.ordinal for group in recovery.finished]
            assert set(range(1, last + 1)) <= set(finished)
            assert finished[-1] == ledger.next_ordinal() - 1


class TestPrune:
    def test_only_what_no_restart_needs_goes(self, tmp_path):
        with Ledger(tmp_path, segment_bytes=1) as ledger:  # one record a file
            for ordinal in range(4):
                finish(ledger, ordinal)
            ledger.filtered(3, "equal rewards")
            ledger.cut(0, [0])
            ledger.cut(1, [1])
            before = len(list(ledger.segments.iterdir()))
            ledger.checkpoint(1)
            assert ledger.prune(2) == 0, "a restart may have to begin anew"
            ledger.checkpoint(2)
            with pytest.raises(LedgerError, match="inside a transaction"), ledger.transaction():
                ledger.prune(2)
            assert ledger.prune(2) > 0
            assert before - len(list(ledger.segments.iterdir())) == 2 * (1 + SIZE) - 1  # the current file stays
            assert [version for version, _ in ledger.cuts_since(1)] == [1]
            assert [group.ordinal for group in ledger.finished_uncut_groups()] == [2]
            assert ledger.prune(2) == 0
            assert json.loads(ledger.db.execute("SELECT ordinals FROM cuts").fetchone()[0]) == [0]
            assert_same_group(ledger.group(2), make_finished(2))


def make_finished(ordinal):
    group = make_group(ordinal)
    for index in range(SIZE):
        sample = make_sample(ordinal, index)
        sample.reward = float(index)
        group.samples.append(sample)
    return group
