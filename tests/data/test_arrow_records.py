"""Parquet files and folders of the datasets library: what those libraries write is what is learnt."""

from __future__ import annotations

from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet as parquet
import pytest

from asyncrl.data.errors import SourceError
from asyncrl.data.mixture import Mixture
from tests.data.files import corpus_of, records_of, talk

ROWS = [{"messages": talk(f"answer {i}"), "number": i} for i in range(10)]


def write_parquet(path, rows, group=4):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def all_of(records):
    return [records.record(index) for index in range(len(records))]


def test_parquet_rows_in_any_order_of_access(tmp_path):
    records = records_of(write_parquet(tmp_path / "a.parquet", ROWS))
    assert all_of(records) == ROWS and list(records.blocks) == [4, 4, 2]
    assert [records.record(i)["number"] for i in (9, 0, 5, 3, 8)] == [9, 0, 5, 3, 8]
    assert records.place(9).endswith("a.parquet row 10")


def test_row_groups_without_rows(tmp_path):
    schema = pyarrow.Table.from_pylist(ROWS).schema
    with parquet.ParquetWriter(tmp_path / "a.parquet", schema) as file:
        for rows in (ROWS[:0], ROWS[:3], ROWS[:0], ROWS[3:]):
            file.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    assert all_of(records_of(tmp_path / "a.parquet")) == ROWS
    corpus = corpus_of(tmp_path / "a.parquet")
    drawn = Mixture([corpus], [1.0], seed=3).take(20, lambda example: example.messages[1]["content"])
    assert Counter(drawn) == {f"answer {i}": 2 for i in range(10)}


def test_at_most_two_row_groups_stay_in_memory(tmp_path):
    records = records_of(write_parquet(tmp_path / "a.parquet", ROWS, group=2))
    all_of(records)
    assert records._group.cache_info().currsize == 2


def test_what_other_rows_have_is_not_added(tmp_path):
    """Arrow gives every struct all keys of the column: a message without tool calls must not get empty ones."""
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    mixed = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add"},
        {"role": "assistant", "content": "4"},
    ]
    rows = [{"messages": mixed}, {"messages": talk()}]
    assert all_of(records_of(write_parquet(tmp_path / "a.parquet", rows))) == rows


def test_a_saved_dataset(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert all_of(records_of(tmp_path / "saved")) == ROWS


def test_a_filtered_dataset_is_read_by_its_own_numbers(tmp_path):
    """save_to_disk of a view (select, filter, shuffle) keeps what the view shows."""
    datasets.Dataset.from_list(ROWS).select([7, 2, 5]).save_to_disk(tmp_path / "saved")
    assert [row["number"] for row in all_of(records_of(tmp_path / "saved"))] == [7, 2, 5]


def test_one_split_of_several(tmp_path):
    several = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[:6]), "test": datasets.Dataset.from_list(ROWS[6:])}
    )
    several.save_to_disk(tmp_path / "saved")
    assert all_of(records_of(tmp_path / "saved", "test")) == ROWS[6:]
    with pytest.raises(SourceError, match="has several splits: train, test"):
        records_of(tmp_path / "saved")
    with pytest.raises(SourceError, match="has no split dev: train, test"):
        records_of(tmp_path / "saved", "dev")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_examples_mix_and_go_on_where_they_were(tmp_path, kind):
    path = tmp_path / ("a.parquet" if kind == "parquet" else "saved")
    if kind == "parquet":
        write_parquet(path, ROWS)
    else:
        datasets.Dataset.from_list(ROWS).save_to_disk(path)
    whole = Mixture([corpus_of(path)], [1.0], seed=0).take(25, lambda example: example.place)
    assert set(Counter(whole[:20]).values()) == {2}
    for cut in (0, 7, 10, 19, 24):
        first = Mixture([corpus_of(path)], [1.0], seed=0)
        first.take(cut, lambda example: None)
        second = Mixture([corpus_of(path)], [1.0], seed=0)
        second.seek(first.position())
        assert second.take(25 - cut, lambda example: example.place) == whole[cut:]


def test_what_cannot_be_used(tmp_path):
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(SourceError, match="is no Parquet file"):
        records_of(tmp_path / "text.parquet")
    whole = write_parquet(tmp_path / "whole.parquet", ROWS).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    with pytest.raises(SourceError, match="is no Parquet file"):
        records_of(tmp_path / "cut.parquet")
    write_parquet(tmp_path / "empty.parquet", pyarrow.Table.from_pylist(ROWS).slice(0, 0).to_pylist())
    with pytest.raises(SourceError, match="is empty"):
        records_of(tmp_path / "empty.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match="none that the datasets library saved"):
        records_of(tmp_path / "folder")
    (tmp_path / "folder" / "state.json").write_text("{}")
    with pytest.raises(SourceError, match="cannot be loaded"):
        records_of(tmp_path / "folder")


def test_a_broken_page_is_named(tmp_path):
    """The footer is whole, so the file opens; the rows of a broken group are the ones that fail."""
    path = write_parquet(tmp_path / "a.parquet", [{"text": "some words " * 50 + str(i)} for i in range(8)])
    broken = bytearray(path.read_bytes())
    broken[4:60] = b"\xff" * 56
    path.write_bytes(bytes(broken))
    records = records_of(path)
    with pytest.raises(SourceError, match=r"a\.parquet.*rows 1 to 4 cannot be read"):
        records.record(0)
    assert records.record(5)["text"].endswith("5")
