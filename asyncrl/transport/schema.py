"""Message schemas: the kinds a link carries, the fields of each and the number of its buffers.

    SCHEMA = Schema({
        "batch": Kind(fields={"version": int, "names": list[str], "loss": float | None}, buffers="any"),
        "stop": Kind(),
    })

Both ends check: the sender before it queues a message, the receiver before anyone sees it. Every field must be
present (a field that may be None is still there), no other may be.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from asyncrl.transport.errors import ProtocolError

Check = Callable[[Any], bool]


@dataclass(frozen=True)
class Kind:
    """Fields by name and type, and how many buffers follow.

    Types: ``int`` (no bool), ``float`` (an int will do), ``str``, ``bool``, ``bytes``, ``None``, ``Any``, ``list[T]``,
    ``dict[K, V]``, ``Literal[...]`` and unions of them. Long arrays belong in buffers, not in fields.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    buffers: int | Literal["any"] = 0


class Schema:
    """The kinds that one link carries, compiled once."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        for name in kinds:
            if name.startswith("$"):
                raise ValueError(f"kind {name!r}: names that begin with $ are the link's own events")
        self.kinds = dict(kinds)
        self._checks = {
            name: ({f: compile_check(t) for f, t in kind.fields.items()}, kind.buffers) for name, kind in kinds.items()
        }

    def check(self, kind: str, header: Mapping[str, Any], n_buffers: int) -> None:
        """Raise ``ProtocolError`` naming the kind and the field if the message does not fit."""
        entry = self._checks.get(kind)
        if entry is None:
            raise ProtocolError(f"unknown kind {kind!r}; known: {sorted(self._checks)}")
        checks, buffers = entry
        if len(header) != len(checks) or header.keys() != checks.keys():
            raise ProtocolError(_wrong_fields(kind, header, checks))
        for name, fits in checks.items():
            if not fits(header[name]):
                wanted = describe_type(self.kinds[kind].fields[name])
                raise ProtocolError(f"{kind}.{name} is {_describe_value(header[name])}, not {wanted}")
        if buffers != "any" and n_buffers != buffers:
            raise ProtocolError(f"{kind} carries {n_buffers} buffers, not {buffers}")


def compile_check(expected: Any) -> Check:
    """A predicate for one field type; ``TypeError`` for a type that msgpack would not bring back as it was."""
    simple = _SIMPLE.get(expected)
    if simple is not None:
        return simple
    origin, args = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        options = [compile_check(a) for a in args]
        return lambda value: any(fits(value) for fits in options)
    if origin is Literal:
        return lambda value: any(value == a and type(value) is type(a) for a in args)
    if origin is list:
        fits = compile_check(args[0])
        return lambda value: type(value) is list and all(map(fits, value))
    if origin is dict:
        key_fits, value_fits = (compile_check(a) for a in args)
        return lambda value: type(value) is dict and all(map(key_fits, value)) and all(map(value_fits, value.values()))
    raise TypeError(f"a message field cannot have type {expected!r}")


def describe_type(expected: Any) -> str:
    """``int`` rather than ``<class 'int'>``."""
    return expected.__name__ if isinstance(expected, type) and not get_args(expected) else str(expected)


def _describe_value(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _wrong_fields(kind: str, header: Mapping[str, Any], checks: Mapping[str, Check]) -> str:
    missing = sorted(checks.keys() - header.keys())
    unknown = sorted(map(str, header.keys() - checks.keys()))
    parts = [
        f"{label} {', '.join(f'{kind}.{n}' for n in names)[:200]}"
        for label, names in (("misses", missing), ("has unknown", unknown))
        if names
    ]
    return f"{kind} " + " and ".join(parts)


_SIMPLE: dict[Any, Check] = {
    int: lambda value: type(value) is int,
    float: lambda value: type(value) is float or type(value) is int,
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    bytes: lambda value: type(value) is bytes,
    None: lambda value: value is None,
    type(None): lambda value: value is None,
    list: lambda value: type(value) is list,
    dict: lambda value: type(value) is dict,
    Any: lambda value: True,
}
