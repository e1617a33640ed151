"""Where the records of a text file begin: found in one pass, in bounded memory, and kept in a file of its own.

A row of an index is (byte offset, line number), two int64. With it any record of a file of any size is one read.
"""

from __future__ import annotations

import array
import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from asyncrl.data.errors import SourceError

LONGEST = 64 * 2**20  # bytes of one record
_FLUSH = 1 << 17  # rows
_READ = 1 << 20
_SPACE = " \t\r\n"

Start = tuple[int, int]  # (byte offset, line number from 1)
See = Callable[[bytes], None]  # is given every byte of the file, in order


def write_index(starts: Iterator[Start], target: Path) -> int:
    """Writes the rows to ``target`` and returns their number; what ``starts`` raises passes through."""
    rows = 0
    buffer = array.array("q")
    with open(target, "wb") as file:
        for start in starts:
            buffer.extend(start)
            rows += 1
            if len(buffer) >= 2 * _FLUSH:
                buffer.tofile(file)
                del buffer[:]
        buffer.tofile(file)
    return rows


def open_index(path: Path, rows: int) -> NDArray[np.int64]:
    """(rows, 2), mapped: only what is looked at is read."""
    return np.memmap(path, dtype=np.int64, mode="r", shape=(rows, 2))


def line_starts(file: BinaryIO, name: str, see: See) -> Iterator[Start]:
    """Lines that are not blank. Raises ``SourceError`` for one that is longer than ``LONGEST``."""
    for start, number, line in _lines(file, name, see):
        if line.strip():
            yield start, number


def csv_starts(file: BinaryIO, name: str, see: See) -> Iterator[Start]:
    """Rows of a CSV file, the header among them; a quoted field may hold line breaks.

    Raises ``SourceError`` for a quotation mark that is never closed.
    """
    quoted, begun = False, (0, 0)
    for start, number, line in _lines(file, name, see):
        if not quoted:
            begun = (start, number)
            if line.strip():
                yield begun
        quoted ^= line.count(b'"') % 2 == 1  # a mark inside a field is written twice
        if quoted and start + len(line) - begun[0] > LONGEST:
            break
    if quoted:
        raise SourceError(
            f"{name} line {begun[1]}", "a quotation mark of this row is not closed", 'write " inside a field as ""'
        )


def _lines(file: BinaryIO, name: str, see: See) -> Iterator[tuple[int, int, bytes]]:
    """(byte offset, line number, line); a byte order mark is left out of the first."""
    offset = number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise SourceError(
                f"{name} line {number}", f"is longer than {LONGEST} bytes", "is it a text file with a record a line?"
            )
        see(line)
        mark = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
        yield offset + mark, number, line[mark:]
        offset += len(line)


def array_starts(file: BinaryIO, name: str, see: See) -> Iterator[Start]:
    """Objects of one JSON array, decoded one after another and dropped again.

    Raises ``SourceError`` naming the line for what is not JSON or no object: after it nothing can be found.
    """
    text = _Window(file, name, see)
    text.expect("[")
    if text.peek() == "]":
        return
    while True:
        if text.peek() != "{":
            raise text.error(f"expected an object, found {text.peek()!r}")
        yield text.offset, text.line
        text.skip_value()
        if text.peek() == "]":
            break
        text.expect(",")
    text.expect("]")
    if text.peek():
        raise text.error(f"the array has ended, found {text.peek()!r}")


class _Window:
    """The part of a JSON text that is looked at, with the place of its position ``at`` in the file."""

    def __init__(self, file: BinaryIO, name: str, see: See) -> None:
        self._file, self._name, self._see = file, name, see
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._ended = "", 0, False
        self.offset, self.line = 0, 1
        while self._more() and not self._text:
            pass  # not yet one character
        if self._text.startswith("\ufeff"):
            self._advance(1)

    def peek(self) -> str:
        """The next character that is no space, which becomes the position; "" at the end."""
        while True:
            at, text = self._at, self._text
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._advance(at)
            if at < len(text):
                return text[at]
            if not self._more():
                return ""

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self.error(f"expected {character!r}, found {self.peek() or 'the end of the file'!r}")
        self._advance(self._at + 1)

    def skip_value(self) -> None:
        while True:
            try:
                _, end = self._scan(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if len(self._text) - self._at <= LONGEST and self._more():
                    continue
                if isinstance(error, json.JSONDecodeError):
                    self._advance(min(error.pos, len(self._text)))
                raise self.error(getattr(error, "msg", str(error))) from error
            self._advance(end)
            return

    def error(self, message: str) -> SourceError:
        return SourceError(
            f"{self._name} line {self.line}",
            f"is not a JSON array of objects: {message}",
            "mend the file; one object a line (.jsonl) would be read past a broken one with sft.on_error=skip",
        )

    def _advance(self, at: int) -> None:
        passed = self._text[self._at : at]
        self.offset += len(passed.encode())
        self.line += passed.count("\n")
        self._at = at

    def _more(self) -> bool:
        """Reads as much again as is there, so that a long value is scanned a few times only."""
        if self._ended:
            return False
        data = self._file.read(max(_READ, len(self._text) - self._at))
        self._see(data)
        self._ended = not data
        try:
            added = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.error(str(error)) from error
        self._text, self._at = self._text[self._at :] + added, 0
        return not self._ended
