"""When an engine that has requests counts as hung: it has given none of them a token for too long.

The measure is the engine's output as a whole, never the age of one request: a request may rightly wait for hours behind
others, and every token of any of them shows that the engine works. A request that vLLM loses while it serves others is
not seen here. It holds up its group, so that no group finishes once the staleness slots are taken, and the controller
ends the run after ``deadline.batch_s`` and names the generator that owes it.

Time is counted in looks, not by the clock: a process that was stopped for an hour has looked once meanwhile, and does
not blame the engine that was stopped with it.
"""

from __future__ import annotations

LOOKS = 10  # in the time that an engine may be silent


class Silence:
    """Call ``look`` ``LOOKS`` times in the time that silence may last.

    >>> silence = Silence()
    >>> [silence.look(progress=7, owing=True) for _ in range(LOOKS + 2)].index(True) == LOOKS + 1
    True
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._quiet = 0

    def look(self, progress: object, owing: bool) -> bool:
        """Whether the engine has been silent for too long.

        ``progress`` differs from that of the last look if any token came or any request was answered since; ``owing``:
        requests are in the engine and nothing of ours holds it up.
        """
        self._quiet = self._quiet + 1 if owing and progress == self._seen else 0
        self._seen = progress
        return self._quiet > LOOKS
