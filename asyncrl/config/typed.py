"""Plain values to the typed schema, reporting every unknown key and wrong type at once.

Understands what the schema uses: nested dataclasses, also in lists, ``int``, ``float``, ``bool``, ``str``, ``Any``,
``Literal``, ``list[X]``, ``dict[str, X]`` and ``Annotated[X, Range(...)]``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from asyncrl.config.errors import ConfigError, Problem

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number; ``open`` excludes the named ends ("low", "high"). Infinity is a value only if ``endless``."""

    low: float = -math.inf
    high: float = math.inf
    open: tuple[str, ...] = ()
    endless: bool = False

    def holds(self, value: float) -> bool:
        if math.isinf(value) and not self.endless:
            return False
        above = value > self.low if "low" in self.open else value >= self.low
        below = value < self.high if "high" in self.open else value <= self.high
        return above and below

    def __str__(self) -> str:
        left = [] if self.low == -math.inf else [f"{'above' if 'low' in self.open else 'at least'} {self.low:g}"]
        right = [] if self.high == math.inf else [f"{'below' if 'high' in self.open else 'at most'} {self.high:g}"]
        return " and ".join(left + right) or "that is finite"


def build(schema: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass ``schema``; keys that ``values`` lacks keep their defaults.

    Raises ConfigError with one problem for each unknown key, wrong type or value out of range.
    """
    problems: list[Problem] = []
    result = _dataclass(schema, values, "", problems, known_keys(schema))
    if problems:
        raise ConfigError(problems)
    return result


def known_keys(schema: type, prefix: str = "") -> list[str]:
    """Every dotted key of the schema, inner nodes included."""
    keys = []
    for name, hint in get_type_hints(schema).items():
        keys.append(prefix + name)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += known_keys(hint, f"{prefix}{name}.")
    return keys


def free_keys(schema: type, prefix: str = "") -> list[str]:
    """Dotted keys of the nodes below which any key may be set (``dict`` fields)."""
    keys = []
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += free_keys(hint, f"{prefix}{name}.")
        elif get_origin(hint) is dict:
            keys.append(prefix + name)
    return keys


def unknown_key(key: str, keys: list[str]) -> Problem:
    """The problem of a key that does not exist, with the nearest that do."""
    parent, _, leaf = key.rpartition(".")
    siblings = [known for known in keys if known.rpartition(".")[0] == parent]
    elsewhere = [known for known in keys if known.rpartition(".")[2] == leaf]
    near = (
        elsewhere
        or difflib.get_close_matches(
            key, siblings, n=1, cutoff=1 - 0.4 * len(leaf) / len(key)
        )  # 0.6 of the leaf's letters
        or difflib.get_close_matches(key, keys, n=2, cutoff=0.75)
    )
    if near:
        return Problem(key, "no such key", "did you mean " + " or ".join(near) + "?")
    if siblings:
        return Problem(key, "no such key", "keys here: " + ", ".join(siblings))
    return Problem(key, "no such key", "remove it; asyncrl/config/schema.py lists every key")


def _dataclass(schema: type[T], values: Any, prefix: str, problems: list[Problem], keys: list[str]) -> T:
    hints = get_type_hints(schema, include_extras=True)
    arguments = {}
    if not isinstance(values, Mapping):
        problems.append(Problem(prefix.rstrip("."), f"is a group of keys, not {values!r}", "set a key inside it"))
        values = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            problems.append(unknown_key(key, keys))
        elif dataclasses.is_dataclass(hints[name]):
            arguments[name] = _dataclass(hints[name], value, f"{key}.", problems, keys)
        else:
            arguments[name] = _value(hints[name], value, key, problems)
    return schema(**arguments)


def _value(hint: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    origin = get_origin(hint)
    if origin is Annotated:
        base, *bounds = get_args(hint)
        value = _value(base, value, key, problems)
        if isinstance(value, (int, float)):
            problems += [
                Problem(key, f"{value!r} is out of range", f"give a value {bound}")
                for bound in bounds
                if not bound.holds(value)
            ]
        return value
    if origin is Literal:
        return _choice(get_args(hint), value, key, problems)
    if origin is list and isinstance(value, (list, tuple)):
        return [_value(get_args(hint)[0], item, f"{key}[{index}]", problems) for index, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _value(get_args(hint)[1], item, f"{key}.{name}", problems) for name, item in value.items()}
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _dataclass(hint, value, f"{key}.", problems, known_keys(hint, f"{key}."))
    return _scalar(origin or hint, value, key, problems)


def _choice(options: tuple[Any, ...], value: Any, key: str, problems: list[Problem]) -> Any:
    if value not in options:
        near = difflib.get_close_matches(str(value), [str(option) for option in options], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        allowed = ", ".join(repr(option) if option == "" else str(option) for option in options)
        problems.append(Problem(key, f"{value!r} is not a choice", f"{hint}choices: {allowed}"))
    return value


def _scalar(kind: type, value: Any, key: str, problems: list[Problem]) -> Any:
    """Converts only where nothing is lost: 1e3 to an int, 1 to a float, and a number to a string (a run's name)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if type(value) is kind:
        return value
    if kind is float and number:
        return float(value)
    if kind is int and number and float(value).is_integer():
        return int(value)
    if kind is str and number:
        return str(value)
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
    problems.append(Problem(key, f"{value!r} is not {wanted.get(kind, 'a group of keys')}", f"write {_example(kind)}"))
    return value


def _example(kind: type) -> str:
    examples = {
        int: "8",
        float: "0.1",
        bool: "true",
        str: "a word; quote it if YAML reads something else",
        list: "[a,b]",
    }
    return "for example " + examples.get(kind, "{name: value}")
