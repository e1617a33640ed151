"""Records of the usual forms of training data, as examples.

messages    messages: [{"role": "user", "content": "..."}, ...], tools
sharegpt    conversations: [{"from": "human", "value": "..."}, ...], system, tools
alpaca      instruction, input, output, system: a question with its matter below it, and the answer
text        text
preference  chosen, rejected: conversations with the same beginning, or two answers to prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.config.forms import FORMS
from asyncrl.data.conversation import checked_messages, checked_tools, from_json, text_of
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example

Record = Mapping[str, Any]

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}

# Names that say what a record is, the first that fits is taken: form, {its column: the name in the file}.
_KNOWN: list[tuple[str, dict[str, str]]] = [
    ("preference", {"chosen": "chosen", "rejected": "rejected"}),
    ("messages", {"messages": "messages"}),
    ("sharegpt", {"conversations": "conversations"}),
    ("sharegpt", {"conversations": "conversation"}),
    ("alpaca", {"instruction": "instruction", "output": "output"}),
    ("alpaca", {"instruction": "instruction", "input": "context", "output": "response"}),
    ("alpaca", {"instruction": "instruction", "output": "response"}),
    ("alpaca", {"instruction": "prompt", "output": "completion"}),
    ("alpaca", {"instruction": "prompt", "output": "response"}),
    ("alpaca", {"instruction": "question", "output": "answer"}),
    ("alpaca", {"instruction": "input", "output": "output"}),
    ("text", {"text": "text"}),
]


@dataclass(frozen=True)
class Shape:
    """A form and where its columns are in the file, should it have them: ``columns``, the form's name -> the file's."""

    form: str
    columns: dict[str, str]

    def __str__(self) -> str:
        renamed = [f"{name} is the column {column}" for name, column in self.columns.items() if name != column]
        return f"form {self.form}" + (f" ({', '.join(renamed)})" if renamed else "")

    def example(self, record: Record, place: str) -> Example:
        """``record`` as an example. Raises ``DataError``."""
        for name in FORMS[self.form].needed:
            if self.columns[name] not in record:
                raise DataError(
                    place,
                    f"has no column {self.columns[name]}, which form {self.form} needs; it has {_names(record)}",
                    "choose form, or name the columns in columns: {" + f"{name}: ..." + "}",
                    "column",
                )
        values = {name: record[column] for name, column in self.columns.items() if column in record}
        return _MAKE[self.form](values, place)


def shape_of(form: str, columns: Mapping[str, str]) -> Shape:
    """The shape that a configuration states."""
    taken = set(columns.values())  # a column of the file is one of the form
    return Shape(
        form, {name: columns.get(name, name) for name in FORMS[form].all if name in columns or name not in taken}
    )


def detect(record: Record, place: str) -> Shape:
    """What ``record``, the first of its file, is. Raises ``SourceError`` naming the columns that are there."""
    found = next((k for k, (_, columns) in enumerate(_KNOWN) if record.keys() >= set(columns.values())), None)
    if found is None:
        known = "; ".join(f"{form}: {columns}" for form, columns in FORMS.items())
        raise SourceError(
            place,
            f"its columns fit no form: {_names(record)}",
            f"choose form and name its columns in columns, or write a function for convert. Forms are {known}",
            "column",
        )
    form, columns = _KNOWN[found]
    if form in ("messages", "sharegpt"):
        (column,) = columns.values()
        form, column_name = _dialect(from_json(record[column], place, column), form)
        columns = {column_name: column}
    return shape_of(form, columns)


def _dialect(turns: Any, otherwise: str) -> tuple[str, str]:
    """The form of a list of turns by the keys of the first, whatever its column is called; its column in the form."""
    first = turns[0] if isinstance(turns, list) and turns else None
    form = otherwise
    if isinstance(first, dict) and ("role" in first or "from" in first):
        form = "messages" if "role" in first else "sharegpt"
    return form, FORMS[form].needed[0]


def _names(record: Record) -> str:
    return ", ".join(map(str, record)) or "none"


def _messages(values: Record, place: str) -> Example:
    return Example(place, checked_messages(values["messages"], place), tools=checked_tools(values.get("tools"), place))


def _sharegpt(values: Record, place: str) -> Example:
    turns = from_json(values["conversations"], place, "conversations")
    remedy = 'write a list of {"from": "human", "value": "..."}'
    if not isinstance(turns, list) or not turns:
        raise DataError(place, f"conversations is {turns!r:.80}", remedy, "messages")
    messages: list[dict[str, Any]] = _system(values)
    for number, turn in enumerate(turns):
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(speaker, str):
            raise DataError(place, f"turn {number} is {turn!r:.80}", remedy, "messages")
        if speaker == "function_call":
            messages.append(_call(turn.get("value"), place, number))
        elif speaker in SPEAKERS:
            messages.append({"role": SPEAKERS[speaker], "content": turn.get("value")})
        else:
            known = ", ".join([*SPEAKERS, "function_call"])
            raise DataError(place, f"turn {number} is from {speaker!r}", f"known are {known}", "roles")
    return Example(place, checked_messages(messages, place), tools=checked_tools(values.get("tools"), place))


def _call(value: Any, place: str, number: int) -> dict[str, Any]:
    """A turn of LLaMA-Factory's ``function_call``: {"name", "arguments"} as JSON."""
    call = from_json(value, place, f"the function_call of turn {number}")
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}


def _system(values: Record) -> list[dict[str, Any]]:
    return [{"role": "system", "content": values["system"]}] if values.get("system") else []


def _alpaca(values: Record, place: str) -> Example:
    question, answer = values["instruction"], values["output"]
    if isinstance(question, list) and isinstance(answer, list):  # conversational prompt and completion
        return Example(place, checked_messages([*question, *answer], place))
    question = text_of(question, place, "instruction")
    if matter := values.get("input"):
        question = f"{question}\n\n{text_of(matter, place, 'input')}"
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Example(place, checked_messages([*_system(values), *turns], place))


def _text(values: Record, place: str) -> Example:
    return Example(place, text=text_of(values["text"], place, "text"))


def _preference(values: Record, place: str) -> Example:
    chosen, rejected = (_answered(values[name], values.get("prompt"), place, name) for name in ("chosen", "rejected"))
    return preference(place, chosen, rejected, checked_tools(values.get("tools"), place))


def preference(
    place: str, chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> Example:
    """A pair of checked conversations that differ in their last message. Raises ``DataError``."""
    problem = ""
    if chosen[-1]["role"] != "assistant" or rejected[-1]["role"] != "assistant":
        problem = "does not end with an answer of the assistant in both conversations"
    elif chosen[:-1] != rejected[:-1]:
        problem = "has different prompts before the chosen and the rejected answer"
    elif chosen == rejected:
        problem = "has the same answer chosen and rejected: there is nothing to prefer"
    if problem:
        raise DataError(place, problem, "the two conversations differ in their last message only", "pair")
    return Example(place, chosen, rejected=rejected, tools=tools)


def _answered(answer: Any, prompt: Any, place: str, name: str) -> list[dict[str, Any]]:
    """The conversation of a chosen or rejected answer: it may be text, messages, or messages with their prompt."""
    if isinstance(prompt, str):
        before = [{"role": "user", "content": prompt}]
    else:
        before = list(prompt) if isinstance(prompt, list) else []
    if isinstance(answer, str) and not before and answer.startswith("[{"):
        answer = from_json(answer, place, name)
    if isinstance(answer, str):
        if not before:
            raise DataError(
                place,
                f"{name} is text and there is no prompt",
                "give the column prompt, or messages in chosen and rejected, or write a function for convert",
                "pair",
            )
        answer = [{"role": "assistant", "content": answer}]
    whole = not (isinstance(answer, list) and len(answer) == 1)  # more than the answer: the prompt is in it
    return checked_messages(answer if whole else [*before, *answer], place)


_MAKE: dict[str, Callable[[Record, str], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "text": _text,
    "preference": _preference,
}
