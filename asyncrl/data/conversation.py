"""One conversation in OpenAI's form, checked: known roles in a possible order, text only."""

from __future__ import annotations

import json
from typing import Any

from asyncrl.data.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'write a list of {"role": "user", "content": "..."}'

Messages = list[dict[str, Any]]


def checked_messages(value: Any, place: str) -> Messages:
    """``value`` as new messages: text parts joined, keys without a value left out.

    Raises ``DataError`` with reason ``messages`` (it is no conversation), ``roles`` (who may follow whom), ``image``
    (or another part that is not text) or ``unicode``.
    """
    value = from_json(value, place, "messages")
    if not isinstance(value, list) or not value:
        raise DataError(place, f"messages is {value!r:.80}", _SHAPE, "messages")
    messages = [_message(item, number, place) for number, item in enumerate(value)]
    _check_order(messages, place)
    return messages


def from_json(value: Any, place: str, column: str) -> Any:
    """``value``, decoded when it is text: files without lists (CSV) hold them as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            place, f"{column} is the text {value!r:.60}, which is not JSON: {error}", _SHAPE, "json"
        ) from error


def checked_tools(value: Any, place: str) -> Messages | None:
    """The tools of a conversation: a list of dicts, or none."""
    value = from_json(value, place, "tools") if value else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(place, f"tools is {value!r:.80}", "write a list of JSON schemas of functions", "messages")
    return value


def text_of(value: Any, place: str, what: str) -> str:
    """``value`` if it is text that can be encoded."""
    if not isinstance(value, str):
        raise DataError(place, f"{what} is {type(value).__name__} {value!r:.60}, not text", "give text", "messages")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            place, f"{what} holds half of a surrogate pair: {error.reason}", "mend the text", "unicode"
        ) from error
    return value


def _message(item: Any, number: int, place: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise DataError(place, f"message {number} is {item!r:.80}", _SHAPE, "messages")
    role = item["role"]
    if role not in ROLES:
        raise DataError(
            place,
            f"message {number} is of role {role!r}",
            f"roles are {', '.join(ROLES)}; form=sharegpt knows human and gpt",
            "roles",
        )
    message = {key: value for key, value in item.items() if value is not None}
    what = f"the content of message {number} ({role})"
    if message.get("tool_calls"):
        _check_calls(message, number, place)
        message["content"] = _content(message["content"], place, what) if "content" in message else None
    else:
        message.pop("tool_calls", None)
        message["content"] = _content(item.get("content"), place, what)
    return message


def _content(content: Any, place: str, what: str) -> str:
    if not isinstance(content, list):
        return text_of(content, place, what)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise DataError(
                place,
                f"{what} has a part of type {kind or type(part).__name__}; only text can be learnt",
                "leave it out, or keep its text with convert",
                "image",
            )
        texts.append(text_of(part.get("text"), place, what))
    return "".join(texts)


def _check_calls(message: dict[str, Any], number: int, place: str) -> None:
    calls = message["tool_calls"]
    good = isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )
    if message["role"] != "assistant" or not good:
        raise DataError(
            place,
            f"message {number} ({message['role']}) has tool_calls {calls!r:.80}",
            'the assistant calls tools: [{"type": "function", "function": {"name": ..., "arguments": ...}}]',
            "messages",
        )


# Who may speak after whom; None: the beginning. The first may be the system, then it begins anew.
_AFTER = {
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("tool", "assistant"),
}


def _check_order(messages: Messages, place: str) -> None:
    last: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        if number == 0 and role in ("system", "developer"):
            continue
        if role not in _AFTER[last]:
            where = "at the beginning" if last is None else f"after {'a tool call' if last == 'call' else last}"
            raise DataError(
                place,
                f"message {number} is of role {role} {where}; expected {' or '.join(_AFTER[last])}",
                "put the messages in order (a system message only first), or mend them with convert",
                "roles",
            )
        last = "call" if message.get("tool_calls") else role
