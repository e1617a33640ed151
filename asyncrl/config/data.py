"""Sources of training data: what can be said before any record is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.errors import Problem
from asyncrl.config.forms import ENDINGS, FORMS
from asyncrl.config.schema import Config, DataConfig


def uses_env(config: Config) -> bool:
    """Whether items of ``env`` are trained on: in mode sft only without files."""
    return config.mode != "sft" or not config.sft.data


def has_heldout(config: Config) -> bool:
    """Whether anything is evaluated: in mode sft items of env only if they are learnt too."""
    if config.mode == "sft" and (config.sft.heldout or config.sft.data):
        return bool(config.sft.heldout)
    return config.env.heldout_size > 0


def check_data(config: Config) -> Iterator[Problem]:
    """Each source is there, can be read here, and is described in one way only."""
    sft = config.sft
    for k, source in enumerate(sft.data):
        yield from _check_source(source, f"sft.data[{k}]")
    learnt = {(source.path, source.split) for source in sft.data}
    for k, source in enumerate(sft.heldout):
        key = f"sft.heldout[{k}]"
        yield from _check_source(source, key)
        if source.weight != 1.0:
            yield Problem(f"{key}.weight", "all of the held-out examples are evaluated", "leave it out")
        if (source.path, source.split) in learnt:
            yield Problem(f"{key}.path", f"{source.path} is learnt too (sft.data)", "give examples that are not learnt")


def _check_source(source: DataConfig, key: str) -> Iterator[Problem]:
    yield from _check_path(source, key)
    if source.convert and (source.form != "auto" or source.columns):
        yield Problem(f"{key}.convert", "the function makes examples, form and columns read them", "give one of them")
    elif source.columns and source.form == "auto":
        yield Problem(f"{key}.columns", "whose columns they are depends on the form", f"choose {key}.form")
    elif unknown := [name for name in source.columns if name not in FORMS[source.form].all]:
        yield Problem(
            f"{key}.columns", f"form {source.form} has no column {unknown[0]}", f"its columns: {FORMS[source.form]}"
        )


def _check_path(source: DataConfig, key: str) -> Iterator[Problem]:
    path = Path(source.path)
    if not source.path or not path.exists():
        yield Problem(f"{key}.path", f"{source.path!r} does not exist", "give a file or a folder")
        return
    ending = path.suffix.lower()
    if not path.is_dir() and ending not in ENDINGS:
        yield Problem(
            f"{key}.path",
            f"the ending {ending!r} is none of {', '.join(ENDINGS)}",
            "rename or convert it; unpack a compressed file: records are read where they lie",
        )
    if source.split and not path.is_dir():
        yield Problem(f"{key}.split", f"{source.path} is a file, it has no splits", "leave it out")
    needed = "datasets" if path.is_dir() else "pyarrow" if ending == ".parquet" else ""
    if needed and importlib.util.find_spec(needed) is None:
        yield Problem(f"{key}.path", f"{needed}, which reads it, is not installed", "pip install asyncrl[data]")
