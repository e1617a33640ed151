"""Files of training data by their endings, and the columns of each form, as ``sft.data[].columns`` may rename them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "array", "csv", "parquet", "folder"]

# A .json file whose first character opens no array is read as lines.
ENDINGS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "array",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Columns:
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.needed, *self.optional)

    def __str__(self) -> str:
        return " and ".join(self.needed) + (f" (optional: {', '.join(self.optional)})" if self.optional else "")


FORMS: dict[str, Columns] = {
    "messages": Columns(("messages",), ("tools",)),
    "sharegpt": Columns(("conversations",), ("system", "tools")),
    "alpaca": Columns(("instruction", "output"), ("input", "system")),
    "text": Columns(("text",)),
    "preference": Columns(("chosen", "rejected"), ("prompt", "tools")),
}
