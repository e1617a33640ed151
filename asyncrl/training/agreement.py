"""Stages that end on all ranks together: well, or everywhere with the same reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from asyncrl.training.errors import CheckpointError

TEXT_BYTES = 1024


class Agreement:
    """``group`` is a gloo group that only one thread of each rank uses at a time; None in a world of one."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group

    def together(self, what: str, action: Callable[[], None]) -> None:
        """Collective. Runs ``action``, whose error, of whatever kind, makes all ranks raise :class:`CheckpointError`.

        So does a rank that has died, or does not come before the group's timeout.
        """
        failure: Exception | None = None
        try:
            action()
        except Exception as error:  # noqa: BLE001 - every rank is told, then it is raised here
            failure = error
        try:
            texts = self._exchange("" if failure is None else describe(failure))
        except RuntimeError as error:
            if failure is None:
                raise CheckpointError(f"could not {what}: another rank did not get there: {error}") from error
            texts = []
        if failure is not None:
            raise CheckpointError(f"could not {what}: {describe(failure)}") from failure
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"could not {what}: rank {rank} failed: {text}")

    def _exchange(self, text: str) -> list[str]:
        """Every rank's text."""
        if self.world_size == 1:
            return [text]
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        data = text.encode()[:TEXT_BYTES]
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.group)
        return [bytes(row.numpy()).rstrip(b"\0").decode(errors="replace") for row in rows]


def describe(error: Exception) -> str:
    """What a user reads: our own messages as they are, others with their type."""
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
