"""The checkpoint that ships with the package: an honest start for reinforcement learning, small, and rebuildable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.load import REPOSITORY, register_schema, resolve
from asyncrl.data.opening import env_corpus
from asyncrl.envs import load_env
from asyncrl.training.new_model import write_new_model

FOLDER = REPOSITORY / "asyncrl" / "assets" / "qwen3-tiny"


def experiment(name):
    register_schema()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return resolve(compose("config", overrides=[f"+experiment={name}"]))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


def test_it_is_small(model):
    assert sum(p.numel() for p in model.parameters()) < 3e6
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8e6
    assert json.loads((FOLDER / "config.json").read_text())["dtype"] == "float32", "an update of bf16 would be lost"


def test_warm_start_and_reinforcement_share_the_task_but_no_item():
    sft, grpo = experiment("sft").env, experiment("grpo").env
    assert (sft.task, sft.task_config, sft.heldout_seed, sft.heldout_size) == (
        grpo.task,
        grpo.task_config,
        grpo.heldout_seed,
        grpo.heldout_size,
    )
    assert grpo.train_seed + grpo.size <= sft.train_seed or sft.train_seed + sft.size <= grpo.train_seed
    assert Path(experiment("grpo").model.path) == FOLDER


def test_its_tokenizer_and_shape_are_what_the_experiment_makes(tmp_path):
    cfg = experiment("sft")
    write_new_model(cfg, env_corpus(cfg, "train"), tmp_path / "new")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "new" / name).read_bytes() == (FOLDER / name).read_bytes(), name
    made, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "new", FOLDER))
    made.pop("transformers_version"), shipped.pop("transformers_version")
    assert made == shipped


def test_held_out_accuracy_leaves_something_to_learn(model, tokenizer):
    """Greedy, on the held-out items of +experiment=grpo, with the task's own scorer."""
    env = load_env(experiment("grpo").env, "heldout")
    items = [env.item(i) for i in range(len(env))]
    ids = tokenizer.apply_chat_template(
        [item.messages for item in items], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert ids.shape == (256, 9), "prompts of one length need no padding"
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)
    right = sum(env.score(text, item.entry) == 1.0 for text, item in zip(texts, items, strict=True))
    assert 0.3 < right / len(items) <= 0.45
