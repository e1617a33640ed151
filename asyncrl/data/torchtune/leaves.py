"""What becomes of each leaf of a torchtune configuration; one that nothing was said of is reported as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Outcome = Literal["translated", "meaningless", "none"]
Number = TypeVar("Number", int, float)
UNKNOWN = "???"  # a value that the user must give; the run's own check asks for it by name


class RecipeError(ValueError):
    """A file that is no configuration of a recipe that can be read; says what to do instead."""


@dataclass(frozen=True)
class Told:
    """``text``: the keys that a leaf became, or why it has none."""

    leaf: str
    value: Any
    outcome: Outcome
    text: str


class Reading:
    """A torchtune configuration, and what has been said of it so far."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.leaves = dict(leaves_of(config))
        self.told: dict[str, Told] = {}
        self.keys: dict[str, Any] = {}  # of asyncrl, in the order of the command line
        self.assumed: list[str] = []  # keys that no leaf says, and other guesses
        self.todo: list[str] = []  # what the user does before the command

    def get(self, name: str, default: Any = None) -> Any:
        """The value at the dotted ``name``; ``default`` where it is missing or null."""
        node: Any = self.config
        for part in name.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return default if node is None else node

    def number(self, name: str, default: Number) -> Number:
        """The same as the type of ``default``. Raises ``RecipeError`` for what is no number."""
        value = self.get(name, default)
        try:
            return type(default)(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise RecipeError(f"{name} is {plain(value)}, not a number\n    -> write one, or null") from error

    def translate(self, leaf: str, keys: Mapping[str, Any], why: str = "") -> None:
        """``leaf`` became ``keys``; where it is missing they are what torchtune does without it."""
        self.keys |= keys
        text = ", ".join(f"{key}={plain(value)}" for key, value in keys.items())
        if leaf in self.leaves:
            self._tell(leaf, "translated", f"{text} ({why})" if why else text)
        else:
            reasons = [f"as torchtune does without {leaf}"] * bool(leaf) + [why] * bool(why)
            self.assumed.append(f"{text}: " + "; ".join(reasons))

    def also(self, leaf: str, why: str) -> None:
        """``leaf`` is in the keys of another one."""
        self._tell(leaf, "translated", why)

    def meaningless(self, leaf: str, why: str) -> None:
        self._tell(leaf, "meaningless", why)

    def without(self, leaf: str, why: str) -> None:
        self._tell(leaf, "none", why)

    def below(self, name: str) -> list[str]:
        """Leaves at or below ``name`` of which nothing has been said."""
        mine = (name + ".", name + "[")
        return [leaf for leaf in self.leaves if (leaf == name or leaf.startswith(mine)) and leaf not in self.told]

    def finish(self) -> list[Told]:
        """Of every leaf, in the order of the file; those that are left have no equivalent."""
        for leaf in self.leaves:
            if leaf not in self.told:
                self.without(leaf, "this reader does not know it")
        return [self.told[leaf] for leaf in self.leaves]

    def _tell(self, leaf: str, outcome: Outcome, text: str) -> None:
        if leaf in self.leaves:
            assert leaf not in self.told, f"{leaf} has been told already"
            self.told[leaf] = Told(leaf, self.leaves[leaf], outcome, text)


def leaves_of(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of everything that is no group of keys; lists of groups are gone into."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for index, item in enumerate(node):
            yield from leaves_of(item, f"{name}[{index}]")
    else:
        yield name, node


def plain(value: Any) -> str:
    """``value`` as YAML would have it on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(plain, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def component(node: Any) -> str:
    """The last part of ``_component_``: torchtune.models.llama3_1.llama3_1_8b -> llama3_1_8b; empty without."""
    return str(node.get("_component_", "")).rpartition(".")[2] if isinstance(node, Mapping) else ""
