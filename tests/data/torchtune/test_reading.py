"""torchtune's configurations as command lines of ours: right values, accepted by our own check, nothing forgotten."""

from __future__ import annotations

import copy
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.config.check import check
from asyncrl.config.context import Place
from asyncrl.config.errors import ConfigError
from asyncrl.config.files import load_config
from asyncrl.config.load import check_overrides, config_groups, register_schema, resolve
from asyncrl.data.from_torchtune import load, main
from asyncrl.data.torchtune.leaves import RecipeError, leaves_of
from asyncrl.data.torchtune.printing import command, override, report
from asyncrl.data.torchtune.reading import read
from asyncrl.data.torchtune.recipes import launch_of
from tests.config.folders import make_model_folder, write_safetensors
from tests.data.files import talk, write_lines

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RECIPES = ("full_single", "lora_distributed", "dpo_distributed")


def made(name, *overrides, samples=0, mean=0, ranks=0):
    """(what was read, how it is launched) of one of the files beside this one."""
    config, text = load(HERE / f"{name}.yaml", list(overrides))
    launch = launch_of(config, text, ranks=ranks)
    return read(config, launch, samples, mean), launch


def told(reading):
    return {one.leaf: one.outcome for one in reading.finish()}


ADAMW = {"optim.name": "adamw", "optim.beta1": 0.9, "optim.eps": 1e-8}
EXPECTED = {
    # 1000 conversations, 2 a step, 3 epochs.
    "full_single": {
        "model.path": "model",
        "sft.data": [{"path": "data/yahma-alpaca-cleaned-train", "form": "alpaca"}],
        "sft.train_on": "all",
        "sft.max_length": 256,
        "sft.too_long": "cut",
        "trainer.token_budget": 512,
        "sft.batch_size": 2,
        "trainer.steps": 1500,
        "checkpoint.every": 500,
        "checkpoint.keep": 3,
        **ADAMW,
        "optim.lr": 2e-5,
        "optim.beta2": 0.999,
        "optim.weight_decay": 0.01,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "optim.clip_norm": math.inf,
        "optim.in_backward": True,
        "model.compute_dtype": "bfloat16",
        "trainer.master_dtype": "bfloat16",
        "trainer.activation_checkpointing": "full",
        "trainer.activation_offload": False,
        "trainer.compile": False,
        "run.root": "out/full",
        "seed": 0,
        "report.wandb.enabled": False,
    },
    # Packs of 512 tokens, 2 x 4 ranks x 8 a step, of conversations of 128 tokens: 256 of them. 1000 make 250 packs, 63
    # a rank, 31 micro-batches, 3 steps.
    "lora_distributed": {
        "model.path": "model",
        "checkpoint.keep": 3,
        "lora.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora.rank": 8,
        "lora.alpha": 16.0,
        "lora.dropout": 0.05,
        "lora.dora": True,
        "sft.data": [{"path": "talks.jsonl", "form": "messages", "columns": {"messages": "turns"}}],
        "sft.train_on": "assistant",
        "sft.max_length": 512,
        "sft.too_long": "cut",
        "trainer.token_budget": 1024,
        "sft.batch_size": 256,
        "trainer.steps": 3,
        "checkpoint.every": 20,
        **ADAMW,
        "optim.lr": 3e-4,
        "optim.beta2": 0.95,
        "optim.weight_decay": 0.01,
        "optim.schedule": "cosine",
        "optim.final_lr_share": 0.0,
        "optim.warmup_steps": 5,
        "optim.clip_norm": 1.0,
        "model.compute_dtype": "bfloat16",
        "trainer.activation_checkpointing": "none",
        "trainer.activation_offload": False,
        "trainer.cpu_offload": False,
        "trainer.compile": True,
        "parallel.dp_shard": -1,
        "eval.every": 10,
        "sft.heldout": [{"path": "unseen.jsonl", "form": "messages", "columns": {"messages": "turns"}}],
        "run.root": "out/lora",
        "seed": 7,
        "report.wandb.enabled": True,
        "report.wandb.project": "talks",
    },
    # 8 ranks, two a layer: 4 x 4 x 8 pairs a step; 1000 pairs make 7 steps, fewer than max_steps_per_epoch.
    "dpo_distributed": {
        "model.path": "model",
        "sft.data": [
            {
                "path": "data/lvwerra-stack-exchange-paired-train",
                "form": "preference",
                "columns": {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
            }
        ],
        "sft.loss": "dpo",
        "dpo.loss": "sigmoid",
        "dpo.beta": 0.05,
        "dpo.label_smoothing": 0.0,
        "sft.max_length": 128,
        "sft.too_long": "cut",
        "trainer.token_budget": 1024,
        "sft.batch_size": 128,
        "trainer.steps": 7,
        "checkpoint.every": 0,
        **ADAMW,
        "optim.lr": 2e-5,
        "optim.beta2": 0.999,
        "optim.weight_decay": 0.05,
        "optim.schedule": "cosine",
        "optim.final_lr_share": 0.0,
        "optim.warmup_steps": 20,
        "optim.clip_norm": math.inf,
        "model.compute_dtype": "bfloat16",
        "trainer.master_dtype": "bfloat16",
        "trainer.activation_checkpointing": "full",
        "trainer.activation_offload": True,
        "trainer.compile": False,
        "parallel.tp": 2,
        "run.root": "out/dpo",
        "seed": 0,
        "report.wandb.enabled": False,
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_value(name):
    reading, _ = made(name, samples=1000, mean=128)
    assert reading.keys == EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("full_single", {"optimizer._component_", "log_peak_memory_stats"}),
        ("lora_distributed", set()),
        ("dpo_distributed", {"log_peak_memory_stats"}),
    ],
)
def test_what_has_no_equivalent_is_listed(name, without):
    reading, launch = made(name)
    found = told(reading)
    assert list(found) == [leaf for leaf, _ in leaves_of(reading.config)]
    assert {leaf for leaf, outcome in found.items() if outcome == "none"} == without
    text = report(reading, reading.finish(), launch)
    assert all(f"  {leaf}: " in text for leaf in found), "each leaf is printed"


def test_a_key_that_nobody_knows_is_listed():
    reading, _ = made("full_single", "my_own.key=1", "optimizer.rho=0.9")
    assert {leaf for leaf, outcome in told(reading).items() if outcome == "none"} >= {"my_own.key", "optimizer.rho"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the model and the data that the recipes name."""
    monkeypatch.chdir(tmp_path)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    folder = make_model_folder(Path("model"), model_type="llama", **sizes)
    adapted = [f"self_attn.{name}_proj" for name in "qvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    write_safetensors(folder / "model.safetensors", names=tuple(f"model.layers.0.{n}.weight" for n in adapted))
    write_lines(Path("talks.jsonl"), [{"turns": talk()}] * 300)
    write_lines(Path("unseen.jsonl"), [{"turns": talk("5")}] * 3)
    return tmp_path


def composed(reading, launch):
    """The configuration that launch/train.py makes of the printed command, checked as on a machine with 8 GPUs."""
    words = shlex.split(command(reading, launch).replace("\\\n", " "))
    assert words[:1] == ["torchrun"] and "launch/train.py" in words
    overrides = words[words.index("launch/train.py") + 1 :]
    register_schema()
    check_overrides(overrides, config_groups(ROOT / "conf"))
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = resolve(compose("config", overrides=overrides))
    ranks = int(words[2]) if words[1] == "--nproc-per-node" else 1
    check(config, Place(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks), gpus=8)
    return config


def test_the_command_is_accepted_by_our_own_check(here):
    config = composed(*made("lora_distributed", mean=128))
    assert config.sft.data[0].columns == {"messages": "turns"} and config.sft.batch_size == 256
    assert config.trainer.steps == 1, "300 records were counted: 75 packs, 19 a rank, 9 micro-batches, 1 step"
    config = composed(*made("full_single", "dataset.source=json", "dataset.data_files=talks.jsonl"))
    assert config.optim.clip_norm == math.inf and config.trainer.steps == 3 * 150


PUBLIC = {"full_finetune_single_device": 1, "lora_finetune_distributed": 4, "full_dpo_distributed": 8}


@pytest.mark.parametrize("length", ["128", "null"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_each_public_recipe_is_accepted_by_our_own_check(here, name, length):
    """As launch/train.py checks it, with the data that the recipe names; also without a length, as most files are."""
    for folder in ("yahma-alpaca-cleaned-train", "lvwerra-stack-exchange-paired-train"):
        Path("data", folder).mkdir(parents=True)
    reading, launch = made(name, f"tokenizer.max_seq_len={length}", "dataset.packed=False", samples=1000)
    assert launch.ranks == PUBLIC[launch.recipe]
    config = composed(reading, launch)
    assert config.sft.max_length == (128 if length == "128" else 1024), "the model here has 1024 positions"
    assert (config.sft.loss == "dpo") == (name == "dpo_distributed") and config.lora.rank == 8 * (name[:4] == "lora")
    assert config.parallel.tp == (2 if name == "dpo_distributed" else 1)


def test_the_printed_command_runs(here, capsys):
    """As the reader prints it, dry; without torch, and without a GPU but for the key that wants one."""
    assert main([str(HERE / "lora_distributed.yaml"), "--mean-tokens", "128", "--ranks", "1", "compile=False"]) == 0
    printed = capsys.readouterr().out.partition("\n\n")[0]
    words = shlex.split(printed.replace("\\\n", " "))
    assert words[:2] == ["torchrun", "launch/train.py"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/train.py"), *words[2:], "run.dry=true"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [folder] = [path for path in (here / "out/lora").iterdir() if not path.is_symlink()]
    assert load_config(folder).lora.dora and load_config(folder).sft.batch_size == 64


def test_what_is_not_known_is_asked_for_by_its_name(here):
    """Never guessed: neither the number of steps without the data, nor conversations a step of packed data."""
    reading, launch = made("lora_distributed", "dataset.data_files=missing.jsonl")
    assert reading.keys["trainer.steps"] == reading.keys["sft.batch_size"] == "???"
    assert any("--mean-tokens" in line for line in reading.todo) and any("--samples" in line for line in reading.todo)
    with pytest.raises(ConfigError, match=r"trainer\.steps|sft\.batch_size"):
        composed(reading, launch)


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["C"]))
PLAIN = st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
NAMES = st.sampled_from(["path", "form", "a_b"])
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=5)


@given(value=VALUES)
@example(value="a\\'b")
@example(value=["ends\\", {"path": "it's \\\\' x"}])
@settings(max_examples=60, deadline=None)
def test_hydra_reads_what_is_printed(value):
    assert OverridesParser.create().parse_override(f"key={override(value)}").value() == value


LOADED = {name: load(HERE / f"{name}.yaml", []) for name in RECIPES}
GROUPS = st.sampled_from([[], {"a": 1}, ["x", {"y": None}]])
ODD = st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=3) | GROUPS


@given(name=st.sampled_from(RECIPES), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_configuration_is_read_whole_or_refused_with_a_remedy(name, data):
    """Leaves and groups replaced by anything: no traceback, nothing forgotten, nothing said twice."""
    config, text = copy.deepcopy(LOADED[name])
    for _ in range(data.draw(st.integers(1, 3))):
        node = config
        while True:
            key = data.draw(st.sampled_from(sorted(node)))
            if isinstance(node[key], dict) and node[key] and data.draw(st.booleans()):
                node = node[key]
                continue
            node[key] = copy.deepcopy(data.draw(ODD))
            break
    try:
        found = read(config, launch_of(config, text), samples=100).finish()
    except RecipeError as error:
        assert "\n    -> " in str(error)
        return
    assert [one.leaf for one in found] == [leaf for leaf, _ in leaves_of(config)]
    assert all(one.text for one in found)


@pytest.mark.parametrize(
    ("optimizer", "keys", "lost"),
    [
        ({"_component_": "torch.optim.SGD", "lr": 0.1}, {"optim.name": "sgd", "optim.momentum": 0.0}, []),
        ({"_component_": "torch.optim.Adam", "lr": 0.1}, {"optim.name": "adamw", "optim.weight_decay": 0.0}, []),
        (
            {"_component_": "torch.optim.Adam", "lr": 0.1, "weight_decay": 0.1},
            {"optim.weight_decay": 0.0},
            ["weight_decay"],
        ),
        ({"_component_": "torchao.optim.AdamW8bit", "lr": 0.1}, {"optim.weight_decay": 0.01}, ["_component_"]),
        ({"_component_": "my.Lion", "lr": 0.1, "amsgrad": False}, {"optim.name": "adamw"}, ["_component_"]),
        ({"_component_": "torch.optim.AdamW", "lr": 0.1, "amsgrad": True}, {}, ["amsgrad"]),
    ],
)
def test_optimizers(optimizer, keys, lost):
    config, text = load(HERE / "full_single.yaml", [])
    config["optimizer"] = optimizer
    reading = read(config, launch_of(config, text))
    assert {key: reading.keys.get(key) for key in keys} == keys
    outcomes = told(reading)
    assert [leaf for leaf in optimizer if outcomes[f"optimizer.{leaf}"] == "none"] == lost
    bits = {"adamw": "bfloat16"}.get(reading.keys["optim.name"])
    assert reading.keys.get("trainer.master_dtype") == bits, "2 bytes a weight are AdamW's only"


@pytest.mark.parametrize(
    ("overrides", "keys", "lost"),
    [
        (["dtype=fp32"], {"model.compute_dtype": "float32"}, []),
        (["dtype=fp16"], {"model.compute_dtype": "bfloat16"}, ["dtype"]),
        (["enable_fp8_training=True"], {"model.compute_dtype": "float8"}, []),
        (["tokenizer.max_seq_len=null"], {"sft.max_length": 16384, "sft.too_long": "error"}, []),
        (["enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2"],
         {"trainer.activation_checkpointing": "every_2"}, []),
        (["enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=op"],
         {"trainer.activation_checkpointing": "selective"}, []),
        (["compile={model: True, loss: False}"], {"trainer.compile": True}, []),
        (["clip_grad_norm=inf"], {"optim.clip_norm": math.inf}, []),
        (["shuffle=False", "device=xpu", "resume_from_checkpoint=True", "context_parallel_dim=2"],
         {}, ["shuffle", "device", "resume_from_checkpoint", "context_parallel_dim"]),
        (["profiler.enabled=True"], {}, [f"profiler.{k}" for k in ("_component_", "enabled", "output_dir", "cpu")]),
        (["model._component_=torchtune.models.llama3.qlora_llama3_8b", "model.lora_attn_modules=[q_proj]",
          "model.apply_lora_to_output=True"],
         {"lora.targets": ["q_proj"], "lora.rank": 8}, ["model._component_", "model.apply_lora_to_output"]),
        (["model._component_=torchtune.models.phi3.lora_phi3_mini", "model.lora_attn_modules=[q_proj, v_proj]",
          "model.apply_lora_to_mlp=True"],
         {"lora.targets": ["qkv_proj", "gate_up_proj", "down_proj"]}, []),
        (["checkpointer._component_=torchtune.training.FullModelMetaCheckpointer",
          "checkpointer.checkpoint_dir=/m/llama/original/", "checkpointer.checkpoint_files.filename_format=x-{}.pth"],
         {"model.path": "/m/llama"}, ["checkpointer._component_", "checkpointer.checkpoint_files.filename_format",
          "checkpointer.checkpoint_files.max_filename"]),
        (["loss._component_=torchtune.rlhf.loss.RSOLoss", "loss.gamma=0.2"], {}, ["loss._component_", "loss.gamma"]),
    ],
)  # fmt: skip
def test_keys_of_other_configurations(overrides, keys, lost):
    reading, _ = made("full_single", *overrides)
    assert {key: reading.keys.get(key) for key in keys} == keys
    known = {"optimizer._component_", "log_peak_memory_stats"}
    assert {leaf for leaf, outcome in told(reading).items() if outcome == "none"} - known == set(lost)


def test_losses_of_pairs():
    change = ["loss._component_=torchtune.rlhf.loss.RSOLoss", "loss={_component_: x.RSOLoss, gamma: 0.2}"]
    reading, _ = made("dpo_distributed", change[1])
    assert (reading.keys["dpo.loss"], reading.keys["dpo.beta"]) == ("hinge", 0.2)
    reading, _ = made("dpo_distributed", "ref_checkpointer.checkpoint_dir=other")
    lost = [leaf for leaf, outcome in told(reading).items() if outcome == "none"]
    assert "ref_checkpointer.checkpoint_dir" in lost
    reading, _ = made("dpo_distributed", "tokenizer.max_seq_len=null")
    assert reading.keys["sft.max_length"] == 8192, "both sides of a pair fit in one micro-batch"
