"""Which recipe a configuration is for, on how many ranks, and every file that is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asyncrl.data.from_torchtune import load, main
from asyncrl.data.torchtune.leaves import RecipeError
from asyncrl.data.torchtune.recipes import READ, launch_of
from tests.data.files import talk, write_lines
from tests.data.torchtune.test_reading import HERE, ROOT, made


@pytest.mark.parametrize("recipe", READ)
def test_recipes_and_ranks(recipe):
    config, text = load(HERE / "full_single.yaml", [])
    launch = launch_of(config, text, recipe)
    assert (launch.recipe, launch.ranks) == (recipe, 1 if "single" in recipe else 2)
    assert launch_of(config, text, recipe, 3).ranks == 3
    assert launch_of(config, f"# tune run --nnodes 1 --nproc_per_node 4 {recipe} --config x", "").recipe == recipe
    assert launch_of(config, "").recipe == "full_finetune_distributed"


def test_ranks_of_the_comments_and_batches():
    for ranks, batch in ((0, 2 * 4 * 8), (2, 2 * 2 * 8)):
        reading, launch = made("lora_distributed", "dataset.packed=False", ranks=ranks)
        assert (launch.ranks, reading.keys["sft.batch_size"]) == (ranks or 4, batch)
    with pytest.raises(RecipeError, match="tensor_parallel_dim=2 does not divide 3 ranks"):
        made("dpo_distributed", ranks=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("- 1", "is a list"),
        ("just words", "has no model and no dataset"),
        ("", "has no model and no dataset"),
        ("model: {hidden: 3}\ndataset: {a: 1}", "has no model._component_"),
        ("a: ${b}", "cannot be resolved"),
        ("ppo_epochs: 1", "mode=grpo"),
        ("kd_loss: {_component_: x}", "distillation of logits is not here"),
        ("quantizer: {_component_: a.B}\ndataset: {a: 1}", "quantisation-aware training is not here"),
        ("quantizer: {_component_: a.B}", "quantise a checkpoint"),
        ("max_new_tokens: 3", "vLLM"),
        ("tasks: [x]", "lm-evaluation-harness"),
        ("# tune run early_exit_finetune_distributed --config x\nseed: 1", "is not a recipe that is known"),
        ("model: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_11b}\ndataset: {a: 1}", "reads images"),
        ("model: {_component_: a.b}\ndataset: {_component_: torchtune.datasets.instruct_dataset}", "has no source"),
        ("model: {_component_: a.b}\ndataset: words", "dataset is words"),
        ("model: {_component_: a.b}\ndataset: {_component_: x}\nbatch_size: two", "batch_size is two, not a number"),
        ("model: {_component_: a.b}\ndataset: {_component_: x}\nbatch_size: 0", "batch_size is 0"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_said_with_a_remedy(tmp_path, capsys, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert main([str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"from_torchtune: {path}: ") and message in said and "\n    -> " in said


def test_a_file_that_is_not_there_or_not_text(tmp_path, capsys):
    assert main([str(tmp_path / "a.yaml")]) == 2
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert main([str(tmp_path / "a.yaml")]) == 2
    assert "No such file" in (said := capsys.readouterr().err) and "is not text" in said


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    script = (
        "import sys; from asyncrl.data.from_torchtune import main\n"
        f"assert main([{str(HERE / 'lora_distributed.yaml')!r}]) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    write_lines(tmp_path / "talks.jsonl", [{"turns": talk()}])
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
