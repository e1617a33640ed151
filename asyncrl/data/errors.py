"""Errors of training data. Each says which conversation is wrong and what to do about it."""

from __future__ import annotations


class DataError(ValueError):
    """Training data cannot be used as it is. ``place`` names the conversation ("data.jsonl line 7", "train:12")."""

    def __init__(self, place: str, message: str, remedy: str) -> None:
        self.place = place
        super().__init__(f"{place}: {message}\n    -> {remedy}")


class TemplateError(DataError):
    """The chat template cannot render a conversation, or renders it so that its answers cannot be told apart."""
