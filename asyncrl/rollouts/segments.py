"""Append-only segment files: the payloads of the ledger, with a checksum each.

A segment is a sequence of records and nothing else:

    magic   4 bytes  b"ARS1"
    length  u32      bytes of the payload
    crc     u32      CRC-32 of the payload
    payload

all little-endian. The ledger's rows say where a payload lies (:class:`Location`) and repeat its checksum, so a reader
needs no scan. A record whose bytes are missing, torn or changed is reported (:class:`LostRecord`), never returned.
Every start of a run opens a new segment, so that nothing is ever appended behind a torn tail.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollouts.types import Prompt, Sample

MAGIC = b"ARS1"
_HEADER = struct.Struct("<4sII")
_SAMPLE = struct.Struct("<I")
_PROMPT = struct.Struct("<I")


class LostRecord(Exception):
    """A record cannot be read back; the message says where and why."""


class Location(NamedTuple):
    """Where a payload lies: file number, offset and length of the payload in bytes, CRC-32."""

    segment: int
    offset: int
    length: int
    crc: int


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.seg"


def segment_numbers(directory: Path) -> list[int]:
    """Numbers of the segments in the folder, ascending."""
    return sorted(int(path.stem) for path in directory.glob("*.seg") if path.stem.isdigit())


class SegmentWriter:
    """Appends records. They are collected in memory and written by one call; an error leaves the file as it was."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Opens a new segment behind the highest existing number; the next one after ``max_bytes``."""
        self.directory = directory
        self.max_bytes = max_bytes
        self._number = max(segment_numbers(directory), default=0)
        self._full: list[int] = []  # descriptors of full segments that are not synced
        self._waiting: list[bytes] = []
        self._written = self._end = 0  # bytes in the file, and with those that wait
        self._fd = self._open_next()

    @property
    def number(self) -> int:
        """The segment that is written now."""
        return self._number

    def append(self, payload: bytes) -> Location:
        """Where the payload will lie once ``flush`` has returned.

        Raises:
            OSError: from writing the rest of a full segment or opening the next.
        """
        if self._end and self._end + _HEADER.size + len(payload) > self.max_bytes:
            self.flush()
            self._full.append(self._fd)
            self._fd = self._open_next()
            self._written = self._end = 0
        crc = zlib.crc32(payload)
        self._waiting += (_HEADER.pack(MAGIC, len(payload), crc), payload)
        where = Location(self._number, self._end + _HEADER.size, len(payload), crc)
        self._end = where.offset + where.length
        return where

    def flush(self) -> None:
        """Records appended so far survive the death of this process when this returns.

        Raises:
            OSError: as from write(2), such as ENOSPC; what was there is unharmed, what was appended is discarded.
        """
        if not self._waiting:
            return
        rest = memoryview(b"".join(self._waiting))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self.discard()
            raise
        self._waiting.clear()
        self._written = self._end

    def discard(self) -> None:
        """Forget what was appended since the last flush."""
        self._waiting.clear()
        self._end = self._written
        os.ftruncate(self._fd, self._written)

    def sync(self) -> None:
        """Every record appended so far is on the disk when this returns."""
        self.flush()
        while self._full:
            os.fsync(self._full[0])
            os.close(self._full.pop(0))
        os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        os.close(self._fd)

    def _open_next(self) -> int:
        path = segment_path(self.directory, self._number + 1)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._number += 1
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return fd


def read_record(directory: Path, location: Location) -> bytes:
    """The payload at ``location``.

    Raises:
        LostRecord: the file is missing or short, or the bytes are not those that were written.
    """
    path = segment_path(directory, location.segment)
    try:
        with open(path, "rb", buffering=0) as file:
            record = os.pread(file.fileno(), _HEADER.size + location.length, location.offset - _HEADER.size)
    except FileNotFoundError as error:
        raise LostRecord(f"{path.name} is missing") from error
    if len(record) != _HEADER.size + location.length:
        raise LostRecord(f"{path.name} ends inside the record at {location.offset}")
    payload = record[_HEADER.size :]
    if _HEADER.unpack_from(record) != (MAGIC, location.length, location.crc) or zlib.crc32(payload) != location.crc:
        raise LostRecord(f"{path.name} has a wrong checksum at {location.offset}")
    return payload


def _array(payload: bytes, dtype: str, count: int, offset: int) -> NDArray:
    return np.frombuffer(payload, dtype, count, offset).copy()


def encode_sample(sample: Sample) -> bytes:
    """T, token ids (i4), log-probs (f4), versions (i4), text (UTF-8)."""
    count = len(sample.token_ids)
    if not count == len(sample.logprobs) == len(sample.versions):
        raise ValueError(f"sample {sample.ordinal}/{sample.index} has arrays of different lengths")
    return b"".join(
        (
            _SAMPLE.pack(count),
            np.asarray(sample.token_ids, "<i4").tobytes(),
            np.asarray(sample.logprobs, "<f4").tobytes(),
            np.asarray(sample.versions, "<i4").tobytes(),
            sample.text.encode("utf-8", "surrogatepass"),
        )
    )


def decode_sample(payload: bytes) -> tuple[NDArray, NDArray, NDArray, str]:
    """Token ids (T,), log-probs (T,), versions (T,) and text."""
    (count,) = _SAMPLE.unpack_from(payload)
    start, width = _SAMPLE.size, 4 * count
    return (
        _array(payload, "<i4", count, start),
        _array(payload, "<f4", count, start + width),
        _array(payload, "<i4", count, start + 2 * width),
        payload[start + 3 * width :].decode("utf-8", "surrogatepass"),
    )


def encode_prompt(prompt: Prompt) -> bytes:
    """P, token ids (i4), entry (JSON)."""
    ids = np.asarray(prompt.token_ids, "<i4")
    return _PROMPT.pack(len(ids)) + ids.tobytes() + json.dumps(prompt.entry).encode()


def decode_prompt(payload: bytes, item_id: str, index: int) -> Prompt:
    (count,) = _PROMPT.unpack_from(payload)
    start = _PROMPT.size
    entry = json.loads(payload[start + 4 * count :])
    return Prompt(item_id, index, _array(payload, "<i4", count, start), entry)
