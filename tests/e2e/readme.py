"""Commands as README.md gives them."""

from __future__ import annotations

import re
import shlex

from tests.e2e.command import ROOT


def overrides(start: str) -> list[str]:
    """What follows ``start`` in the only command of README.md that begins so; its continued lines are joined."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    found = [line.split("#")[0] for line in re.findall(r"^ {4}(.*)$", text, re.MULTILINE) if line.startswith(start)]
    (command,) = found
    return shlex.split(command.removeprefix(start))
