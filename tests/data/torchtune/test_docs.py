"""docs/torchtune.md names keys that exist, on both sides, and its function does what it says."""

from __future__ import annotations

import re

from asyncrl.config.schema import Config
from asyncrl.config.typed import known_keys
from asyncrl.data.from_torchtune import load
from asyncrl.data.torchtune.reading import read
from asyncrl.data.torchtune.recipes import READ, launch_of
from tests.data.files import corpus_of, talk, write_lines
from tests.data.torchtune.test_reading import HERE, RECIPES, ROOT

PAGE = (ROOT / "docs/torchtune.md").read_text()
ROWS = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]


def quoted(text):
    return re.findall(r"`([a-z0-9_.]+)(?:=[^`]*)?`", text)


def test_keys_of_the_table_exist_here():
    table = [row for row in ROWS if quoted(row[0]) and quoted(row[1])]
    assert len(table) > 15
    named = {key for _, ours in table for key in quoted(ours) if "." in key and key != "config.json"}
    assert named <= set(known_keys(Config)) and len(named) > 30


def test_keys_of_the_table_are_read():
    """Each is a leaf, or a group, of which the reader says something in one of the recipes."""
    said = set()
    more = [
        "dataset.masking_strategy=null", "ac_mode=null", "ac_option=null", "data_parallel_replicate_dim=1",
        "fsdp_cpu_offload=False",
    ]  # fmt: skip
    for name in RECIPES:
        config, text = load(HERE / f"{name}.yaml", more)
        told = read(config, launch_of(config, text)).finish()
        said |= {one.leaf for one in told if "does not know it" not in one.text}
    groups = {leaf[: match.start()] for leaf in said for match in re.finditer(r"\.", leaf)}
    assert {key for theirs, _ in ROWS for key in quoted(theirs)} <= said | groups


def test_recipes_and_the_function(tmp_path):
    assert all(f"`{recipe}`" in PAGE for recipe in READ)
    [code] = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    (tmp_path / "mine.py").write_text(code)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "system", "content": "x"}, *talk()]}])
    example = corpus_of(path, convert=f"{tmp_path}/mine.py:convert").example(0)
    assert example.messages == [{"role": "system", "content": "be brief"}, *talk()]
