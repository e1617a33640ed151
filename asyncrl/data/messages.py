"""Conversations as chat templates read them.

Templates see what an engine's chat endpoint would show them: text parts joined, no content as an empty text, the
arguments of a tool call as an object, and no key that says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from asyncrl.data.conversation import checked_messages
from asyncrl.data.errors import DataError

Message = dict[str, Any]


def for_template(messages: Sequence[Message], place: str) -> list[Message]:
    """``messages`` without their weights, as templates read them.

    Raises ``DataError`` as :func:`checked_messages` does, and for the arguments of a call that are no JSON object.
    """
    found = checked_messages(list(messages), place)
    for number, message in enumerate(found):
        message.pop("weight", None)
        if message["content"] is None:
            message["content"] = ""  # templates would write None
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call, number, place) for call in message["tool_calls"]]
    return found


def learnable(messages: Sequence[Message], place: str) -> list[int]:
    """Numbers of the assistant's messages without ``weight: 0`` (OpenAI's fine-tuning form).

    Raises ``DataError`` for another weight than 0 and 1, or one of 1 on a message that is not the assistant's.
    """
    found = []
    for number, message in enumerate(messages):
        weight, mine = message.get("weight"), message["role"] == "assistant"
        if weight not in (None, 0, 1) or (weight == 1 and not mine):
            raise DataError(
                place,
                f"message {number} ({message['role']}) has weight {weight!r:.20}",
                "the assistant's messages have weight 0 (not learnt) or 1, others have none",
                "weight",
            )
        if mine and weight != 0:
            found.append(number)
    return found


def _call(call: dict[str, Any], number: int, place: str) -> dict[str, Any]:
    """One tool call with its arguments as an object: as JSON text a template would quote them a second time."""
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise DataError(
                place,
                f"message {number} calls {function['name']} with {arguments!r:.60}: {error}",
                "write valid JSON",
                "arguments",
            ) from error
    if not isinstance(arguments, dict):
        raise DataError(
            place,
            f"message {number} calls {function['name']} with {arguments!r:.60}",
            "arguments are a JSON object",
            "arguments",
        )
    return call | {"function": function | {"arguments": arguments}}
