"""Small tokenizers with chat templates in the manner of well-known families, and a reader of masks.

Byte-level BPE (Llama 3, Qwen, Phi) and BPE over words that begin with a mark (Mistral, Gemma), merges included, so that
a token can reach over a border where a template lets it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "the quick brown fox jumps over the lazy dog, and\nthe dog says: hello there!\n\n",
    "what is 2 + 2? it is 4.\n\nuser assistant system model tool think call response name arguments\n",
    "assistant\n", "user\n", "assistant\n\n", " answer", "\n\n\n", '{"name": "add", "arguments": {"a": 1}}',
]  # fmt: skip

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPANS = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}",
)
# Only what is said, the end of turn is the template's.
BARE_SPANS = SPANS.replace(
    "{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Earlier reasoning is dropped, as by the templates of reasoning models.
REASONING = CHATML.replace(
    "m['content'] + '<|im_end|>\n'",
    "(m['content'] if loop.last else m['content'].split('</think>')[-1]) + '<|im_end|>\n'",
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}"
    "{{ m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# The eos token comes once, after the last turn.
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# Roles in words, the eos token after each turn.
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


# Words with what precedes them, single digits, punctuation, line breaks together: as Qwen and Llama 3 cut a text.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(
    template: str | None, special: list[str], eos: str, bos: str | None = None, strips: bool = False, words: str = WORDS
) -> PreTrainedTokenizerFast:
    """As of GPT-2 and its successors. ``strips``: special tokens swallow the white space after them (Phi)."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    names = dict.fromkeys([*special, eos, *([bos] if bos else [])])
    tokens = [AddedToken(name, special=True, rstrip=strips) for name in names]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=tokens, show_progress=False
    )
    made.train_from_iterator(TEXT * 3, trainer)
    return wrap(made, template, eos, bos, [name for name in special if name != eos])


def marked_words(template: str, special: list[str], eos: str, bos: str) -> PreTrainedTokenizerFast:
    """As of SentencePiece: words begin with a mark, unknown characters are bytes, a text begins with ``bos``."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")  # SentencePiece keeps line breaks apart
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = ["<unk>", bos, eos, *special, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    made.train_from_iterator([text.replace(" ", "▁") for text in TEXT * 3], trainer)
    begin = [(bos, made.token_to_id(bos))]
    made.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=begin)
    return wrap(made, template, eos, bos, special, unk_token="<unk>")


def wrap(
    made: Tokenizer, template: str | None, eos: str, bos: str | None, special: list[str], **more: str
) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=eos,
        bos_token=bos,
        pad_token=eos,
        additional_special_tokens=special,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **more,
    )


HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
IM = ["<|im_start|>", "<|im_end|>"]
PHI_ROLES = ["<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]

# Name: (builder, what ends a turn).
FAMILIES: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], str]] = {
    "llama3": (lambda: byte_level(LLAMA3, HEADERS, "<|eot_id|>", "<|begin_of_text|>"), "<|eot_id|>"),
    "chatml": (lambda: byte_level(CHATML, IM, "<|im_end|>"), "<|im_end|>"),
    "spans": (lambda: byte_level(SPANS, IM, "<|im_end|>"), "<|im_end|>"),
    "bare spans": (lambda: byte_level(BARE_SPANS, IM, "<|im_end|>"), "<|im_end|>"),
    "tools": (lambda: byte_level(TOOLS, IM, "<|im_end|>"), "<|im_end|>"),
    "mistral": (lambda: marked_words(MISTRAL, ["[INST]", "[/INST]"], "</s>", "<s>"), "</s>"),
    "gemma": (lambda: marked_words(GEMMA, ["<start_of_turn>", "<end_of_turn>"], "<eos>", "<bos>"), "<end_of_turn>"),
    "phi": (lambda: byte_level(PHI, PHI_ROLES, "<|endoftext|>", strips=True), "<|end|>"),
    "zephyr": (lambda: byte_level(ZEPHYR, [], "</s>"), "</s>"),
}


def chatml(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    return byte_level(template, IM, "<|im_end|>")


def learnt(sample, tokenizer) -> list[str]:
    """The learnt tokens as text, one string for each run of them."""
    places = np.flatnonzero(sample.learnt)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []
    return [tokenizer.decode(sample.ids[run]) for run in runs]
