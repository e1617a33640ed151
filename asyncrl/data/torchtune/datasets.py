"""``dataset`` and ``dataset_val``: sources of examples, and which of their tokens are learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.data.torchtune.builders import Builder, builder_of, columns_of
from asyncrl.data.torchtune.leaves import UNKNOWN, Reading, RecipeError, component, plain
from asyncrl.data.torchtune.sources import count, places_of

STRATEGIES = {"train_on_all": "all", "train_on_assistant": "assistant", "train_on_last": "last"}
# Arguments of builders; any other goes to datasets.load_dataset.
_OWN = {
    "_component_", "source", "column", "column_map", "conversation_column", "conversation_style", "train_on_input",
    "masking_strategy", "new_system_prompt", "packed", "filter_fn", "add_eos", "split_across_pack", "max_seq_len",
    "prompt_template", "template", "subset", "chat_format", "image_dir", "image_tag", "max_packs",
}  # fmt: skip
_MASKS = ("train_on_input", "masking_strategy")
_CONVERT = "a function for sft.data[].convert makes the messages (docs/torchtune.md has one)"
# Null means the same on both sides; anything else has no equivalent, but what is said here.
_UNLESS_NULL = {
    "new_system_prompt": f"no key puts a system message before each conversation: {_CONVERT}",
    "prompt_template": f"the tokenizer's chat template alone is applied: {_CONVERT}",
    "template": f"the tokenizer's chat template alone is applied: {_CONVERT}",
    "chat_format": "the tokenizer's chat template is applied instead",
    "filter_fn": "filter the data before it is saved: .filter(...) before .save_to_disk(...)",
    "image_dir": "only text is learnt",
    "image_tag": "only text is learnt",
    "max_packs": "all of the data is learnt; trainer.steps ends it earlier",
}


@dataclass(frozen=True)
class Data:
    """What is learnt. ``samples``: conversations an epoch, None unless they could be counted."""

    samples: int | None
    packed: bool
    max_length: int  # tokens, 0 unless a dataset says it (older releases)


def read_data(reading: Reading, samples: int) -> Data:
    """Fills ``sft.data`` and ``sft.train_on``. ``samples``: how many there are, if the user knows it; or 0."""
    nodes = _nodes(reading, "dataset")
    sources, counts = _sources(reading, nodes, "sft.data")
    if len(sources) > 1:
        for source, number in zip(sources, counts, strict=True):
            source["weight"] = UNKNOWN if number is None else number
        _explain_weights(reading, counts)
    reading.keys["sft.data"] = sources
    _train_on(reading, nodes)
    known = [number for number in counts if number is not None]
    total = samples or (sum(known) if len(known) == len(counts) else None)
    length = max(reading.number(f"{name}.max_seq_len", 0) for name in nodes)
    packed = [bool(node.get("packed")) for node in nodes.values()]
    for name, node in nodes.items():
        _rest(reading, name, node)
    return Data(total, any(packed), length)


def read_heldout(reading: Reading) -> None:
    """``dataset_val`` and how often it is evaluated."""
    every = reading.number("run_val_every_n_steps", 0)
    unused = "run_val_every_n_steps is null: nothing is evaluated"
    if every:
        nodes = _nodes(reading, "dataset_val")
        sources, _ = _sources(reading, nodes, "sft.heldout")
        reading.translate("run_val_every_n_steps", {"eval.every": every})
        reading.keys["sft.heldout"] = sources
        for name, node in nodes.items():
            for leaf in (f"{name}.{key}" for key in _MASKS):
                reading.also(leaf, "sft.train_on, which is that of the training data")
            _rest(reading, name, node)
        unused = "micro-batches are filled by trainer.token_budget"
    else:
        reading.meaningless("run_val_every_n_steps", unused)
        for leaf in reading.below("dataset_val"):
            reading.meaningless(leaf, unused)
    reading.meaningless("batch_size_val", unused)


def _nodes(reading: Reading, key: str) -> dict[str, Mapping[str, Any]]:
    """Name -> each dataset below ``key``."""
    found = reading.get(key)
    nodes = {f"{key}[{k}]": node for k, node in enumerate(found)} if isinstance(found, list) else {key: found}
    for name, node in nodes.items():
        columns = node.get("column_map") if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping) or not isinstance(columns, Mapping | None):
            what = f"{name} is {plain(node)}" if columns is None else f"{name}.column_map is {plain(columns)}"
            raise RecipeError(f"{what}\n    -> a group of keys, or a list of datasets")
    return nodes


def _sources(
    reading: Reading, nodes: Mapping[str, Mapping[str, Any]], key: str
) -> tuple[list[dict[str, Any]], list[int | None]]:
    """(entries of ``key``, the number of records of each)."""
    sources: list[dict[str, Any]] = []
    counts: list[int | None] = []
    for name, node in nodes.items():
        builder = builder_of(node)
        if builder is None:
            sources.append({"path": UNKNOWN})
            counts.append(None)
            reading.without(f"{name}._component_", f"not a builder that is known here: {_CONVERT}")
            reading.todo.append(
                f"name a file or folder of the records of {name} in {key}, and what makes messages of it"
            )
            continue
        source = node.get("source") or builder.source
        if not source:
            raise RecipeError(
                f"{name} has no source\n    -> {name}.source=json {name}.data_files=FILE for a local file"
            )
        for place in places_of(str(source), _loading(node, builder)):
            entry: dict[str, Any] = {"path": place.path, "form": builder.form}
            if columns := columns_of(node, builder):
                entry["columns"] = columns
            sources.append(entry)
            counts.append(count(place.path))
            if place.command and counts[-1] is None and place.command not in reading.todo:
                reading.todo.append(place.command)
        _explain(reading, key, name, node, builder)
    return sources, counts


def _loading(node: Mapping[str, Any], builder: Builder) -> dict[str, Any]:
    """Arguments of ``datasets.load_dataset``."""
    given = {key: value for key, value in node.items() if key not in _OWN}
    if node.get("subset"):
        given["name"] = node["subset"]
    return {**builder.loading, "split": "train", **given}


def _explain(reading: Reading, key: str, name: str, node: Mapping[str, Any], builder: Builder) -> None:
    """What became of the leaves that say where the records are and what they hold."""
    kind = component(node)
    reading.also(f"{name}._component_", f"form {builder.form} of {key}")
    if builder.wraps:
        reading.assumed.append(f"no text around the question, where {kind} writes {builder.wraps!r}: {_CONVERT}")
    columns = set(builder.columns.values())
    for leaf in reading.below(f"{name}.column_map"):
        known = leaf.removeprefix(f"{name}.column_map.") in columns or leaf == f"{name}.column_map"
        reading.also(leaf, f"columns of {key}") if known else reading.without(leaf, "a column that is not learnt")
    for leaf in ("column", "conversation_column", "conversation_style"):
        reading.also(f"{name}.{leaf}", f"form and columns of {key}")
    for argument in ("source", "subset", *(each for each in node if each not in _OWN)):
        for leaf in reading.below(f"{name}.{argument}"):
            reading.also(leaf, f"the path of {key}")


def _rest(reading: Reading, name: str, node: Mapping[str, Any]) -> None:
    """The leaves that say how records are prepared."""
    reading.also(f"{name}.max_seq_len", "sft.max_length")
    if f"{name}.packed" not in reading.told:
        reading.meaningless(f"{name}.packed", "every step is packed, when it is learnt")
    reading.meaningless(f"{name}.split_across_pack", "no document is cut to fill a pack")
    if node.get("add_eos", True):
        reading.meaningless(f"{name}.add_eos", "a text always ends with the eos token")
    else:
        reading.without(f"{name}.add_eos", "a text always ends with the eos token, which is learnt")
    for key, why in _UNLESS_NULL.items():
        for leaf in reading.below(f"{name}.{key}"):
            empty = reading.leaves[leaf] is None
            reading.meaningless(leaf, "null: as it is here") if empty else reading.without(leaf, why)


def _train_on(reading: Reading, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """``sft.train_on``: one for all of the data. The sides of a pair have their prompt in common, so it cancels."""
    wanted = {name: choice for name, node in nodes.items() if (choice := _choice(node))}
    chosen = next(iter(wanted.values()), "assistant")
    for name in nodes:
        leaves = [leaf for key in _MASKS if (leaf := f"{name}.{key}") in reading.leaves]
        for leaf in leaves:
            if name not in wanted:
                reading.meaningless(leaf, "of a pair the answers alone are learnt")
            elif wanted[name] == chosen:
                reading.translate(leaf, {"sft.train_on": chosen})
            else:
                reading.without(leaf, f"sft.train_on={chosen} holds for all sources; give messages weight 0 instead")
        if not leaves and name in wanted:
            lost = "" if wanted[name] == chosen else f"not {wanted[name]}, as one choice holds for all sources"
            reading.translate(f"{name}.masking_strategy", {"sft.train_on": chosen}, lost)


def _choice(node: Mapping[str, Any]) -> str:
    """What is learnt of ``node``; empty for pairs."""
    builder = builder_of(node)
    if builder is not None and builder.form == "preference":
        return ""
    if (stated := node.get("train_on_input")) is not None:
        return "all" if stated else "assistant"
    return STRATEGIES.get(str(node.get("masking_strategy")), builder.train_on if builder else "assistant")


def _explain_weights(reading: Reading, counts: list[int | None]) -> None:
    why = "weights are numbers of records: torchtune learns each record once an epoch"
    reading.assumed.append(why)
    if None in counts:
        reading.todo.append(f"give each source its weight in sft.data ({why}), or run this again when all are here")
