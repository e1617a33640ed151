"""How long a trainer rank waits for the controller: as long as that lives. The link is a fake, time does not pass."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from asyncrl.config.schema import Config
from asyncrl.modes.grpo import _obey
from asyncrl.transport.errors import DeadlineExpired
from asyncrl.transport.frames import Message

STOP = Message("stop", {"reason": "finished"}, (), "controller", 1, 1)


class Link:
    """Every ``recv`` without a command takes its whole deadline; then come ``commands``."""

    name = "trainer/1"

    def __init__(self, silent_s: float, unheard_s: float = 0.0) -> None:
        self._silent_s, self._unheard_s = silent_s, unheard_s
        self.waited_s = 0.0
        self.done = MagicMock()

    @property
    def connected(self) -> bool:
        return self.waited_s >= self._unheard_s

    def recv(self, *, deadline_s: float, waiting_for: str) -> Message:
        if self.waited_s >= self._silent_s:
            return STOP
        self.waited_s += deadline_s
        raise DeadlineExpired(self.name, deadline_s, waiting_for, "not connected to the controller")


def obey(link: Link) -> None:
    cfg = Config()
    cfg.deadline.start_s, cfg.deadline.batch_s = 100, 60
    context = SimpleNamespace(rank=1)  # rank 0 tidies folders at the end
    _obey(cfg, context, MagicMock(), MagicMock(), link)  # type: ignore[arg-type]


def test_a_controller_that_lives_is_waited_for_however_long_it_waits_itself():
    """Samples may come in for hours before the next batch is full."""
    link = Link(silent_s=36_000)
    obey(link)
    link.done.assert_called_once_with(STOP)


def test_a_controller_that_is_not_heard_any_more_is_given_up():
    link = Link(silent_s=36_000, unheard_s=36_000)
    with pytest.raises(DeadlineExpired, match=r"trainer/1 waited 60 s for a sign of life of the controller"):
        obey(link)
    assert link.waited_s == 60


def test_a_connection_that_was_lost_for_a_while_counts_for_nothing():
    obey(Link(silent_s=36_000, unheard_s=50))
