"""Adapters from the user's side: a file is learnt, the folder is used elsewhere, merged, and gone on from."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.errors import RunFailed
from asyncrl.config.load import REPOSITORY
from asyncrl.config.schema import DataConfig, LoraConfig
from asyncrl.report.metrics import read_lines
from asyncrl.training.errors import ModelError
from asyncrl.training.merge import main, merge
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy
from asyncrl.training.sft import SftTrainer, pack_conversations
from tests.data.files import talk, write_lines
from tests.modes.test_sft import digests, run, settings
from tests.modes.test_sft_evaluations import evaluations, generations
from tests.training.test_adapter import by_peft
from tests.training.test_sft import talks

BASE = str(REPOSITORY / "asyncrl" / "assets" / "qwen3-tiny")


def on_file(folder, **lora):
    for name, digits in (("learnt", range(9)), ("held", (9, 12))):
        write_lines(folder / f"{name}.jsonl", [{"messages": talk(str(k), f"{k}+0")} for k in digits])
    learnt, held = ([DataConfig(path=str(folder / f"{name}.jsonl"))] for name in ("learnt", "held"))
    cfg = settings(data=learnt, heldout=held, batch_size=9)
    cfg.model.path, cfg.lora = BASE, LoraConfig(**lora)
    cfg.trainer.steps, cfg.eval.generations, cfg.eval.max_tokens = 3, 2, 6
    return cfg


@pytest.fixture(scope="module", params=[False, True], ids=["lora", "dora"])
def trained(request, tmp_path_factory):
    """(folder with the files and the run, the adapter that was exported)"""
    folder = tmp_path_factory.mktemp("adapted")
    cfg = on_file(folder, rank=4, dora=request.param)
    cfg.sft.export = str(folder / "adapter")
    run(cfg, folder / "run")
    return folder, folder / "adapter"


def logps(policy):
    with torch.no_grad():
        return policy(pack_conversations(talks(), torch.device("cpu")), 1.0)[0]


def policy_of(folder, adapter):
    """The policy as a run that goes on from the adapter has it."""
    cfg = on_file(folder)
    cfg.model.adapter = str(adapter)
    return SftTrainer(cfg, load_policy(BASE), open_mesh(0, 1)).policy


def test_the_exported_folder_is_a_peft_adapter_that_means_what_was_trained(trained):
    folder, adapter = trained
    assert digests(adapter) == digests(folder / "run/checkpoints/step_000003/adapter")
    assert sorted(digests(adapter)) == ["adapter_config.json", "adapter_model.safetensors"]
    by_peft(BASE, adapter).save_pretrained(folder / "by_peft")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{BASE}/{file}", folder / "by_peft")
    want = logps(policy_of(folder, adapter))
    assert (logps(load_policy(folder / "by_peft")) - want).abs().max() < 1e-5
    assert (logps(load_policy(BASE)) - want).abs().max() > 1e-2


def test_the_merged_folder_loads_in_transformers_and_answers_as_the_run_did(trained):
    folder, adapter = trained
    merged = merge(adapter, folder / "merged")
    assert (logps(load_policy(merged)) - logps(policy_of(folder, adapter))).abs().max() < 1e-5
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    last = [row for row in generations(folder / "run") if row["step"] == 3]
    for row, question in zip(last, ("9+0", "12+0"), strict=True):
        asked = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = lm.generate(ids["input_ids"], do_sample=False, max_new_tokens=6)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == row["answer"]


def test_a_second_run_goes_on_from_the_adapter(trained, tmp_path):
    folder, adapter = trained
    cfg = on_file(folder)
    cfg.model.adapter = str(adapter)
    found = evaluations(run(cfg, tmp_path / "run"))
    before = evaluations(folder / "run")
    assert found[0]["eval/loss"] == pytest.approx(before[3]["eval/loss"], rel=1e-6) and before[3] != before[0]
    assert found[3]["eval/loss"] != found[0]["eval/loss"]


def test_a_resumed_run_ends_at_the_same_adapter(trained, tmp_path):
    folder, adapter = trained
    dora = json.loads((adapter / "adapter_config.json").read_text())["use_dora"]
    cfg = on_file(folder, rank=4, dora=dora)
    cfg.trainer.steps = 2
    part = run(cfg, tmp_path / "run")
    cfg = on_file(folder, rank=4, dora=dora)
    cfg.resume = str(part)
    run(cfg, part)
    assert digests(part / "checkpoints/step_000003/adapter") == digests(adapter)
    assert len([line for line in read_lines(part / "metrics.jsonl") if "step_s" in line]) == 3

    cfg = on_file(folder, rank=8, dora=dora)
    cfg.resume, cfg.trainer.steps = str(part), 4
    with pytest.raises(RunFailed, match="rank"):
        run(cfg, part)


def test_an_adapter_of_another_model_is_refused(trained, tmp_path):
    folder, adapter = trained
    other = tmp_path / "other"
    lm = AutoModelForCausalLM.from_pretrained(BASE)
    with torch.no_grad():
        lm.model.norm.weight += 1
    lm.save_pretrained(other)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(f"{BASE}/{file}", other)
    cfg = on_file(folder)
    cfg.model.adapter, cfg.model.path = str(adapter), str(other)
    with pytest.raises(ModelError, match="was trained on other weights"):
        run(cfg, tmp_path / "run")


def test_the_command_says_what_is_wrong(trained, tmp_path, capsys):
    folder, adapter = trained
    assert main([str(folder), str(tmp_path / "out")]) == 2
    assert "adapter_config.json cannot be read" in capsys.readouterr().err
    assert main([str(adapter), str(folder)]) == 2
    assert "exists; give a folder that does not" in capsys.readouterr().err
    assert main([str(adapter), str(tmp_path / "out"), "--base", str(tmp_path / "none")]) == 2
    assert "give it with --base" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
