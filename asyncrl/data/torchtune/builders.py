"""torchtune's dataset builders: what a record of each is, and what is learnt of it unless the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Builder:
    """``columns``: of a form of asyncrl.config.forms -> the name that torchtune gives the column in column_map.

    file: torchtune's name of a column -> the name in the file, where that is another one by default.
    loading: arguments of datasets.load_dataset that the builder fixes.
    wraps: the text that it puts around what the user says.
    """

    form: str
    columns: Mapping[str, str]
    source: str = ""
    train_on: str = "assistant"
    file: Mapping[str, str] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)
    wraps: str = ""


_ALPACA = {"instruction": "instruction", "input": "input", "output": "output"}
_ASKED = {"instruction": "input", "output": "output"}
_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_BELOW = "Below is an instruction that describes a task ... ### Response:"

BUILDERS: dict[str, Builder] = {
    "alpaca_dataset": Builder("alpaca", _ALPACA, "tatsu-lab/alpaca", "all", wraps=_BELOW),
    "alpaca_cleaned_dataset": Builder("alpaca", _ALPACA, "yahma/alpaca-cleaned", "all", wraps=_BELOW),
    "instruct_dataset": Builder("alpaca", _ASKED),
    "samsum_dataset": Builder("alpaca", _ASKED, "Samsung/samsum", file={"input": "dialogue", "output": "summary"}),
    "grammar_dataset": Builder("alpaca", _ASKED, "liweili/c4_200m"),
    "slimorca_dataset": Builder("sharegpt", {"conversations": "conversations"}, "Open-Orca/SlimOrca-Dedup"),
    "text_completion_dataset": Builder("text", {"text": "column"}, file={"column": "text"}),
    "cnn_dailymail_articles_dataset": Builder(
        "text", {"text": "column"}, "ccdv/cnn_dailymail", file={"column": "article"}, loading={"name": "3.0.0"}
    ),
    "wikitext_dataset": Builder(
        "text",
        {"text": "column"},
        "EleutherAI/wikitext_document_level",
        file={"column": "page"},
        loading={"name": "wikitext-103-v1"},
    ),
    "preference_dataset": Builder("preference", _PAIR),
    "hh_rlhf_helpful_dataset": Builder("preference", _PAIR, "RLHFlow/HH-RLHF-Helpful-standard"),
    "stack_exchange_paired_dataset": Builder(
        "preference",
        {"prompt": "prompt", **_PAIR},
        "lvwerra/stack-exchange-paired",
        file={"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        loading={"data_dir": "data/rl"},
    ),
}
# chat_dataset, by its conversation_style; the column is conversation_column.
CHATS = {
    "openai": Builder("messages", {"messages": "conversation_column"}),
    "sharegpt": Builder("sharegpt", {"conversations": "conversation_column"}),
}


def builder_of(node: Mapping[str, Any]) -> Builder | None:
    """The builder that ``node._component_`` names; None for one that is not torchtune's, or not known."""
    package, _, name = str(node.get("_component_", "")).rpartition(".")
    if not package.startswith("torchtune.datasets"):
        return None
    return CHATS.get(str(node.get("conversation_style"))) if name == "chat_dataset" else BUILDERS.get(name)


def columns_of(node: Mapping[str, Any], builder: Builder) -> dict[str, str]:
    """Column of the form -> column of the file, where they differ."""
    stated = {**(node.get("column_map") or {})}
    for name in ("column", "conversation_column"):
        if node.get(name):
            stated[name] = node[name]
    found = {}
    for ours, theirs in builder.columns.items():
        # A column_map of the user's takes the place of the builder's own.
        named = stated.get(theirs) or (theirs if stated else builder.file.get(theirs, theirs))
        if named != ours:
            found[ours] = str(named)
    return found
