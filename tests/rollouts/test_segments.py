"""asyncrl.rollouts.segments: what is flushed can be read, what is damaged is never returned."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from asyncrl.rollouts.segments import (
    LostRecord,
    SegmentWriter,
    decode_prompt,
    decode_sample,
    encode_prompt,
    encode_sample,
    read_record,
    segment_numbers,
    segment_path,
)
from asyncrl.rollouts.types import Prompt
from tests.rollouts.books import make_sample


@pytest.fixture
def writer(tmp_path):
    opened = SegmentWriter(tmp_path, 1000)
    yield opened
    opened.close()


def test_records_come_back_from_several_segments(tmp_path, writer):
    payloads = [bytes([number]) * (number * 7) for number in range(60)]
    places = [writer.append(payload) for payload in payloads]
    writer.flush()
    assert [read_record(tmp_path, where) for where in places] == payloads
    assert len(segment_numbers(tmp_path)) > 10
    assert max(path.stat().st_size for path in tmp_path.iterdir()) <= 1000


def test_a_payload_larger_than_a_segment_gets_its_own(tmp_path, writer):
    places = [writer.append(b"a"), writer.append(b"b" * 5000), writer.append(b"c")]
    writer.flush()
    assert [where.segment for where in places] == [1, 2, 3]
    assert read_record(tmp_path, places[1]) == b"b" * 5000


def test_a_restart_never_appends_behind_a_torn_tail(tmp_path, writer):
    where = writer.append(b"abc")
    writer.flush()
    again = SegmentWriter(tmp_path, 1000)
    assert again.append(b"def").segment == where.segment + 1
    again.close()


def test_discarded_records_leave_no_trace(tmp_path, writer):
    kept = writer.append(b"kept")
    writer.flush()
    size = segment_path(tmp_path, 1).stat().st_size
    writer.append(b"gone")
    writer.discard()
    after = writer.append(b"after")
    writer.flush()
    assert after.offset == size + 12
    assert read_record(tmp_path, kept) == b"kept"
    assert read_record(tmp_path, after) == b"after"


def test_a_disk_that_fills_up_inside_a_record(tmp_path, writer, monkeypatch):
    """The first call writes a part, the second fails: the part is taken back."""
    kept = writer.append(b"kept")
    writer.flush()
    size = segment_path(tmp_path, 1).stat().st_size
    calls = []
    real = os.write

    def full(fd, data):
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(fd, data[:10])

    writer.append(b"x" * 100)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        writer.flush()
    monkeypatch.undo()
    assert len(calls) == 2
    assert segment_path(tmp_path, 1).stat().st_size == size
    after = writer.append(b"after")
    writer.flush()
    assert read_record(tmp_path, kept) == b"kept"
    assert read_record(tmp_path, after) == b"after"


def test_short_writes_are_continued(tmp_path, writer, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    where = writer.append(b"0123456789")
    writer.flush()
    assert read_record(tmp_path, where) == b"0123456789"


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path, writer):
    where = writer.append(b"payload")
    writer.flush()
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(LostRecord, match="checksum"):
            read_record(tmp_path, where)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(LostRecord, match="ends inside"):
            read_record(tmp_path, where)
    path.unlink()
    with pytest.raises(LostRecord, match="missing"):
        read_record(tmp_path, where)


def test_another_record_at_the_place_is_noticed(tmp_path, writer):
    where = writer.append(b"aaaa")
    other = writer.append(b"bbbb")
    writer.flush()
    with pytest.raises(LostRecord):
        read_record(tmp_path, where._replace(offset=other.offset))


def test_sample_and_prompt_round_trip():
    sample = make_sample(3, 1, tokens=4, text="ü\n")
    ids, logprobs, versions, text = decode_sample(encode_sample(sample))
    np.testing.assert_array_equal(ids, sample.token_ids)
    np.testing.assert_array_equal(logprobs, sample.logprobs)
    np.testing.assert_array_equal(versions, sample.versions)
    assert text == "ü\n"
    assert logprobs.flags.writeable
    prompt = Prompt("train:5", 5, np.array([7, 8], np.int32), {"a": [1, {"b": None}]})
    again = decode_prompt(encode_prompt(prompt), "train:5", 5)
    assert again.entry == prompt.entry
    np.testing.assert_array_equal(again.token_ids, prompt.token_ids)


def test_arrays_of_different_lengths_are_refused():
    sample = make_sample(0, 0)
    sample.logprobs = sample.logprobs[:-1]
    with pytest.raises(ValueError, match="sample 0/0"):
        encode_sample(sample)
