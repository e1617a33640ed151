"""RolloutDesk after a restart that lost a batch: what waits is asked for when the slots say so, and not before."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np

from asyncrl.actors.rollout_desk import RolloutDesk
from asyncrl.config.schema import Config
from asyncrl.rollouts.slot_state import SlotState
from asyncrl.rollouts.slots import Slots
from asyncrl.rollouts.types import Group, Prompt


def test_waiting_groups_are_asked_for_once_their_turn_comes():
    cfg = Config()
    cfg.batch.groups, cfg.batch.group_size, cfg.staleness.max_steps = 2, 2, 1
    outbox = MagicMock()
    desk = RolloutDesk(cfg, MagicMock(), MagicMock(), MagicMock(), MagicMock(), outbox)
    open_groups = {2: False, 3: True, 4: False, 5: True, 6: False, 7: False}  # N = 4: groups 6 and 7 wait
    desk.slots = Slots.restore(2, 1, 1, SlotState(version=1, floor=1, next_ordinal=8, trained=2, open=open_groups))
    desk.evaluated.add(1)
    for ordinal in (2, 4, 6, 7):
        desk.restore(Group(ordinal, Prompt(f"train:{ordinal}", ordinal, np.zeros(3, np.int32), {})), {0, 1})
    desk.fleet.join("generator/0")
    desk.committed("generator/0", 1)

    def asked() -> list[int]:
        desk.pump(desk.slots.floor)
        ordinals = [call.args[2]["ordinal"] for call in outbox.put.call_args_list]
        outbox.put.reset_mock()
        return sorted(ordinals)

    assert asked() == [2, 4]
    assert asked() == []
    desk.slots.finish(2)
    assert desk.slots.take() == [2, 3]
    assert asked() == []
    desk.slots.mark_trained(1)
    desk.committed("generator/0", 2)
    assert asked() == [6, 7]
