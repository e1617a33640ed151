"""Small data files, and what is found in them."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.config.schema import DataConfig
from asyncrl.data.corpus import FileCorpus
from asyncrl.data.records import open_records
from asyncrl.data.stored import read_survey, survey


def talk(answer: str = "4", question: str = "2+2") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_lines(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def records_of(path: Path, split: str = ""):
    return open_records(read_survey(survey(path, path.parent / "surveys")), split)


def corpus_of(path: Path, **settings) -> FileCorpus:
    source = DataConfig(path=str(path), **settings)
    stored = read_survey(survey(path, path.parent / "surveys"))
    return FileCorpus(open_records(stored, source.split), source, stored.digest, "sft.data[0]")
