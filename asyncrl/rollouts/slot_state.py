"""The state of the staleness slots as the ledger hands it over after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SlotState:
    """What :class:`asyncrl.rollouts.slots.Slots` must know to go on after a restart.

    ``open`` maps each group that is neither taken, filtered nor failed to whether it has finished. ``batches`` maps a
    version to the ordinals that its batch took, for batches whose slots are not freed; ``untrained`` maps a version
    to the size of its batch while its outcome is not known. No generator may join below ``floor``.
    """

    version: int = 0
    floor: int = 0
    next_ordinal: int = 0
    open: dict[int, bool] = field(default_factory=dict)
    batches: dict[int, list[int]] = field(default_factory=dict)
    untrained: dict[int, int] = field(default_factory=dict)
    trained: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    filtered: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
