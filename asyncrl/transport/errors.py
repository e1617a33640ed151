"""What can go wrong on a link, one type for each thing a caller can do about it."""

from __future__ import annotations


class TransportError(RuntimeError):
    """Base of the errors below."""


class ProtocolError(TransportError):
    """A message breaks the wire format or its schema. The text names the kind and the field."""


class OutOfStep(ProtocolError):
    """A gap in the numbers, an unknown acknowledgement or more than was granted: a new handshake is needed."""


class PeerLost(TransportError):
    """The peer left, or was never there: what was sent to it may not have been consumed.

    ``reason`` is what the peer said when it left; None if it said nothing.
    """

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason


class DeadlineExpired(TransportError, TimeoutError):
    """A wait ended without its event. The text says who waited, for how long, and for what."""

    def __init__(self, owner: str, seconds: float, reason: str, detail: str = "") -> None:
        self.owner, self.seconds, self.reason = owner, seconds, reason
        super().__init__(f"{owner} waited {seconds:g} s for {reason}" + (f" ({detail})" if detail else ""))
