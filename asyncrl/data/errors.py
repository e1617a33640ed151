"""Errors of training data. Each says which conversation is wrong and what to do about it."""

from __future__ import annotations


class DataError(ValueError):
    """Training data cannot be used as it is. ``place`` names the conversation ("data.jsonl line 7", "train:12").

    ``reason`` is the word under which ``sft.on_error=skip`` counts it (``data/skipped/<reason>``).
    """

    reason = "other"

    def __init__(self, place: str, message: str, remedy: str, reason: str = "") -> None:
        self.place = place
        self.reason = reason or type(self).reason
        super().__init__(f"{place}: {message}\n    -> {remedy}")


class SourceError(DataError):
    """A whole source cannot be used: never skipped."""


class TemplateError(DataError):
    """The chat template cannot render a conversation, or renders it so that its answers cannot be told apart."""

    reason = "template"
