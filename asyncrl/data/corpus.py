"""Examples by number: of the training items of an environment with their reference answers, or of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.config.schema import DataConfig
from asyncrl.data.converter import Converter
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.forms import Shape, detect, shape_of
from asyncrl.data.records import Records
from asyncrl.envs import Env, Item
from asyncrl.envs.types import Unreadable


class Corpus(Protocol):
    """``blocks``: sizes of the runs of examples that lie together in the file; empty where any is as near."""

    name: str
    blocks: Sequence[int]

    def __len__(self) -> int: ...

    def example(self, index: int) -> Example:
        """The same whenever it is asked for. Raises ``DataError`` when it cannot be used."""
        ...

    def identity(self) -> dict[str, Any]:
        """What decides the examples, JSON-able; a resumed run must find the same."""
        ...

    def __str__(self) -> str:
        """What was found, for the user."""
        ...


class EnvCorpus:
    """Items of one split, each followed by its reference answer, if the task's own scorer gives that full marks."""

    blocks: Sequence[int] = ()

    def __init__(self, env: Env, name: str = "env") -> None:
        self._env, self.name = env, name

    def __len__(self) -> int:
        return len(self._env)

    def __str__(self) -> str:
        return f"{self.name}: {len(self)} items with their reference answers"

    def identity(self) -> dict[str, Any]:
        return {"records": len(self), "content": self._env.fingerprint()}

    def example(self, index: int) -> Example:
        item = self._env.item(index)
        answer = reference_answer(item.entry)
        if not isinstance(answer, str):
            raise DataError(
                item.item_id,
                f"the task gives no reference answer (found {answer!r:.60})",
                "choose a task that has one, or write the conversations to a file and name it in sft.data",
                "answer",
            )
        score = self._score(answer, item)
        if score < 1.0:
            raise DataError(
                item.item_id,
                f"the reference answer {answer!r:.60} scores {score:g}",
                "only right answers are taught: choose another task, or name a file in sft.data",
                "answer",
            )
        return Example(item.item_id, [*item.messages, {"role": "assistant", "content": answer}])

    def _score(self, answer: str, item: Item) -> float:
        """Raises ``DataError`` with what the scorer raises."""
        try:
            return self._env.score(answer, item.entry)
        except Unreadable:
            return 0.0
        except Exception as error:  # the scorer may be the user's
            raise DataError(
                item.item_id,
                f"the task's scorer raised {type(error).__name__} on {answer!r:.60}: {error}",
                "mend the scorer, or pass over such items with sft.on_error=skip",
                "scorer",
            ) from error

    def entry(self, index: int) -> dict[str, Any]:
        """What the task's scorer needs of item ``index`` beside an answer."""
        return self._env.item(index).entry


def reference_answer(entry: dict[str, Any]) -> Any:
    """``answer`` of a reasoning-gym entry, or of the data that a user's function returned; None if there is none."""
    return entry["answer"] if "answer" in entry else entry.get("data", {}).get("answer")


class FileCorpus:
    """Records of a file, each in the form that the configuration states or the first record shows."""

    def __init__(self, records: Records, source: DataConfig, digest: str, key: str) -> None:
        """``key`` is that of ``source``, for errors. Raises ``SourceError``."""
        self._records, self._digest = records, digest
        self.name, self.blocks = source.path, records.blocks
        self._maker: Shape | Converter
        if source.convert:
            self._maker = Converter(source.convert, f"{key}.convert")
        elif source.form == "auto":
            self._maker = self._detect()
        else:
            self._maker = shape_of(source.form, source.columns)

    def _detect(self) -> Shape:
        """Of the first record that can be read."""
        first: DataError | None = None
        for index in range(min(100, len(self))):
            try:
                return detect(self._records.record(index), self._records.place(index))
            except SourceError:
                raise
            except DataError as error:
                first = first or error
        assert first is not None, "a source without records is refused when it is opened"
        raise SourceError(self.name, "none of its first records can be read, so their form is unknown", str(first))

    def __len__(self) -> int:
        return len(self._records)

    def __str__(self) -> str:
        return f"{self.name}: {len(self)} records, {self._maker}"

    def identity(self) -> dict[str, Any]:
        made = self._maker
        how = {"convert": made.identity()} if isinstance(made, Converter) else {"form": str(made)}
        return {"records": len(self), "content": f"sha256 {self._digest}", **how}

    def example(self, index: int) -> Example:
        return self._maker.example(self._records.record(index), self._records.place(index))
