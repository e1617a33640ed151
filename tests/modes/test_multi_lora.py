"""Jobs of a pack from the user's side: each one's folder is that of the run that mode=sft would have made."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.load import REPOSITORY
from asyncrl.config.schema import Config, DataConfig, LoraConfig
from asyncrl.lora.pack import PackTrainer
from asyncrl.lora.slot import Slot
from asyncrl.modes import multi_lora, sft
from asyncrl.report.metrics import read_lines
from asyncrl.report.summary import read_summary
from asyncrl.training.adapter import read_adapter
from asyncrl.training.model import load_policy
from asyncrl.training.optim import learning_rate
from asyncrl.training.sft import pack_conversations
from tests.data.files import talk, write_lines
from tests.modes.test_sft import ONE, settings
from tests.training.test_adapter import by_peft
from tests.training.test_sft import talks

BASE = str(REPOSITORY / "asyncrl" / "assets" / "qwen3-tiny")
KINDS = {
    "a": ({"rank": 4}, {"lr": 3e-3}, {"steps": 3}),
    "b": ({"rank": 2, "dropout": 0.2, "targets": ["q_proj", "down_proj"]}, {"lr": 1e-2}, {"steps": 4}),
    "c": ({"rank": 8, "alpha": 4.0, "rslora": True}, {"lr": 1e-3, "schedule": "cosine"}, {"steps": 2}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, digits in (("learnt", range(9)), ("held", (9, 12))):
        write_lines(folder / f"{name}.jsonl", [{"messages": talk(str(k), f"{k}+0")} for k in digits])
    return folder


def job(files: Path, kind: str, **keys) -> Config:
    lora, optim, trainer = KINDS[kind]
    learnt, held = ([DataConfig(path=str(files / f"{name}.jsonl"))] for name in ("learnt", "held"))
    cfg = settings(data=learnt, heldout=held, batch_size=4)
    cfg.model.path, cfg.lora = BASE, LoraConfig(**lora)
    cfg.model.compute_dtype = cfg.trainer.master_dtype = "float64"
    cfg.eval.every = cfg.checkpoint.every = 1
    cfg.checkpoint.keep = 9
    for section, values in (("optim", optim), ("trainer", trainer), *keys.items()):
        vars(getattr(cfg, section)).update(values)
    return cfg


def together(cfgs: dict[str, Config], folder: Path) -> list[str]:
    """Runs the jobs as one pack; the names of those that have finished."""
    runs, done = [], []
    for name, cfg in cfgs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        runs.append((cfg, RunContext(ONE, folder / name)))
    multi_lora.run(runs, folder, lambda context: done.append(context.run_dir.name))
    return done


def alone(cfg: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sft.run(cfg, RunContext(ONE, folder))
    return folder


@pytest.fixture(scope="module")
def solo(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("solo")
    return {kind: alone(job(files, kind), folder / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def pack(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pack")
    assert sorted(together({kind: job(files, kind) for kind in KINDS}, folder)) == ["a", "b", "c"]
    return folder


def last(folder: Path) -> Path:
    return sorted((folder / "checkpoints").glob("step_*"))[-1]


def close(found: Path, wanted: Path, limit: float = 1e-8) -> None:
    """The last checkpoints hold the same adapter and the same state."""
    found, wanted = last(found), last(wanted)
    assert found.name == wanted.name
    for file in ("adapter/adapter_model.safetensors", "state/rank_00000.safetensors"):
        a, b = load_file(found / file), load_file(wanted / file)
        assert a.keys() == b.keys()
        for name in b:
            assert np.linalg.norm(a[name] - b[name]) <= limit * np.linalg.norm(b[name]), name
    assert (found / "adapter/adapter_config.json").read_bytes() == (wanted / "adapter/adapter_config.json").read_bytes()


TIMES = ("time", "step_s", "_per_s", "seconds", "data/")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_leaves_what_it_leaves_alone(pack, solo, kind):
    close(pack / kind, solo[kind])
    records, wanted = (list(read_lines(folder / "metrics.jsonl")) for folder in (pack / kind, solo[kind]))
    assert len(records) == len(wanted)
    for found, want in zip(records, wanted, strict=True):
        for key in (key for key in want if not any(part in key for part in TIMES)):
            assert found[key] == pytest.approx(want[key], rel=1e-8), key
    summary = read_summary(pack / kind / "summary.json")
    assert (summary.mode, summary.ended, summary.steps) == ("sft", "finished", KINDS[kind][2]["steps"])
    names = {str(p.relative_to(pack / kind)) for p in (pack / kind).rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(solo[kind])) for p in solo[kind].rglob("*") if p.is_file()}


def test_the_table_has_the_best_first(pack):
    told = json.loads((pack / "adapters.json").read_text())
    rows = told["adapters"]
    assert told["makespan_s"] > 0 and {row["job"] for row in rows} == set(KINDS)
    losses = [row["best"] for row in rows]
    assert losses == sorted(losses) and len(set(losses)) == 3
    for row in rows:
        found = [r["eval/loss"] for r in read_lines(pack / row["job"] / "metrics.jsonl") if "eval/loss" in r]
        assert row["best"] == min(found) and row["eval/loss"] == found[-1] and row["ended"] == "finished"
        assert read_adapter(Path(row["adapter"])).settings.rank == KINDS[row["job"]][0]["rank"]


def test_a_pack_that_was_interrupted_goes_on_each_job_where_it_was(files, solo, tmp_path, monkeypatch):
    learn, calls = PackTrainer.learn, []

    def stop(self, batches):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt("a test")
        return learn(self, batches)

    monkeypatch.setattr(PackTrainer, "learn", stop)
    with pytest.raises(KeyboardInterrupt):
        together({kind: job(files, kind, packing={"slots": 2}) for kind in KINDS}, tmp_path)
    ended = {kind: read_summary(tmp_path / kind / "summary.json") for kind in KINDS}
    assert {(s.ended, s.reason) for s in ended.values()} == {("interrupted", "interrupted by a test")}
    assert [ended[kind].steps for kind in KINDS] == [2, 2, 0], "two slots: the third job had not begun"
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step_000002")  # a kill may come before a checkpoint
    cfgs = {kind: job(files, kind) for kind in KINDS}
    cfgs["a"].resume, cfgs["b"].resume = str(tmp_path / "a"), str(tmp_path / "b")
    assert sorted(together(cfgs, tmp_path)) == ["a", "b", "c"]
    for kind in KINDS:
        close(tmp_path / kind, solo[kind])


def test_a_run_alone_goes_on_from_a_pack_and_a_pack_from_it(files, solo, tmp_path):
    short = {kind: job(files, kind, trainer={"steps": 1}) for kind in ("a", "b")}
    for cfg in short.values():
        cfg.optim.warmup_steps = 0
    together(short, tmp_path)
    cfg = job(files, "a", trainer={"steps": 2})
    cfg.optim.warmup_steps, cfg.resume = 0, str(tmp_path / "a")
    alone(cfg, tmp_path / "a")
    cfg = job(files, "a")
    cfg.optim.warmup_steps, cfg.resume = 0, str(tmp_path / "a")
    other = job(files, "b")
    other.optim.warmup_steps, other.resume = 0, str(tmp_path / "b")
    together({"a": cfg, "b": other}, tmp_path)
    for kind in ("a", "b"):
        want = job(files, kind)
        want.optim.warmup_steps = 0
        close(tmp_path / kind, alone(want, tmp_path / f"alone {kind}"))
        assert read_summary(tmp_path / kind / "summary.json").attempts == (3 if kind == "a" else 2)


def test_a_job_whose_data_is_bad_fails_alone(files, solo, tmp_path):
    bad = job(files, "b")
    write_lines(tmp_path / "bad.jsonl", [{"messages": talk("1", "1+0")}] * 7 + [{"messages": [{"role": "user"}]}])
    bad.sft.data = [DataConfig(path=str(tmp_path / "bad.jsonl"))]
    missing = job(files, "c")
    missing.sft.data = [DataConfig(path=str(tmp_path / "none.jsonl"))]
    odd = job(files, "c", lora={"targets": ["c_attn"]})
    with pytest.raises(RunFailed, match="3 of 4 jobs failed: "):
        together({"bad": bad, "missing": missing, "odd": odd, "a": job(files, "a")}, tmp_path)
    close(tmp_path / "a", solo["a"])
    said = {name: read_summary(tmp_path / name / "summary.json") for name in ("bad", "missing", "odd", "a")}
    assert [said[name].ended for name in said] == ["failed", "failed", "failed", "finished"]
    assert "bad.jsonl line 8" in said["bad"].reason and said["bad"].steps == 1
    assert "none.jsonl" in said["missing"].reason
    assert "c_attn is no linear layer" in said["odd"].reason
    rows = json.loads((tmp_path / "adapters.json").read_text())["adapters"]
    assert {row["job"]: row["ended"] for row in rows} == {name: said[name].ended for name in said}


def test_bases_that_differ_are_packs_of_their_own(files, tmp_path):
    other = tmp_path / "model"
    shutil.copytree(BASE, other)
    cfgs = {kind: job(files, kind, trainer={"steps": 1}) for kind in ("a", "b")}
    cfgs["b"].model.path = str(other)
    assert sorted(together(cfgs, tmp_path / "runs")) == ["a", "b"]
    told = json.loads((last(tmp_path / "runs" / "b") / "adapter/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(other)


def spoiled(monkeypatch, times):
    """The second step of job b has an infinite learning rate, so many times: its weights are not finite after it."""
    left = [times]

    def rate(step, total, cfg):
        if step == 1 and cfg.lr == KINDS["b"][1]["lr"] and left[0]:
            left[0] -= 1
            return math.inf
        return learning_rate(step, total, cfg)

    monkeypatch.setattr("asyncrl.lora.pack.learning_rate", rate)


def test_a_job_that_is_not_finite_begins_again_at_its_last_checkpoint(files, solo, tmp_path, monkeypatch):
    spoiled(monkeypatch, 1)
    cfgs = {kind: job(files, kind, packing={"strikes": 2}, checkpoint={"every": 1}) for kind in ("a", "b")}
    assert sorted(together(cfgs, tmp_path)) == ["a", "b"]
    close(tmp_path / "a", solo["a"])
    summary = read_summary(tmp_path / "b" / "summary.json")
    assert (summary.ended, summary.attempts) == ("finished", 2)
    said = (tmp_path / "b" / "events.jsonl").read_text()
    assert "2 steps in a row were not finite (step 3: loss_not_finite): it begins again at" in said
    close(tmp_path / "b", solo["b"])


def test_a_job_that_comes_to_nothing_again_ends(files, solo, tmp_path, monkeypatch):
    spoiled(monkeypatch, 9)
    cfgs = {kind: job(files, kind, packing={"strikes": 2}, checkpoint={"every": 1}) for kind in ("a", "b")}
    with pytest.raises(RunFailed, match="1 of 2 jobs failed: b: 2 steps in a row were not finite"):
        together(cfgs, tmp_path)
    close(tmp_path / "a", solo["a"])
    summary = read_summary(tmp_path / "b" / "summary.json")
    assert summary.ended == "failed" and "loss_not_finite" in summary.reason and "optim.lr" in summary.reason
    assert last(tmp_path / "b").name == "step_000001", "what is not finite is not saved"


def test_the_exported_adapter_is_peft_s(files, tmp_path):
    """T7: PEFT's logits are the slot's; alpha over rank is no binary fraction, and the rank is not the largest."""
    cfgs = {"a": job(files, "a", lora={"rank": 3, "alpha": 4.0}), "c": job(files, "c")}
    for cfg in cfgs.values():
        cfg.model.compute_dtype = cfg.trainer.master_dtype = "float32"
    together(cfgs, tmp_path)
    row = pack_conversations(talks(), torch.device("cpu"))
    found = []
    for name in cfgs:
        folder = tmp_path / f"peft {name}"
        by_peft(BASE, last(tmp_path / name) / "adapter").save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(f"{BASE}/{file}", folder)
        pack = PackTrainer(cfgs[name])
        slot = Slot(pack, cfgs[name])
        slot.load_latest(tmp_path / name / "checkpoints")
        with torch.no_grad():
            want = slot.policy(row, 1.0)[0]
            assert (load_policy(folder)(row, 1.0)[0] - want).abs().max() < 1e-5
            assert (pack.policy(row, 1.0)[0] - want).abs().max() > 1e-3, "the base says something else"
        found.append(want)
    assert not torch.equal(*found)
