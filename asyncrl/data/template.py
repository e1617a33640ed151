"""A tokenizer's own chat template: a conversation as text, as spans of generated text, and as tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from asyncrl.data.errors import TemplateError
from asyncrl.data.messages import Message

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None

    def __hash__(self) -> int: ...

    @property
    def special_tokens_map(self) -> dict[str, Any]: ...

    @property
    def added_tokens_decoder(self) -> dict[int, Any]: ...

    def __call__(self, text: Any, **settings: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any: ...

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str: ...

    def decode(self, token_ids: Any) -> Any: ...


class Template:
    """The chat template of ``tokenizer`` for one conversation; ``place`` names that in errors."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] | None, place: str) -> None:
        self.tokenizer, self.tools, self.place = tokenizer, list(tools) if tools else None, place

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """``messages`` as text; with ``prompt`` followed by the opening of the assistant's turn.

        Raises ``TemplateError`` if the template fails on them, for example for a role that it does not know.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as error:  # a template is a program of its author's: it may raise anything
            raise self._failed(messages, error) from error
        return str(text)

    def spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]] | None:
        """``messages`` as text and where in it the template's ``{% generation %}`` blocks lie; None if it has none.

        Not transformers' ``return_assistant_tokens_mask``: where a span begins or ends in white space that the
        tokenizer leaves out of its offsets, that mask loses the spans that follow or runs on to the end.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.tokenizer.get_chat_template(tools=self.tools)
            if not _GENERATION.search(template):
                return None
            render: Any = render_jinja_template  # its annotations are not what it returns
            texts, spans = render(
                conversations=[list(messages)],
                tools=self.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise self._failed(messages, error) from error
        return texts[0], spans[0]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered ``texts``, in which the template has written all special tokens."""
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def _failed(self, messages: Sequence[Message], error: Exception) -> TemplateError:
        roles = ", ".join(str(message.get("role")) for message in messages)
        return TemplateError(
            self.place,
            f"the chat template cannot render it: {type(error).__name__}: {error}",
            f"its roles are: {roles}; correct them, or choose a model whose template takes them",
        )


@lru_cache(maxsize=4)
def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that are no text: one of them ends a turn. Read once, some tokenizers have thousands."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(special if tokenizer.eos_token_id is None else special | {tokenizer.eos_token_id})
