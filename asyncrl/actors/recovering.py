"""Going on from a run folder: what the ledger gives back to the conductor.

The trainers load the last checkpoint (version c); the cuts c, c+1, ... that the ledger holds are applied again to the
same samples before the engines get weights; finished groups wait for their batch as before; groups in flight are asked
for again under their ordinals, only for the samples that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.rollouts.recovery import Pending, recover
from asyncrl.rollouts.slots import Slots
from asyncrl.rollouts.types import Group, Prompt

if TYPE_CHECKING:
    from asyncrl.actors.conductor import Conductor


def recover_run(conductor: Conductor, checkpoint: int) -> None:
    """Give ``conductor`` and its desk the state that the ledger holds behind the trainers' checkpoint."""
    desk, ledger, cfg = conductor.desk, conductor.ledger, conductor.cfg
    found = recover(ledger, checkpoint)
    desk.slots = Slots.restore(cfg.batch.groups, cfg.staleness.max_steps, cfg.staleness.window, found.slots)
    if found.cursor is not None:
        desk.prompts.restore(found.cursor)
    conductor.resume(checkpoint, list(ledger.cuts_since(checkpoint)))
    for group in found.finished:
        desk.groups[group.ordinal] = group
        desk.decide(group)  # the end may have come between its last score and this
    for pending in found.pending:
        desk.restore(_group(pending, desk.prompts.item), set(pending.missing))
    if found.version:
        desk.evaluated.add(0)  # the start was evaluated before the first group was admitted
    conductor.progress.resume(checkpoint)
    text = f"resumed from version {checkpoint}; {found.version - checkpoint} batches applied again"
    if found.lost:
        text += f"; {len(found.lost)} groups could not be read and are generated again"
    conductor.progress.event(text, warning=bool(found.lost))


def _group(pending: Pending, item: Callable[[int], Prompt]) -> Group:
    prompt = pending.prompt if pending.prompt is not None else item(pending.item_index)
    return Group(pending.ordinal, prompt, pending.samples, pending.epoch)
