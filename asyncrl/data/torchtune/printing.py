"""A reading as text for the terminal: the command first, then what became of every leaf."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data.torchtune.leaves import Outcome, Reading, Told, plain
from asyncrl.data.torchtune.recipes import Launch

TITLES: dict[Outcome, str] = {
    "translated": "translated",
    "meaningless": "of no meaning here",
    "none": "without equivalent",
}
_BARE = re.compile(r"[A-Za-z_./][A-Za-z0-9_./@-]*|\?\?\?")
_RESERVED = re.compile(r"(?i)true|false|null|nan|inf")


def command(reading: Reading, launch: Launch) -> str:
    """The command line for a shell, a key a line."""
    ranks = f" --nproc-per-node {launch.ranks}" if launch.ranks > 1 else ""
    words = [shlex.quote(f"{key}={override(value)}") for key, value in reading.keys.items()]
    return " \\\n  ".join([f"torchrun{ranks} launch/train.py mode=sft", *words])


def override(value: Any) -> str:
    """``value`` in the grammar of Hydra's command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(override, value)) + "]"
    if not isinstance(value, str):
        return plain(value) if not isinstance(value, float) else repr(value)
    if _BARE.fullmatch(value) and not _RESERVED.fullmatch(value):
        return value
    # Before a quotation mark a backslash is written twice, elsewhere it stands for itself.
    quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{quoted}'"


def report(reading: Reading, told: Sequence[Told], launch: Launch) -> str:
    """Everything that is printed."""
    parts = [command(reading, launch), f"read as {launch.said}"]
    for title, lines in (("before it runs", reading.todo), ("set although the file does not say it", reading.assumed)):
        if lines:
            parts.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
    for outcome, title in TITLES.items():
        by_text: dict[str, list[str]] = {}
        for one in told:
            if one.outcome == outcome:
                by_text.setdefault(one.text, []).append(f"{one.leaf}: {plain(one.value)}")
        lines = [
            line for text, leaves in by_text.items() for line in (*(f"  {leaf}" for leaf in leaves), f"      {text}")
        ]
        parts.append("\n".join([f"{title}: {sum(map(len, by_text.values()))} of {len(told)}", *lines]))
    return "\n\n".join(parts)
