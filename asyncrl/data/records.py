"""Records of one file, by number: each is one read at its place, whatever the size of the file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.data.arrow_records import FolderRecords, ParquetRecords
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.stored import Stored, stamp_of
from asyncrl.data.text_index import LONGEST, open_index


class Records(Protocol):
    """``blocks``: sizes of the runs of records that are cheap to read together; empty where any record is."""

    blocks: Sequence[int]

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """What names record ``index`` in errors."""
        ...

    def record(self, index: int) -> dict[str, Any]:
        """Raises ``DataError`` for a broken one."""
        ...


def open_records(stored: Stored, split: str = "") -> Records:
    """Raises ``SourceError`` for a file that cannot be opened as what it is."""
    if stored.kind == "folder":
        return FolderRecords(stored.path, split)
    if stored.kind == "parquet":
        return ParquetRecords(stored.path)
    return CsvRecords(stored) if stored.kind == "csv" else JsonRecords(stored)


class TextRecords:
    """Of a file with an index."""

    blocks: Sequence[int] = ()
    header = 0  # rows before the first record

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._size = stored.stamp[0][1]
        self._index = open_index(Path(stored.index), stored.rows)
        self._file = open(stored.path, "rb", buffering=0)  # noqa: SIM115  # open as long as its records are wanted

    def __len__(self) -> int:
        return self._stored.rows - self.header

    def place(self, index: int) -> str:
        return f"{self._stored.path} line {int(self._index[index + self.header, 1])}"

    def _read(self, row: int) -> str:
        """The text of index row ``row``."""
        start = int(self._index[row, 0])
        end = int(self._index[row + 1, 0]) if row + 1 < self._stored.rows else self._size
        try:
            data = os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise SourceError(self._stored.path, f"cannot be read: {error}", "see that its disk is there") from error
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"{self._stored.path} line {int(self._index[row, 1])}"
            raise self._broken(place, f"is not UTF-8: {error.reason}", "save the file as UTF-8", "unicode") from error

    def _broken(self, place: str, message: str, remedy: str, reason: str) -> DataError:
        """The error of a record, or of the whole file if that is no longer the one that was surveyed."""
        if stamp_of(Path(self._stored.path)) != self._stored.stamp:
            return SourceError(self._stored.path, "has changed since the run began", "leave it alone while a run reads")
        return DataError(place, message, remedy, reason)


class JsonRecords(TextRecords):
    """One object a line, or the objects of one array."""

    def record(self, index: int) -> dict[str, Any]:
        text = self._read(index)
        if self._stored.kind == "array":
            text = text.rstrip(", \t\r\n]")  # what follows an object in its array
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            remedy = "mend or remove the line; sft.on_error=skip passes over it"
            raise self._broken(self.place(index), f"is not JSON: {error}", remedy, "json") from error
        if not isinstance(found, dict):
            remedy = 'write an object: {"messages": [...]}'
            raise self._broken(self.place(index), f"is {text.strip():.60}, not an object", remedy, "json")
        return found


class CsvRecords(TextRecords):
    """A header with the names of the columns, then a row a record; quoted as RFC 4180 says, tabs in a .tsv file."""

    header = 1

    def __init__(self, stored: Stored) -> None:
        super().__init__(stored)
        csv.field_size_limit(LONGEST)
        self._tab = "\t" if stored.path.lower().endswith(".tsv") else ","
        self._names = self._row(0)
        if twice := sorted({name for name in self._names if self._names.count(name) > 1}):
            raise SourceError(stored.path, f"two columns are called {twice[0]!r}", "give every column its own name")

    def record(self, index: int) -> dict[str, Any]:
        values = self._row(index + 1)
        if len(values) != len(self._names):
            message = f"has {len(values)} fields, the header {len(self._names)}: {', '.join(self._names)}"
            raise self._broken(self.place(index), message, "quote fields that hold the separator", "csv")
        return dict(zip(self._names, values, strict=True))

    def _row(self, row: int) -> list[str]:
        text = self._read(row).rstrip("\r\n")
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=self._tab, strict=True))
        except csv.Error as error:
            place = f"{self._stored.path} line {int(self._index[row, 1])}"
            raise self._broken(place, f"is no CSV row: {error}", 'write " inside a field as ""', "csv") from error
        return [value for part in rows for value in part]
