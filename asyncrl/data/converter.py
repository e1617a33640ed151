'''A user's converter: one Python function from a record of a file to an example.

``convert: package.module:function`` or ``convert: path/to/file.py:function`` of a source names it:

    def convert(record):
        """record: the columns of one line or row, a dict."""
        turns = [{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}]
        return {"messages": turns}

It returns ``messages`` (with ``rejected`` a preference pair, and ``tools`` if there are any) or ``text``. The same
record must always give the same example, on every rank: draw nothing from the global generator.
'''

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.conversation import checked_messages, checked_tools, text_of
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.forms import preference
from asyncrl.envs.function import find_function
from asyncrl.envs.types import EnvError

_REMEDY = 'return {"messages": [{"role": ..., "content": ...}, ...]}, with "rejected" for a pair, or {"text": ...}'
_KEYS = {"messages", "rejected", "tools", "text"}


class Converter:
    """The function that ``name`` names; ``key`` is the configuration's, for errors."""

    def __init__(self, name: str, key: str) -> None:
        """Raises ``SourceError`` when there is no such function or it does not take one argument."""
        try:
            self._function = find_function(name, key, [({},)], "def convert(record)")
        except EnvError as error:
            raise SourceError(error.problem.key, error.problem.message, error.problem.remedy) from error
        self._name = name

    def __str__(self) -> str:
        return f"converted by {self._name}"

    def example(self, record: Mapping[str, Any], place: str) -> Example:
        """What the function makes of ``record``. Raises ``DataError`` (reason ``convert``) when it fails."""
        try:
            made = self._function(dict(record))
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise DataError(
                place, f"{self._name} raised {type(error).__name__}: {error}", "mend the function", "convert"
            ) from error
        if not isinstance(made, dict) or not made.keys() <= _KEYS or ("text" in made) == ("messages" in made):
            raise DataError(place, f"{self._name} returned {made!r:.80}", _REMEDY, "convert")
        if "text" in made:
            return Example(place, text=text_of(made["text"], place, "text"))
        messages, tools = checked_messages(made["messages"], place), checked_tools(made.get("tools"), place)
        if made.get("rejected") is None:
            return Example(place, messages, tools=tools)
        return preference(place, messages, checked_messages(made["rejected"], place), tools)

    def identity(self) -> str:
        """The function's name and a hash of the file it is in."""
        source = inspect.getsourcefile(inspect.unwrap(self._function))
        code = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16] if source else ""
        return f"{self._name.rpartition(':')[2]} {code}"
