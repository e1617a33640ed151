"""A small byte-level BPE tokenizer for one task, with a chat template.

The words with which all questions begin and end become one token each; everything between is one token a byte. So a
prompt costs little more than what varies in it, and letters and digits stay single tokens. Any text can be encoded.

    <|user|> [Spell this word backward (example: sun -> nus): ] w o r d s <|end|> <|assistant|> s d r o w <|end|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
OPENINGS = [f"<|{role}|>" for role in ROLES]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LONGEST_PIECE = 256  # bytes of a fixed beginning or end that become one token
_SHORTEST_PIECE = 4


def fixed_pieces(texts: Sequence[str]) -> list[str]:
    """What all ``texts`` begin with and what they all end with, longest first."""
    beginning = _common_beginning(texts)
    ending = _common_beginning([text[len(beginning) :][::-1] for text in texts])[::-1]
    pieces = [beginning[:LONGEST_PIECE], ending[-LONGEST_PIECE:]]
    return sorted((piece for piece in pieces if len(piece) >= _SHORTEST_PIECE), key=len, reverse=True)


def _common_beginning(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    equal = (a == b for a, b in zip(first, last, strict=False))
    return first[: next((i for i, same in enumerate(equal) if not same), min(len(first), len(last)))]


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for questions like ``texts`` (two or more), the same whenever it is built from the same ones.

    ``<|end|>`` ends every turn and is the eos token.
    """
    pieces = fixed_pieces(texts)
    tokenizer = Tokenizer(models.BPE())
    either = "|".join([*map(re.escape, pieces), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(either), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(OPENINGS) + 2 + sum(len(piece.encode()) for piece in pieces),
        special_tokens=[PAD, END, *OPENINGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Only the pieces are merged: pairs of letters that are common in the questions stay apart.
    tokenizer.train_from_iterator(pieces * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=OPENINGS,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
