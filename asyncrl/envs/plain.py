"""JSON without loss for the metadata of tasks.

Task scorers compare tuples and look up integer keys, which JSON would turn into lists and strings: arc_agi and rearc of
reasoning-gym score the right answer 0.05 after a plain JSON round trip. Such values are wrapped in a dict with one key
that says what they were.
"""

from __future__ import annotations

from typing import Any

TUPLE, SET, PAIRS = "__tuple__", "__set__", "__pairs__"
_MARKS = {TUPLE, SET, PAIRS}


def to_plain(value: Any) -> Any:
    """``value`` with only dict[str, ...], list, str, int, float, bool and None in it.

    Subclasses of str, int and float (enums, numpy.str_) become their base, which compares equal to them.

    Raises:
        TypeError: a value of another type is inside.
    """
    if value is None or isinstance(value, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base.__str__(value) if base is str else base(value)
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {SET: [to_plain(item) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {to_plain(key): to_plain(item) for key, item in value.items()}
        return {PAIRS: [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def from_plain(value: Any) -> Any:
    """What :func:`to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, items),) = value.items()
        if mark == TUPLE:
            return tuple(from_plain(item) for item in items)
        if mark == SET:
            return {from_plain(item) for item in items}
        if mark == PAIRS:
            return {from_plain(key): from_plain(item) for key, item in items}
    return {key: from_plain(item) for key, item in value.items()}
