"""The sft mode on files: from any form to a checkpoint, and on from any position as if nothing had been."""

from __future__ import annotations

import json
import shutil

import pytest

from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import DataConfig
from asyncrl.data.mixture import Mixture
from asyncrl.data.opening import open_data
from asyncrl.report.metrics import read_metrics
from asyncrl.report.summary import read_summary
from tests.data.files import talk, write_lines
from tests.modes.test_sft import ONE, digests, folders, run, settings

BAD = [{"role": "assistant", "content": "first"}]


def two_sources(folder, **keys):
    """18 conversations, of which one is bad, by weight 2, and 7 questions with answers by weight 1; 6 a step."""
    long, short = folder / "long.jsonl", folder / "short.csv"
    if not long.exists():
        records = [{"messages": talk(str(k), f"{k}+0")} for k in range(18)]
        records[11] = {"messages": BAD}
        write_lines(long, records)
        short.write_text("question,answer\n" + "".join(f"{k}*1,{k}\n" for k in range(7)))
    cfg = settings(data=[DataConfig(path=str(long), weight=2.0), DataConfig(path=str(short))], on_error="skip", **keys)
    cfg.sft.batch_size = 6
    cfg.checkpoint.every, cfg.checkpoint.keep = 1, 20
    return cfg


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """8 steps, saved after each: (the files' folder, the run, the places that each step learnt)."""
    folder = tmp_path_factory.mktemp("files")
    cfg = two_sources(folder)
    cfg.trainer.steps = 8
    with pytest.MonkeyPatch.context() as patch:
        places = watched(patch)
        return folder, run(cfg, folder / "run"), places


def watched(patch) -> list[list[str]]:
    """Fills with the places of each step's examples."""
    steps, take = [], Mixture.take

    def noted(self, count, encode):
        places = []
        made = take(self, count, lambda example: (encode(example), places.append(example.place))[0])
        steps.append(places)
        return made

    patch.setattr(Mixture, "take", noted)
    return steps


def position(run_dir, step):
    return json.loads((run_dir / f"checkpoints/step_{step:06d}/manifest.json").read_text())["data"]["position"]


def test_two_files_are_learnt_by_weight_and_what_is_bad_is_counted(whole):
    folder, run_dir, steps = whole
    assert [len(places) for places in steps] == [6] * 8
    assert [sum("long" in place for place in places) for places in steps] == [4] * 8
    assert not any(f"{folder}/long.jsonl line 12" in places for places in steps)
    records = read_metrics(run_dir / "metrics.jsonl")
    assert records[-1]["data/skipped"] == records[-1]["data/skipped/roles"] == position(run_dir, 8)["skipped"]["roles"]
    assert position(run_dir, 8)["given"] == [32, 16] and position(run_dir, 8)["drawn"][0] > 32
    events = (run_dir / "events.jsonl").read_text()
    assert "long.jsonl: 18 records, form messages" in events
    assert "short.csv: 7 records, form alpaca (instruction is the column question" in events


# 2 of 3 examples are of the first file: its epochs end within steps 5 and 9, those of the other within 4 and 7.
@pytest.mark.parametrize("saved", range(1, 8))
def test_row_8_resumed_anywhere_it_learns_what_would_have_come(whole, tmp_path, monkeypatch, saved):
    folder, run_dir, steps = whole
    part = tmp_path / "run"
    shutil.copytree(run_dir, part)
    for name in folders(part):
        if int(name[5:]) > saved:
            shutil.rmtree(part / "checkpoints" / name)
    cfg = two_sources(folder)
    cfg.trainer.steps, cfg.resume = 8, str(part)
    places = watched(monkeypatch)
    run(cfg, part)
    assert places == steps[saved:]
    assert position(part, 8) == position(run_dir, 8)
    for kind in ("hf", "state"):
        assert digests(part / "checkpoints/step_000008" / kind) == digests(run_dir / "checkpoints/step_000008" / kind)


def test_resumed_after_the_last_step_it_goes_on_when_there_are_more(whole, tmp_path, monkeypatch):
    folder, run_dir, _ = whole
    part = tmp_path / "run"
    shutil.copytree(run_dir, part)
    cfg = two_sources(folder)
    cfg.trainer.steps, cfg.resume = 9, str(part)
    places = watched(monkeypatch)
    run(cfg, part)
    assert len(places) == 1 and len(places[0]) == 6
    assert position(part, 9)["given"] == [36, 18]


def test_a_file_that_has_changed_is_no_continuation(whole, tmp_path):
    folder, run_dir, _ = whole
    part = tmp_path / "run"
    shutil.copytree(run_dir, part)
    for name in ("long.jsonl", "short.csv"):
        shutil.copy(folder / name, tmp_path / name)
    with open(tmp_path / "long.jsonl", "a") as file:
        file.write(json.dumps({"messages": talk()}) + "\n")
    cfg = two_sources(tmp_path)
    cfg.trainer.steps, cfg.resume = 9, str(part)
    with pytest.raises(RunFailed, match=r"it had sft\.data\[0\]\.content='sha256 \w+', now 'sha256"):
        run(cfg, part)


def test_a_broken_line_ends_the_run_with_its_file_and_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"messages": talk()}] * 3)
    with open(path, "a") as file:
        file.write("{\n")
    cfg = settings(data=[DataConfig(path=str(path))])
    with pytest.raises(RunFailed, match=r"a\.jsonl line 4: is not JSON"):
        run(cfg, tmp_path / "run")
    assert "a.jsonl line 4" in read_summary(tmp_path / "run/summary.json").reason


@pytest.mark.parametrize("every", [1, 20])
def test_what_was_learnt_before_a_bad_record_is_kept_and_the_run_goes_on_past_it(tmp_path, every):
    """Batches are read ahead, but a record is an error of the step that would have learnt it; it may be skipped."""
    records = [{"messages": talk(str(k), f"{k}+0")} for k in range(20)]
    path = write_lines(tmp_path / "a.jsonl", records)
    cfg = settings(data=[DataConfig(path=str(path))], batch_size=2)
    cfg.trainer.steps, cfg.checkpoint.every, cfg.checkpoint.keep = 5, every, 10
    broken = open_data(cfg, RunContext(ONE, tmp_path))[0].take(8, lambda example: example.place)[-1]
    records[int(broken.rpartition(" ")[2]) - 1] = {"messages": BAD}
    write_lines(path, records)
    with pytest.raises(RunFailed, match=f"{broken}: message 0 is of role assistant"):
        run(cfg, tmp_path / "run")
    assert folders(tmp_path / "run") == [f"step_{k:06d}" for k in ((1, 2, 3) if every == 1 else (3,))]
    assert position(tmp_path / "run", 3)["drawn"] == [6]
    cfg.sft.on_error, cfg.resume = "skip", str(tmp_path / "run")
    run(cfg, tmp_path / "run")
    assert position(tmp_path / "run", 5) == {"batches": 5, "drawn": [11], "given": [10], "skipped": {"roles": 1}}


def test_held_out_files_are_evaluated_and_never_learnt(tmp_path, monkeypatch):
    learnt = write_lines(tmp_path / "a.jsonl", [{"messages": talk(str(k), f"{k}+0")} for k in range(8)])
    unseen = write_lines(
        tmp_path / "b.jsonl", [{"messages": talk(str(k), f"{k}*1")} for k in range(3)] + [{"text": "a"}]
    )
    cfg = settings(data=[DataConfig(path=str(learnt))], heldout=[DataConfig(path=str(unseen))], on_error="skip")
    places = watched(monkeypatch)
    done = run(cfg, tmp_path / "run")
    assert not any("b.jsonl" in place for step in places for place in step)
    lines = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert [line["eval/items"] for line in lines if "eval/loss" in line] == [3, 3]
    assert "1 held-out examples are left out, cut or split (column 1)" in (done / "events.jsonl").read_text()
