"""Log-probs of preference pairs under the reference, on disk: ``<run>/reference/pairs.sqlite``.

A pair is known by its tokens, so that what is read belongs to exactly these tokens, whatever file or epoch they come
from, and equal pairs are scored once. Each row has a checksum. Rank 0 writes, with how far it got, in one transaction
each; every rank reads when it is complete. Nothing of it is held in memory but what has not been written yet.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.data.tokens import Pair
from asyncrl.training.errors import CheckpointError

_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pairs (
  pair BLOB PRIMARY KEY, chosen REAL NOT NULL, rejected REAL NOT NULL, checksum BLOB NOT NULL
) WITHOUT ROWID;
"""


def key_of(pair: Pair) -> bytes:
    """16 bytes of a hash of both sides: their tokens, and which of them are learnt."""
    seen = hashlib.blake2b(digest_size=16)
    for side in (pair.chosen, pair.rejected):
        seen.update(len(side).to_bytes(8, "little"))
        seen.update(np.ascontiguousarray(side.ids, dtype="<i4").tobytes())
        seen.update(np.ascontiguousarray(side.learnt, dtype=np.bool_).tobytes())
    return seen.digest()


def checksum(key: bytes, chosen: float, rejected: float) -> bytes:
    return hashlib.blake2b(key + struct.pack("<2d", chosen, rejected), digest_size=8).digest()


class ReferenceStore:
    """One connection to ``folder``'s file. ``add`` and ``commit`` for the one that writes."""

    def __init__(self, folder: Path, writes: bool = False) -> None:
        """Raises ``CheckpointError`` if the file cannot be opened or made."""
        self.folder = folder
        self._pending: dict[bytes, tuple[float, float]] = {}
        path = folder / "pairs.sqlite"
        try:
            if writes:
                folder.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, isolation_level=None)
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(_TABLES)
            else:
                self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        except (sqlite3.Error, OSError) as error:
            raise self._broken(str(error)) from error

    def close(self) -> None:
        self._db.close()

    def facts(self) -> dict[str, Any]:
        """What was committed last; empty before."""
        return {name: json.loads(value) for name, value in self._rows("SELECT name, value FROM facts", ())}

    def known(self, pairs: Iterable[Pair]) -> list[bool]:
        return [self._find(key_of(pair)) is not None for pair in pairs]

    def add(self, pairs: Sequence[Pair], scores_P2: Tensor) -> None:
        """Keeps them for the next ``commit``."""
        for pair, (chosen, rejected) in zip(pairs, scores_P2.tolist(), strict=True):
            self._pending[key_of(pair)] = (chosen, rejected)

    def commit(self, **facts: Any) -> None:
        """Writes what was added, and ``facts``: all of it or, with an error, nothing. Raises ``CheckpointError``."""
        rows = [(key, *values, checksum(key, *values)) for key, values in self._pending.items()]
        texts = [(name, json.dumps(value)) for name, value in facts.items()]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO pairs VALUES (?, ?, ?, ?)", rows)
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", texts)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise CheckpointError(
                f"could not write {self.folder}: {error}. What was written is good: resume when it can be"
            ) from error
        self._pending.clear()

    def scores(self, pairs: Sequence[Pair]) -> Tensor:
        """(P, 2) in float64. Raises ``CheckpointError`` for a pair that is not there or whose row is damaged."""
        found = []
        for pair in pairs:
            values = self._find(key_of(pair))
            if values is None:
                raise self._broken("a pair that is learnt was never scored")
            found.append(values)
        return torch.tensor(found, dtype=torch.float64).view(-1, 2)

    def _find(self, key: bytes) -> tuple[float, float] | None:
        if key in self._pending:
            return self._pending[key]
        rows = self._rows("SELECT chosen, rejected, checksum FROM pairs WHERE pair = ?", (key,))
        for chosen, rejected, told in rows:
            if checksum(key, chosen, rejected) != told:
                raise self._broken("a row differs from its checksum")
            return chosen, rejected
        return None

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._broken(str(error)) from error

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder}, the reference's log-probs, cannot be used: {reason}. Remove the folder and resume: they "
            "are computed again from the weights that the run started from"
        )
