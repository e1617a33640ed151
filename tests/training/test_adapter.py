"""Adapters on disk: PEFT's format in and out, checkpoints of adapters alone, merging."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config.lora import read_adapter_config
from asyncrl.training import merge as merging
from asyncrl.training.adapter import shortest
from asyncrl.training.errors import CheckpointError, ModelError
from asyncrl.training.fingerprint import fingerprint
from asyncrl.training.lora import linear_layers
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy, prepare
from asyncrl.training.packing import pack
from asyncrl.training.step import Trainer
from tests.training.in_backward_cases import different, everything, run
from tests.training.memory import Memory
from tests.training.test_lora import KINDS
from tests.training.tiny import make_samples, tiny_folder, tiny_lm, tiny_run

BATCH = pack(make_samples(), 0, torch.device("cpu"))


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def build(path, lora, dtype="float32", **sections):
    torch.set_num_threads(1)  # as build_trainer does
    given = {"optim": {"lr": 1e-2}, "trainer": {"steps": 9}, "report": {"noise_floor_every": 0}} | sections
    cfg = tiny_run(str(path), dtype, lora=lora, **given)
    return Trainer(cfg, load_policy(path, getattr(torch, dtype)), open_mesh(0, 1))


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    """kind -> (trainer after three steps, its checkpoint)"""
    root, found = tmp_path_factory.mktemp("saved"), {}
    for kind, lora in KINDS.items():
        t = build(path, lora)
        run(t, 0, 3)
        found[kind] = t, t.save(root / kind)
    return found


def logp(policy):
    with torch.no_grad():
        return policy(BATCH, 1.0)[0]


def by_peft(base: str, adapter: Path):
    """A reader of its own: PEFT's documented meaning of the two files, applied to a plain transformers model."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    lm = AutoModelForCausalLM.from_pretrained(base)
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    used = set()
    for name, module in lm.named_modules():
        if not any(name == t or name.endswith(f".{t}") for t in config["target_modules"]):
            continue
        keys = [f"base_model.model.{name}.lora_{k}" for k in ("A.weight", "B.weight", "magnitude_vector")]
        a, b = weights[keys[0]].double(), weights[keys[1]].double()
        new = module.weight.double() + scaling * b @ a
        if config["use_dora"]:
            new = weights[keys[2]].double()[:, None] * new / torch.linalg.vector_norm(new, dim=1, keepdim=True)
        module.weight.data = new.to(module.weight.dtype)
        used |= set(keys[: 3 if config["use_dora"] else 2])
    assert used == set(weights)
    return lm


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_means_in_peft_what_it_means_here(path, saved, kind):
    t, folder = saved[kind]
    lm = by_peft(path, folder / "adapter")
    want = logp(t.policy)
    assert (logp(prepare(lm, torch.float32)) - want).norm() < 1e-6 * want.norm()
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    names = {"down_proj", "q_proj"} | (
        {"gate_proj", "k_proj", "o_proj", "up_proj", "v_proj"} if kind != "some" else set()
    )
    assert config["peft_type"] == "LORA" and set(config["target_modules"]) == names and config["bias"] == "none"
    assert config["base_model_name_or_path"] == path and config["use_dora"] == (kind == "dora")
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()["base_fingerprint"] == fingerprint(Path(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_continues_from_a_peft_folder(path, saved, kind):
    t, folder = saved[kind]
    went_on = build(path, {"rank": 0}, model={"adapter": str(folder / "adapter")})
    assert torch.equal(logp(went_on.policy), logp(t.policy))
    assert went_on.version == 0 and not went_on.optimizer.state
    run(went_on, 0, 1)
    assert not torch.equal(logp(went_on.policy), logp(t.policy))


def test_a_folder_by_another_program_has_no_fingerprint_and_is_taken(path, saved, tmp_path):
    _, folder = saved["lora"]
    shutil.copytree(folder / "adapter", tmp_path / "peft")
    save_file(
        load_file(folder / "adapter" / "adapter_model.safetensors"), tmp_path / "peft" / "adapter_model.safetensors"
    )
    t = build(path, {"rank": 0}, model={"adapter": str(tmp_path / "peft")})
    assert torch.equal(logp(t.policy), logp(saved["lora"][0].policy))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_save_load_continue_equals_uninterrupted_bit_for_bit(path, tmp_path, kind):
    lora = KINDS[kind]
    whole, first, second = (build(path, lora) for _ in range(3))
    run(whole, 0, 5), run(first, 0, 2)
    second.load(first.save(tmp_path))
    run(second, 2, 5)
    assert second.version == 5 and not different(everything(second), everything(whole))


def test_a_checkpoint_holds_adapters_alone(path, saved):
    t, folder = saved["dora"]
    manifest = json.loads((folder / "manifest.json").read_text())
    names = {key.partition("/")[2] for key in manifest["tensors"]}
    assert names == {n for n, _ in t.named_parameters_hf()} and not (folder / "hf").exists()
    trained = sum(p.numel() for p in t.parameters)
    size = (folder / "state" / "rank_00000.safetensors").stat().st_size
    assert 12 * trained < size < 12 * trained + 20_000  # weight and two moments in fp32, and a header
    assert manifest["adapter"] == {
        "base": fingerprint(Path(path)), "rank": 4, "alpha": 16.0, "rslora": False, "dora": True
    }  # fmt: skip


def changed(path, tmp_path) -> Path:
    """The base with one weight changed by one bit."""
    other = tmp_path / "other"
    shutil.copytree(path, other)
    weights = load_file(other / "model.safetensors")
    w = weights["model.layers.1.mlp.up_proj.weight"]
    w.view(torch.int32)[5, 7] ^= 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def test_another_base_is_refused(path, saved, tmp_path):
    _, folder = saved["lora"]
    other = changed(path, tmp_path)
    fresh = build(other, KINDS["lora"])
    before = everything(fresh)
    with pytest.raises(CheckpointError, match=r"adapters of other weights than those in .*other"):
        fresh.load(folder)
    assert fresh.version == 0 and not different(everything(fresh), before)
    with pytest.raises(ModelError, match=r"trained on other weights than .*other"):
        build(other, {"rank": 0}, model={"adapter": str(folder / "adapter")})
    with pytest.raises(ModelError, match="trained on other weights"):
        merging.merge(folder / "adapter", tmp_path / "out", other)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (KINDS["lora"] | {"alpha": 8.0}, "alpha=16.0, now 8.0"),
        (KINDS["rslora"] | {"alpha": 16.0}, "rslora=False, now True"),
        (KINDS["dora"], "dora=False, now True"),
        ({"rank": 2}, "rank=4, now 2"),
        ({"rank": 0}, "trained adapters, and this one trains all weights"),
        (KINDS["lora"] | {"targets": ["q_proj"]}, "another model"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(path, saved, lora, says):
    _, folder = saved["lora"]
    t = build(path, lora)
    with pytest.raises(CheckpointError, match=says):
        t.load(folder)
    assert t.version == 0


def test_a_checkpoint_of_all_weights_is_no_adapter(path, tmp_path):
    full = build(path, {"rank": 0})
    folder = full.save(tmp_path)
    assert json.loads((folder / "manifest.json").read_text())["adapter"] is None and (folder / "hf").is_dir()
    with pytest.raises(CheckpointError, match="trained all weights, and this one trains adapters"):
        build(path, KINDS["lora"]).load(folder)


def test_values_that_are_not_finite_are_not_exported(path, tmp_path):
    t = build(path, KINDS["lora"])
    t.policy.adapters.layers["model.layers.0.mlp.up_proj"].lora_B.weight.data[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=r"up_proj.lora_B.weight has values that are not finite"):
        t.save(tmp_path)
    assert not list(tmp_path.glob("step_*"))


@pytest.mark.parametrize("limit", [None, 5000], ids=["one file", "many files"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_folder_computes_what_base_and_adapter_do(path, saved, kind, limit, tmp_path, monkeypatch):
    t, folder = saved[kind]
    source = Path(path)
    if limit:
        monkeypatch.setattr("asyncrl.training.export.plan_files.__defaults__", (limit,))
        tiny_lm().save_pretrained(tmp_path / "sharded", max_shard_size="12KB")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source / name, tmp_path / "sharded")
        source = tmp_path / "sharded"
        assert len(list(source.glob("*.safetensors"))) > 2
    out = merging.merge(folder / "adapter", tmp_path / "out", source)
    assert (len(list(out.glob("*.safetensors"))) > 2) == bool(limit)
    want, got = logp(t.policy), logp(load_policy(out))
    assert (got - want).norm() < 1e-6 * want.norm() and (want - logp(load_policy(path))).norm() > 1e-3
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_the_merge_command(path, saved, tmp_path, capsys):
    _, folder = saved["lora"]
    out = tmp_path / "merged"
    assert merging.main([str(folder / "adapter"), str(out), "--dtype", "bfloat16"]) == 0
    lm = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert lm.dtype == torch.bfloat16 and capsys.readouterr().out.strip() == str(out)
    exact = by_peft(path, folder / "adapter").state_dict()
    for name, w in lm.state_dict().items():
        assert (w.float() - exact[name]).abs().max() <= exact[name].abs().max() * 2**-8
    for arguments, says in (
        ([str(folder / "adapter"), str(out)], "exists"),
        ([str(folder / "hf"), str(tmp_path / "b")], "no adapter"),
        (
            [str(folder / "adapter"), str(tmp_path / "b"), "--base", "/no/such"],
            "is not a folder here; give it with --base",
        ),
        ([str(folder / "adapter"), str(tmp_path / "b"), "--base", str(folder)], "has no config"),
    ):
        assert merging.main(arguments) == 2 and says in capsys.readouterr().err
        assert not (tmp_path / "b").exists()


def test_merging_holds_one_tensor_and_the_adapter_at_a_time(path, tmp_path):
    base = tmp_path / "deep"
    tiny_lm(num_hidden_layers=16).save_pretrained(base)
    shutil.copy(Path(path) / "tokenizer.json", base)
    folder = build(base, KINDS["some"]).save(tmp_path / "saved")
    memory = Memory()
    with memory:
        merging.merge(folder / "adapter", tmp_path / "out")
    sizes = [p.nbytes for p in tiny_lm(num_hidden_layers=16).parameters()]
    adapter = (folder / "adapter" / "adapter_model.safetensors").stat().st_size
    # Of one tensor: itself, its product, what is written, and the hash's numbers of 8 bytes.
    assert memory.peak < adapter + 12 * max(sizes) < sum(sizes) / 3


def test_a_base_of_another_shape_is_no_base(saved, tmp_path):
    _, folder = saved["lora"]
    tiny_lm(intermediate_size=40).save_pretrained(tmp_path / "narrow")
    shutil.copytree(folder / "adapter", tmp_path / "peft")
    save_file(
        load_file(folder / "adapter" / "adapter_model.safetensors"), tmp_path / "peft" / "adapter_model.safetensors"
    )
    shutil.copy(Path(saved["lora"][0].cfg.model.path) / "tokenizer.json", tmp_path / "narrow")
    with pytest.raises(ModelError, match=r"down_proj.* is \(4, 48\); the base's .* needs \(4, 40\)"):
        merging.merge(tmp_path / "peft", tmp_path / "out", tmp_path / "narrow")
    with pytest.raises(ModelError, match=r"gate_proj.lora_B.weight is \(48, 4\), the model needs \(40, 4\)"):
        build(tmp_path / "narrow", {"rank": 0}, model={"adapter": str(tmp_path / "peft")})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"r": "many"}, "cannot be read"),
        ({"lora_alpha": 0}, "must be positive"),
    ],
)
def test_what_peft_can_do_and_this_cannot_is_refused(saved, tmp_path, change, says):
    _, folder = saved["lora"]
    shutil.copytree(folder / "adapter", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=says):
        read_adapter_config(tmp_path / "peft")


def test_a_wrong_prefix_is_refused(saved, tmp_path):
    _, folder = saved["lora"]
    shutil.copytree(folder / "adapter", tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_model.safetensors"
    save_file({k.removeprefix("base_model.model."): v for k, v in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="is no weight of an adapter"):
        read_adapter_config(tmp_path / "peft")


def test_the_fingerprint_is_of_values_not_of_files(path, tmp_path):
    whole = fingerprint(Path(path))
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path / "cut", max_shard_size="12KB")
    assert fingerprint(tmp_path / "cut") == whole
    assert fingerprint(changed(path, tmp_path)) != whole
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    assert fingerprint(tmp_path / "half") != whole


def test_targets_are_described_by_the_shortest_names_that_mean_them():
    everyone = list(linear_layers(tiny_lm()))
    assert shortest(everyone, everyone) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip
    assert shortest(["model.layers.1.mlp.up_proj"], everyone) == ["model.layers.1.mlp.up_proj"]


def test_the_dtype_of_the_export(path, tmp_path):
    t = build(path, KINDS["lora"], checkpoint={"hf_dtype": "bfloat16"})
    run(t, 0, 1)
    stored = load_file(t.save(tmp_path) / "adapter" / "adapter_model.safetensors")
    held = {f"base_model.model.{n}": p.detach() for n, p in t.named_parameters_hf()}
    assert all(np.array_equal(held[k].bfloat16().float(), v.float()) for k, v in stored.items())
    assert {v.dtype for v in stored.values()} == {torch.bfloat16}
