"""Text files: each record is found by number and read alone, whatever its file holds."""

from __future__ import annotations

import csv
import errno
import json
import os
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.data import stored, text_index
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.stored import read_survey, survey
from tests.data.files import records_of, write_lines

PLAIN = st.text(st.characters(codec="utf-8"), max_size=20)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["a", "b\n", 'c"', "d"]), PLAIN | st.integers(), min_size=1), min_size=1
)
AGAIN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def all_of(path):
    records = records_of(path)
    return [records.record(index) for index in range(len(records))]


@given(rows=ROWS, end=st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"]), mark=st.booleans(), last=st.booleans())
@AGAIN
def test_lines(tmp_path, rows, end, mark, last):
    text = end.join(json.dumps(row, ensure_ascii=False) for row in rows) + (end if last else "")
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    assert all_of(path) == rows


@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), mark=st.booleans(), block=st.integers(1, 40))
@AGAIN
def test_an_array(tmp_path, rows, indent, mark, block):
    """Blocks as small as a byte: values and characters are cut anywhere."""
    path = tmp_path / "a.json"
    text = " \n" + json.dumps(rows, ensure_ascii=False, indent=indent) + "\n"
    path.write_bytes(text.encode("utf-8-sig" if mark else "utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_index, "_READ", block)
        assert all_of(path) == rows


FIELDS = st.text(st.characters(codec="utf-8", exclude_characters="\x00\ufeff"), max_size=12)


@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1), end=st.sampled_from(["\n", "\r\n"]), tab=st.booleans())
@AGAIN
def test_csv(tmp_path, rows, end, tab):
    """The csv module writes, with line breaks, separators and quotation marks in fields; it is the oracle."""
    path = tmp_path / ("a.tsv" if tab else "a.csv")
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if tab else ",", lineterminator=end, quoting=csv.QUOTE_ALL)
        writer.writerows([("x", "y"), *rows])
    assert all_of(path) == [{"x": x, "y": y} for x, y in rows]


def test_a_json_file_may_hold_lines(tmp_path):
    assert all_of(write_lines(tmp_path / "a.json", [{"a": 1}, {"a": 2}])) == [{"a": 1}, {"a": 2}]


def test_places_are_lines_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert records_of(path).place(1) == f"{path} line 3"
    path = tmp_path / "a.csv"
    path.write_text('a\n"x\ny"\nz\n')
    assert records_of(path).place(1) == f"{path} line 4"
    path = tmp_path / "a.json"
    path.write_text('[\n {"a":\n 1},\n {"a": 2}]')
    assert records_of(path).place(1) == f"{path} line 4"


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "json", "line 2: is not JSON: Expecting value"),
        (b'{"a": 1}\n[1]\n', "json", r"line 2: is \[1\], not an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "unicode", "line 2: is not UTF-8"),
        (b'{"a": 1}\n' + b"[" * 100_000 + b"\n", "json", "line 2: is not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path, text, reason, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text + b'{"a": 3}\n')
    records = records_of(path)
    with pytest.raises(DataError, match=message) as bad:
        records.record(1)
    assert bad.value.reason == reason and not isinstance(bad.value, SourceError)
    assert (records.record(0), records.record(2)) == ({"a": 1}, {"a": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "line 3: has 3 fields, the header 2: a, b"),
        ('a,b\n1,2\n"1"x,2\n', "line 3: is no CSV row"),
    ],
)
def test_a_broken_csv_row_is_named(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        records_of(path).record(1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n \n", "is empty"),
        ("a.csv", "", "is empty"),
        ("a.csv", "x,y\n", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.csv", "a,a\n1,2\n", "two columns are called 'a'"),
        ("a.csv", 'a,b\n1,"2\n3,4\n', "line 2: a quotation mark of this row is not closed"),
        ("a.json", '[{"a": 1},\n{"a" 2}]', r"line 2: is not a JSON array of objects: Expecting ':'"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', r"line 2: .* expected ',', found '\{'"),
        ("a.json", '[{"a": 1},\n2]', "line 2: .* expected an object, found '2'"),
        ("a.json", '[{"a": 1}', "expected ',', found 'the end"),
        ("a.json", '[{"a": 1}]\n{"a": 1}', "line 2: .* the array has ended"),
        ("a.txt", "x", "the ending '.txt' is none of .jsonl"),
        ("a.jsonl.gz", "x", "a compressed one must be unpacked"),
    ],
)
def test_files_that_cannot_be_used_at_all(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SourceError, match=message):
        records_of(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        records_of(tmp_path / "a.jsonl")


def test_a_file_is_surveyed_once_until_it_changes(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"a": 1}])
    found = survey(path, tmp_path / "s")
    first = read_survey(found)
    calls, write = [], text_index.write_index
    monkeypatch.setattr("asyncrl.data.stored.write_index", lambda *a: calls.append(1) or write(*a))
    assert survey(path, tmp_path / "s") == found and not calls
    os.utime(path, ns=(1, 1))
    survey(path, tmp_path / "s")
    assert calls == [1] and read_survey(found).digest == first.digest, "touched: the contents are the same"
    write_lines(path, [{"a": 1}, {"a": 2}])
    survey(path, tmp_path / "s")
    assert read_survey(found).digest != first.digest and read_survey(found).rows == 2


def test_a_file_that_changes_under_the_run_ends_it(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"a": number} for number in range(9)])
    records = records_of(path)
    path.write_text("x" * 200)
    with pytest.raises(SourceError, match="has changed since the run began"):
        records.record(3)


def test_a_large_file_is_never_in_memory(tmp_path):
    """40 MB in lines and in an array: neither the survey nor a record takes more than a few buffers."""
    line = json.dumps({"text": "x" * 4000}) + "\n"
    lines, array = tmp_path / "a.jsonl", tmp_path / "a.json"
    lines.write_text(line * 10_000)
    array.write_text("[" + ",".join([line] * 10_000) + "]")
    for path in (lines, array):
        tracemalloc.start()
        records = records_of(path)
        assert len(records) == 10_000 and len(records.record(9_999)["text"]) == 4000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12e6


def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_index, "LONGEST", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + "x" * 5000)
    with pytest.raises(SourceError, match="line 2: is longer than 1000 bytes"):
        records_of(path)


def test_what_the_disk_cannot_read_is_an_error_of_the_file(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", [{"a": 1}] * 3)
    records = records_of(path)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(SourceError, match=r"a\.jsonl: cannot be read: .*Input/output error"):
        records.record(1)
    monkeypatch.setattr(stored, "write_index", broken)
    with pytest.raises(SourceError, match=r"a\.jsonl: cannot be read through and indexed: .*Input/output error"):
        survey(path, tmp_path / "others")
