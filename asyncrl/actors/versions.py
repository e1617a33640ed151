"""Which weight version drew each token of a running request.

A request starts under the version that the engine serves; every update that it lives through adds a boundary at the
number of tokens drawn so far.

>>> spans = VersionSpans(3)
>>> spans.boundary(4, at=2)
>>> spans.per_token(5).tolist()
[3, 3, 4, 4, 4]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class VersionDisagreement(RuntimeError):
    """The engine's own record of versions differs from ours: one of them labels tokens wrongly."""


class VersionSpans:
    """(version, index of its first token), rising in both."""

    def __init__(self, version: int) -> None:
        self._starts = [(version, 0)]

    def boundary(self, version: int, at: int) -> None:
        """Tokens from index ``at`` on are drawn by ``version``. Raises ``ValueError`` if time ran backwards."""
        last_version, last_at = self._starts[-1]
        if version < last_version or at < last_at:
            raise ValueError(f"boundary to version {version} at token {at} after {last_version} at {last_at}")
        if at == last_at:  # nothing was drawn by the last one
            self._starts.pop()
        self._starts.append((version, at))

    def per_token(self, count: int) -> NDArray[np.int32]:
        """(count,) version of each token."""
        versions = np.empty(count, np.int32)
        for version, start in self._starts:
            versions[start:] = version
        return versions

    def check(self, count: int, reported: Sequence[tuple[str, int, int]]) -> None:
        """Compare with the spans (label, start, end) that the engine reports for ``count`` tokens.

        Raises ``VersionDisagreement``.
        """
        ours = self.per_token(count)
        theirs = np.full(count, -1, np.int32)
        for label, start, end in reported:
            theirs[start:end] = int(label) if label.isdecimal() else -1
        if not np.array_equal(ours, theirs):
            raise VersionDisagreement(f"the engine reports {list(reported)}, the boundaries say {self._starts}")
