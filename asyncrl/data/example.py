"""One thing to learn, as every source gives it and the encoder takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Example:
    """A conversation, a plain text, or a preference pair.

    place: names it in errors: "data.jsonl line 7", "train:12".
    messages: OpenAI's form: role, content (text, or None with tool_calls), tool_calls, tool_call_id, name, weight.
    text: plain text, everything learnt; then there are no messages.
    rejected: of a preference: ``messages`` is the chosen conversation, this the rejected one, after the same prompt.
    tools: passed to the chat template.
    """

    place: str
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    rejected: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
