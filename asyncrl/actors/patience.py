"""How long the controller goes on waiting: the one clock that decides when a run that has come to a standstill ends.

While no generator serves ``deadline.start_s``, while only the last checkpoint is missing ``deadline.checkpoint_s`` (if
that is longer), otherwise ``deadline.batch_s``: from the start, from the moment that the
first one served or the last one was lost (``generator.max_restarts`` limits how often), or from the last progress, if
that was later. Progress is what brings the next batch, or the end of the run, nearer and can happen a limited number of
times before it is there:

- a sample that was owed, a group scored (also one filtered or failed: those have limits of their own,
  ``algorithm.max_filtered_groups`` and ``reward.max_failures_share``), a result of an evaluation;
- a batch cut, a step reported, a checkpoint saved.

Messages that may be repeated for ever are none: peers that come and go, commits of versions, repeats of samples.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.config.schema import DeadlineConfig


class Patience:
    """Call ``note`` after whatever happened. ``clock``: monotonic seconds.

    >>> now = 0.0
    >>> patience = Patience(DeadlineConfig(start_s=60, batch_s=10), lambda: now)
    >>> patience.note(0, serving=True)
    >>> now = 7.0
    >>> patience.note(0, serving=True), patience.left_s
    (None, 3.0)
    >>> patience.note(1, serving=True), patience.left_s
    (None, 10.0)
    """

    def __init__(self, deadline: DeadlineConfig, clock: Callable[[], float]) -> None:
        self._deadline, self._clock = deadline, clock
        self._serving = self._saving = False
        self._progress: object = None
        self._since = clock()

    def note(self, progress: object, serving: bool, saving: bool = False) -> None:
        """``progress`` differs from the last one if there was some; ``serving``: some generator serves; ``saving``:
        nothing but the last checkpoint is missing."""
        if serving != self._serving or progress != self._progress:
            self._since = self._clock()
        self._serving, self._saving, self._progress = serving, saving, progress

    @property
    def limit_s(self) -> float:
        """How long the present wait may last."""
        if not self._serving:
            return self._deadline.start_s
        return max(self._deadline.batch_s, self._deadline.checkpoint_s if self._saving else 0.0)

    @property
    def left_s(self) -> float:
        """How much of it is left; not above 0 when it is over."""
        return self._since + self.limit_s - self._clock()
