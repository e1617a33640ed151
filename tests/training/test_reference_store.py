"""The reference's log-probs on disk: exact, found by tokens, whole or refused."""

from __future__ import annotations

import sqlite3

import numpy as np
import pytest
import torch

from asyncrl.data.tokens import Conversation, Pair
from asyncrl.training.errors import CheckpointError
from asyncrl.training.reference_store import ReferenceStore, key_of
from tests.training.test_dpo import pairs

SCORES = -100 * torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path):
    made = ReferenceStore(tmp_path / "reference", writes=True)
    yield made
    made.close()


def test_what_was_committed_is_read_bit_by_bit(store):
    batch = pairs()
    store.add(batch, SCORES)
    store.commit(steps=3, position={"drawn": [5]})
    reader = ReferenceStore(store.folder)
    order = [3, 0, 7, 0]
    assert torch.equal(reader.scores([batch[i] for i in order]), SCORES[order])
    assert reader.facts() == {"steps": 3, "position": {"drawn": [5]}}
    assert reader.known([*batch[:2], *pairs(1, seed=9)]) == [True, True, False]
    assert reader.scores([]).shape == (0, 2)


def test_what_was_not_committed_is_known_to_its_writer_only(store):
    batch = pairs()
    store.add(batch[:4], SCORES[:4])
    assert store.known(batch) == [True] * 4 + [False] * 4
    assert not any(ReferenceStore(store.folder).known(batch))


def test_a_pair_is_its_tokens_its_masks_and_its_sides():
    pair = pairs(1)[0]
    more = pair.rejected.learnt.copy()
    more[-1] = not more[-1]
    ids = pair.chosen.ids.copy()
    ids[0] += 1
    others = [
        Pair(pair.rejected, pair.chosen, pair.prompt),
        Pair(pair.chosen, Conversation(pair.rejected.ids, more), pair.prompt),
        Pair(Conversation(ids, pair.chosen.learnt), pair.rejected, pair.prompt),
    ]
    assert len({key_of(p) for p in (pair, *others)}) == 4
    copy = Conversation(pair.chosen.ids.astype(np.int64).astype(np.int32), pair.chosen.learnt.copy())
    assert key_of(Pair(copy, pair.rejected, pair.prompt)) == key_of(pair)


def test_a_pair_that_is_not_there_is_an_error(store):
    with pytest.raises(CheckpointError, match=r"never scored\. Remove the folder and resume"):
        store.scores(pairs(1))


def test_a_changed_row_and_a_broken_file_are_found(store):
    batch = pairs()
    store.add(batch, SCORES)
    store.commit()
    with sqlite3.connect(store.folder / "pairs.sqlite") as db:
        db.execute("UPDATE pairs SET chosen = chosen + 1e-9 WHERE pair = ?", (key_of(batch[2]),))
    reader = ReferenceStore(store.folder)
    assert torch.equal(reader.scores(batch[:2]), SCORES[:2])
    for action in (reader.scores, reader.known):
        with pytest.raises(CheckpointError, match="a row differs from its checksum"):
            action(batch)
    (store.folder / "pairs.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointError, match=r"not a database\. Remove the folder"):
        ReferenceStore(store.folder).facts()
    with pytest.raises(CheckpointError, match="cannot be used"):
        ReferenceStore(store.folder / "nowhere")


def test_a_full_disk_leaves_what_was_there(store):
    batch = pairs()
    store.add(batch[:2], SCORES[:2])
    store.commit(steps=1)
    store._db.execute("PRAGMA max_page_count = 1")  # SQLite refuses to grow the file, as it does on a full disk
    store.add(pairs(400, seed=3), torch.zeros(400, 2, dtype=torch.float64))
    with pytest.raises(CheckpointError, match=r"full\. What was written is good"):
        store.commit(steps=2)
    reader = ReferenceStore(store.folder)
    assert reader.facts() == {"steps": 1} and reader.known(batch[:3]) == [True, True, False]
    store._db.execute("PRAGMA max_page_count = 100000")
    store.commit(steps=2)
    assert ReferenceStore(store.folder).facts() == {"steps": 2}
