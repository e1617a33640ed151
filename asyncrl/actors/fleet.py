"""The generators as the controller sees them: who is live, what each still owes.

A generator is ``joining`` from its hello until it has committed the current weights, then ``live``. Work that a lost
generator owed returns to the caller, who dispatches it again; a group keeps its ordinal. Pure bookkeeping, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Engine:
    """One generator. ``owes`` maps a group's ordinal to the sample indices not yet received."""

    name: str
    live: bool = False
    version: int = -1
    proven: tuple[int, str] | None = None  # newest version whose weights it has proven to hold, and their digest
    owes: dict[int, set[int]] = field(default_factory=dict)

    @property
    def load(self) -> int:
        return sum(len(indices) for indices in self.owes.values())


class Fleet:
    """All known generators and the samples in flight on each."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def join(self, name: str) -> None:
        """A process called ``name`` has started."""
        self._engines[name] = Engine(name)

    def serves(self, name: str, version: int, digest: str) -> None:
        """The publisher says that ``name`` loaded ``version`` and computed this digest of it."""
        engine = self._engines.get(name)
        if engine is not None:  # else it was lost meanwhile
            engine.proven = (version, digest)

    def committed(self, name: str, version: int) -> bool:
        """Note that ``name`` serves ``version``; True when this makes it live.

        One that was lost is back: it was given up, by mistake for its predecessor, and lives.
        """
        engine = self._engines.setdefault(name, Engine(name))
        engine.version = version
        became_live, engine.live = not engine.live, True
        return became_live

    def lose(self, name: str) -> dict[int, set[int]]:
        """Forget ``name``; returns what it owed, as ordinal -> sample indices."""
        engine = self._engines.pop(name, None)
        return {} if engine is None else engine.owes

    def __contains__(self, name: str) -> bool:
        return name in self._engines

    @property
    def live(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.live]

    @property
    def joining(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if not engine.live]

    def load(self, name: str) -> int:
        """Samples that ``name`` owes."""
        engine = self._engines.get(name)
        return 0 if engine is None else engine.load

    @property
    def in_flight(self) -> int:
        """Samples that some generator owes."""
        return sum(engine.load for engine in self._engines.values())

    def assign(self, ordinal: int, indices: set[int]) -> str:
        """Choose the least loaded live generator for these samples of a group and charge it; returns its name."""
        engine = min(self.live, key=lambda e: (e.load, e.name))
        engine.owes.setdefault(ordinal, set()).update(indices)
        return engine.name

    def received(self, name: str, ordinal: int, index: int) -> bool:
        """Note the arrival of one sample; False when ``name`` did not owe it (a repeat after a redispatch)."""
        engine = self._engines.get(name)
        owed = engine.owes.get(ordinal) if engine is not None else None
        if engine is None or owed is None or index not in owed:
            return False
        owed.discard(index)
        if not owed:
            del engine.owes[ordinal]
        return True
