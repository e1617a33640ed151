"""What can go wrong between a trainer's parameters and an engine's weights."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.transport.errors import TransportError


class WeightMismatch(RuntimeError):
    """An engine holds, or was about to hold, something other than the trainer's weights. Names every tensor.

    ``changed``: digests differ. ``missing``: the engine needs them and did not get them. ``unwanted``: the engine has
    no use for them. ``buffers``: of the engine, which the load should not have touched.
    """

    def __init__(
        self,
        version: int,
        changed: Sequence[str] = (),
        missing: Sequence[str] = (),
        unwanted: Sequence[str] = (),
        buffers: Sequence[str] = (),
    ) -> None:
        self.version, self.changed, self.missing, self.unwanted = version, list(changed), list(missing), list(unwanted)
        self.buffers = list(buffers)
        parts = [
            f"{len(names)} {what}: {', '.join(names)}"
            for what, names in (
                ("tensors arrived changed", self.changed),
                ("tensors that the engine needs are missing", self.missing),
                ("tensors match nothing in the engine", self.unwanted),
                ("buffers of the engine changed with the load", self.buffers),
            )
            if names
        ]
        super().__init__(f"weights of version {version} do not match: " + "; ".join(parts))


class GatherMismatch(RuntimeError):
    """What rank 0 gathered differs from the ranks' shards."""

    def __init__(self, version: int, names: Sequence[str]) -> None:
        self.version, self.names = version, list(names)
        super().__init__(f"version {version}: gathered tensors differ from their shards: {', '.join(self.names)}")


class PublishFailed(RuntimeError):
    """The push of a version ended without its weights leaving; the cause is chained."""


class PlaneFailed(TransportError):
    """The way that bytes take to an engine broke. The text says what it was waiting for or what the driver said."""
