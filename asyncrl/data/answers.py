"""Where the assistant's answers lie among the tokens of a conversation, through their end-of-turn tokens.

A template with ``{% generation %}`` blocks says so itself. Any other is asked as an engine asks it: the conversation up
to an answer, with the opening of the assistant's turn, must be how the whole conversation begins, and so must the
conversation through that answer, but for what a template puts at the end of the last turn only. A template that renders
the same turns differently once more follow (one that drops earlier reasoning, say) has no such places: that is a
:class:`TemplateError`, never a wrong mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.data.errors import TemplateError
from asyncrl.data.messages import Message
from asyncrl.data.template import Template, special_ids


@dataclass(frozen=True)
class Bounds:
    """One answer: the text before it, and the text through it. ``span``: as a generation block marks it."""

    number: int  # of its message
    before: str
    through: str
    whole: str  # the text of the conversation
    span: bool = False


def find_answers(
    template: Template, messages: Sequence[Message], wanted: Sequence[int]
) -> tuple[list[int], list[slice]]:
    """(ids of ``messages``, the tokens of each answer in ``wanted``).

    Raises ``TemplateError`` if the template refuses the messages or leaves one of them out, if an answer cannot be told
    from what is around it, or if it has no end-of-turn token.
    """
    generated = template.spans(messages) if wanted else None
    if generated is not None:
        text, spans = generated
        chosen = _chosen(template, messages, wanted, spans)
        found = [Bounds(number, text[:start], text[:end], text, span=True) for number, start, end in chosen]
    else:
        text = template.render(messages)
        found = [_bounds(template, messages, number, text) for number in wanted]
    _check_whole(template, messages, text)
    ids, *prefixes = template.tokens([text, *(part for b in found for part in (b.before, b.through))])
    pairs = zip(found, prefixes[::2], prefixes[1::2], strict=True)
    return ids, [_answer(template, bounds, ids, before, through) for bounds, before, through in pairs]


def _check_whole(template: Template, messages: Sequence[Message], text: str) -> None:
    """Raises ``TemplateError`` for a message of which nothing is in ``text``, whatever its content.

    Not for an answer: templates drop earlier reasoning on purpose, and what is learnt is compared by itself.
    """
    for number, message in enumerate(messages):
        content = message["content"].strip()
        if (
            not content or message["role"] == "assistant" or content in text
        ):  # templates change contents (strip, quote, cut); seldom, and not to nothing
            continue
        other = {**message, "content": content + content}
        if template.render([*messages[:number], other, *messages[number + 1 :]]) == text:
            raise TemplateError(
                template.place,
                f"the chat template leaves out the content of message {number} ({message['role']})",
                "take it out with convert, or choose a model whose template renders it",
            )


def _chosen(
    template: Template, messages: Sequence[Message], wanted: Sequence[int], spans: list[tuple[int, int]]
) -> list[tuple[int, int, int]]:
    """(message, first character, end) of the ``wanted`` answers."""
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) == len(answers):
        return [(number, *span) for span, number in zip(spans, answers, strict=True) if number in wanted]
    if len(spans) > len(answers) and list(wanted) == answers:
        return [(answers[-1], *span) for span in spans]
    raise TemplateError(
        template.place,
        f"the chat template marks {len(spans)} generation spans for {len(answers)} answers, of which {len(wanted)} are "
        "to be learnt, so they cannot be told apart",
        "let the template mark each answer once, tool calls included",
    )


def _bounds(template: Template, messages: Sequence[Message], number: int, text: str) -> Bounds:
    """Of the answer ``messages[number]`` in ``text``, all of ``messages``."""
    before = template.render(messages[:number], prompt=True)
    if not text.startswith(before):
        raise _unlike(template, number, "when an engine is prompted with what comes before", before, text)
    return Bounds(number, before, template.render(messages[: number + 1]), text)


def _answer(template: Template, bounds: Bounds, ids: list[int], before: list[int], through: list[int]) -> slice:
    """The tokens of one answer, from those of the texts before and through it."""
    start = _common(before, ids)
    if start < len(before):
        cut = len(bounds.before)
        raise TemplateError(
            template.place,
            f"a token is half prompt, half answer at {bounds.before[-15:] + bounds.through[cut : cut + 15]!r}, and no "
            "engine that is given the prompt would sample it",
            "let the answer begin without white space, or use a template with a special token before it",
        )
    end = _common(through, ids)
    if not _is_blank(template, through[end:]):
        raise _unlike(template, bounds.number, "with more messages after it", bounds.through, bounds.whole)
    stop = _after_end_of_turn(template, ids, start, end, bounds.span)
    if stop is None:
        raise TemplateError(
            template.place,
            f"the chat template does not end message {bounds.number} with an end-of-turn token",
            "use a template that ends the assistant's turn with the eos token or another special token; a model that "
            "does not learn it never stops",
        )
    return slice(start, stop)


def _common(prefix: list[int], ids: list[int]) -> int:
    """How many tokens both begin with."""
    if ids[: len(prefix)] == prefix:
        return len(prefix)
    return next(i for i, (a, b) in enumerate(zip([*prefix, -1], [*ids, -2], strict=False)) if a != b)


def _is_blank(template: Template, ids: list[int]) -> bool:
    """Whether there is nothing but special tokens and white space."""
    special = special_ids(template.tokenizer)
    return not template.decode([token for token in ids if token not in special]).strip()


def _after_end_of_turn(template: Template, ids: list[int], start: int, end: int, span: bool) -> int | None:
    """Where the answer ``ids[start:end]`` ends if its last token, but for white space, is special; else None.

    Templates may put a line break after the end of turn: the engine, having stopped, never samples it. A generation
    ``span`` may leave the end of turn to the template; then it is the token that follows.
    """
    special, eos = special_ids(template.tokenizer), template.tokenizer.eos_token_id
    stop = end
    while stop > start and ids[stop - 1] not in special and not template.decode(ids[stop - 1 : stop]).strip():
        stop -= 1
    last = ids[stop - 1] if stop > start else None
    following = ids[end] if span and end < len(ids) else None
    if last in special and (last == eos or following != eos):
        return stop
    return end + 1 if following in special else None


def _unlike(template: Template, number: int, when: str, prefix: str, text: str) -> TemplateError:
    same = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), min(len(prefix), len(text)))
    first, second = (part[max(0, same - 15) : same + 25] for part in (prefix, text))
    return TemplateError(
        template.place,
        f"the chat template renders message {number} differently {when}: {first!r} is {second!r} in the whole",
        "use sft.train_on=last, end the conversation with that answer, or give the template {% generation %} blocks",
    )
