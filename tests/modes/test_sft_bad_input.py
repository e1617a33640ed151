"""Every kind of bad input: one clear error with its place, or a counter, through the loader and through the mode."""

from __future__ import annotations

import json
import shutil

import pytest

from asyncrl.config.context import Place, RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config, DataConfig
from asyncrl.data.chat import encode
from asyncrl.data.errors import DataError
from asyncrl.data.opening import open_data
from asyncrl.data.tokenizer import build_tokenizer
from asyncrl.report.metrics import read_metrics
from tests.data.files import talk
from tests.modes.test_sft import digests, folders, run, settings
from tests.modes.test_sft_data import position, watched

IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, talk()[1]]
# reason -> (the line, what the error says).
BAD = {
    "json": ('{"messages": [', "is not JSON"),
    "column": (json.dumps({"text": "another schema"}), "has no column messages, which form messages needs"),
    "image": (json.dumps({"messages": IMAGE}), "has a part of type image_url; only text can be learnt"),
    "roles": (json.dumps({"messages": talk()[::-1]}), "message 0 is of role assistant at the beginning"),
    "template": (json.dumps({"messages": [{"role": "developer", "content": "x"}, *talk()]}), "cannot render it"),
    "nothing_to_learn": (json.dumps({"messages": talk()[:1]}), "has no token to learn"),
}
GOOD = [json.dumps({"messages": talk(str(k), f"what is {k}+0")}) for k in range(6)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["what is 1+1", "what is 2+2"])


def data_of(folder, lines, on_error="stop"):
    path = folder / "a.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    cfg = Config(mode="sft")
    cfg.sft.data, cfg.sft.on_error = [DataConfig(path=str(path))], on_error
    return cfg, lambda: open_data(cfg, RunContext(Place(), folder))[0]


@pytest.mark.parametrize("reason", BAD)
def test_each_stops_with_its_line_and_a_remedy_or_is_counted(tmp_path, tokenizer, reason):
    line, message = BAD[reason]
    lines = [*GOOD[:3], line, *GOOD[3:]]
    cfg, opened = data_of(tmp_path, lines)
    with pytest.raises(DataError) as bad:
        opened().take(7, lambda example: encode(tokenizer, example, cfg.sft))
    assert bad.value.reason == reason and str(bad.value).startswith(f"{tmp_path}/a.jsonl line 4: ")
    assert message in str(bad.value) and "\n    -> " in str(bad.value)
    cfg, opened = data_of(tmp_path, lines, "skip")
    mixture = opened()
    taken = mixture.take(12, lambda example: (encode(tokenizer, example, cfg.sft), example.place)[1])
    assert sorted(set(taken)) == sorted(f"{tmp_path}/a.jsonl line {n}" for n in (1, 2, 3, 5, 6, 7))
    assert mixture.drawn[0] == mixture.given[0] + mixture.skipped[reason], "nothing is lost silently"
    assert set(mixture.metrics()) == {"data/skipped", f"data/skipped/{reason}"}


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_ends_the_run_whatever_is_skipped(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(RunFailed, match=r"a\.jsonl: is empty: it holds no record"):
        run(settings(data=[DataConfig(path=str(path))], on_error="skip"), tmp_path / "run")


def test_the_mode_counts_each_reason_and_learns_the_others(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*GOOD, *(line for line, _ in BAD.values())]) + "\n")
    cfg = settings(data=[DataConfig(path=str(path))], on_error="skip")
    cfg.sft.batch_size, cfg.trainer.steps = 6, 2
    done = run(cfg, tmp_path / "run")
    last = read_metrics(done / "metrics.jsonl")[-1]
    drawn = position(done, 2)
    assert drawn["drawn"][0] == 12 + last["data/skipped"] and drawn["given"] == [12]
    found = {key.removeprefix("data/skipped/"): value for key, value in last.items() if key.startswith("data/skipped/")}
    assert found == drawn["skipped"] and set(found) == set(BAD) and sum(found.values()) == last["data/skipped"]


@pytest.mark.parametrize("saved", [1, 2, 3])
def test_resumed_between_examples_that_were_split(tmp_path, monkeypatch, saved):
    """An example is several pieces, more in one step than in another; positions count examples."""
    path = tmp_path / "a.jsonl"
    records = [{"messages": talk("4" * (9 * k + 1), "what is 2+2")} for k in range(7)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def settings_of():
        cfg = settings(data=[DataConfig(path=str(path))], max_length=16, too_long="split", batch_size=3)
        cfg.trainer.steps, cfg.checkpoint.every, cfg.checkpoint.keep = 4, 1, 9
        return cfg

    steps = watched(monkeypatch)
    whole = run(settings_of(), tmp_path / "whole")
    assert len({record["train/samples"] for record in read_metrics(whole / "metrics.jsonl")[1:]}) > 1
    assert position(whole, 4)["given"] == [12]
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for name in folders(part):
        if int(name[5:]) > saved:
            shutil.rmtree(part / "checkpoints" / name)
    cfg = settings_of()
    cfg.resume = str(part)
    before = len(steps)
    run(cfg, part)
    assert steps[before:] == steps[saved:before]
    for kind in ("hf", "state"):
        assert digests(part / "checkpoints/step_000004" / kind) == digests(whole / "checkpoints/step_000004" / kind)


def test_a_step_whose_examples_are_all_too_long_learns_nothing_and_counts_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": talk("4" * 60, "what is 2+2")}) + "\n" for _ in range(4)))
    cfg = settings(data=[DataConfig(path=str(path))], max_length=16, too_long="skip", batch_size=4)
    cfg.trainer.steps = 2
    done = run(cfg, tmp_path / "run")
    steps = read_metrics(done / "metrics.jsonl")[-2:]
    assert [step["sample/skipped"] for step in steps] == [4, 4] and steps[-1]["tokens/trained"] == 0
    assert folders(done) == ["step_000002"]
