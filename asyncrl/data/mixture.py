"""Several sources as one stream of examples, with exact shares, from any position on in O(1).

The next example is of the source that is furthest below its share: after n examples source k has given between
``n * weight_k - (K - 1)`` and ``n * weight_k + 1`` of them, for normalised weights of K sources, never by luck. The
position is three small tables of integers: it says all about what comes next, whatever came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from asyncrl.data.corpus import Corpus
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.order import Order

T = TypeVar("T")
_SCALE = 1 << 40  # weights as integers, so that shares are compared without rounding


class Mixture:
    """``corpora`` by ``weights``, every one from its beginning again when it ends.

    ``skip``: a record that cannot be learnt is counted by reason, and the next of its source takes its place.
    """

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float], seed: int, skip: bool = False) -> None:
        if not corpora or len(corpora) != len(weights):
            raise ValueError(f"{len(corpora)} corpora and {len(weights)} weights")
        self.corpora = list(corpora)
        self._shares = [max(1, round(weight / sum(weights) * _SCALE)) for weight in weights]
        self._orders = [Order(len(corpus), seed, k, corpus.blocks) for k, corpus in enumerate(corpora)]
        self._skip = skip
        self.drawn = [0] * len(corpora)  # records of each source that were looked at
        self.given = [0] * len(corpora)  # of them examples
        self.skipped: Counter[str] = Counter()  # the others, by reason
        self.at = (self.corpora[0].name, 0)  # the source and the number of the record that was looked at last

    def take(self, count: int, encode: Callable[[Example], T]) -> list[T]:
        """What ``encode`` makes of the next ``count`` examples; a ``DataError`` of its own is one of the record.

        Raises ``DataError``: without ``skip`` for the first bad record, else when a source has no good one left.
        """
        return [self._next(encode) for _ in range(count)]

    def _next(self, encode: Callable[[Example], T]) -> T:
        source = self._source()
        corpus, order = self.corpora[source], self._orders[source]
        reasons = set()
        for _ in range(2 * len(corpus)):  # a whole epoch is among them, wherever it begins
            record = order.record(self.drawn[source])
            self.drawn[source] += 1
            self.at = (corpus.name, record)
            try:
                made = encode(corpus.example(record))
            except SourceError:
                raise
            except DataError as error:
                if not self._skip:
                    raise
                last = error
                reasons.add(error.reason)
                self.skipped[error.reason] += 1
                continue
            self.given[source] += 1
            return made
        raise SourceError(
            corpus.name,
            f"none of its {len(corpus)} records can be learnt (reasons: {', '.join(sorted(reasons))})",
            f"the last: {last}",
        )

    def _source(self) -> int:
        """The source that is furthest below its share of one example more."""
        total, whole = sum(self.given) + 1, sum(self._shares)
        short = [share * total - given * whole for share, given in zip(self._shares, self.given, strict=True)]
        return short.index(max(short))

    def position(self) -> dict[str, Any]:
        """Where the stream is, for a checkpoint."""
        return {"drawn": list(self.drawn), "given": list(self.given), "skipped": dict(self.skipped)}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from ``position`` of a mixture of the same sources."""
        if len(position["drawn"]) != len(self.corpora):
            raise ValueError(f"a position in {len(position['drawn'])} sources, there are {len(self.corpora)}")
        self.drawn, self.given = list(position["drawn"]), list(position["given"])
        self.skipped = Counter(position["skipped"])

    def metrics(self) -> dict[str, int]:
        """Under declared keys; empty while nothing was skipped."""
        if not self.skipped:
            return {}
        by_reason = {f"data/skipped/{reason}": number for reason, number in sorted(self.skipped.items())}
        return {"data/skipped": self.skipped.total(), **by_reason}

    def identity(self) -> dict[str, Any]:
        """What decides which examples come: with another value a position would mean other ones.

        Not ``skip``: a run that a bad record has ended goes on with it, from the same position.
        """
        found: dict[str, Any] = {"sft.data": len(self.corpora)}
        for k, (corpus, share) in enumerate(zip(self.corpora, self._shares, strict=True)):
            found |= {f"sft.data[{k}].{key}": value for key, value in corpus.identity().items()}
            found[f"sft.data[{k}].weight"] = round(share / sum(self._shares), 9)
        return found
