"""The mesh of trainer ranks: what is refused before anything is imported or started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from asyncrl.config.context import Place
from asyncrl.config.parallel import MeshSizes, check_parallel, check_styles, mesh_sizes, tp_plan
from asyncrl.config.schema import Config, ParallelConfig

QWEN3 = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}


@pytest.mark.parametrize(
    ("chosen", "world", "sizes"),
    [
        ({}, 1, MeshSizes(1, 1, 1)),
        ({}, 8, MeshSizes(1, 8, 1)),
        ({"dp_shard": -1, "tp": 2}, 8, MeshSizes(1, 4, 2)),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 8, MeshSizes(2, 2, 2)),
        ({"dp_replicate": 8}, 8, MeshSizes(8, 1, 1)),
        ({"tp": 8}, 8, MeshSizes(1, 1, 8)),
    ],
)
def test_sizes_multiply_to_the_world(chosen, world, sizes):
    found = mesh_sizes(ParallelConfig(**chosen), world)
    assert found == sizes and found.data * found.tp == world


def problems(tmp_path, settings=QWEN3, world=8, local=8, shard=True, **parallel):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = Config(parallel=ParallelConfig(**parallel))
    config.model.path, config.trainer.shard = str(tmp_path), shard
    return list(check_parallel(config, Place(world_size=world, local_world_size=local)))


@pytest.mark.parametrize(
    ("parallel", "key", "says"),
    [
        ({"dp_shard": 3}, "parallel.dp_shard", "1 x 3 x 1 does not make the 8 ranks"),
        ({"dp_replicate": 3}, "parallel.dp_replicate", "3 x ? x 1 does not make the 8 ranks"),
        ({"dp_replicate": 16}, "parallel.dp_replicate", "does not make the 8 ranks"),
        ({"tp": 16, "settings": QWEN3 | {"num_key_value_heads": 16}}, "parallel.tp", "does not make the 8 ranks"),
        ({"tp": 8, "world": 16, "local": 4}, "parallel.tp", "on two machines"),
        ({"tp": 2, "shard": False}, "trainer.shard", "keeps everything on every rank"),
        ({"cp": 2}, "parallel.cp", "context parallelism is not part"),
        ({"pp": 2}, "parallel.pp", "pipeline parallelism is not part"),
        ({"ep": 2}, "parallel.ep", "expert parallelism is not part"),
        ({"tp": 2, "settings": QWEN3 | {"num_key_value_heads": 3}}, "parallel.tp", "num_key_value_heads=3"),
        ({"tp": 2, "settings": QWEN3 | {"num_attention_heads": 9}}, "parallel.tp", "num_attention_heads=9"),
        ({"tp": 2, "settings": QWEN3 | {"intermediate_size": 7}}, "parallel.tp", "intermediate_size=7"),
        ({"tp": 2, "settings": {"model_type": "gpt2"}}, "parallel.tp", "no plan for splitting gpt2"),
        (
            {"tp": 2, "settings": {"text_config": QWEN3 | {"intermediate_size": 7}}},
            "parallel.tp",
            "intermediate_size=7",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_its_key(tmp_path, parallel, key, says):
    (problem,) = problems(tmp_path, **parallel)
    assert problem.key == key and says in problem.message and problem.remedy


@pytest.mark.parametrize(
    ("kind", "meanings"),
    [
        ("qwen3_moe", {"a mixture of experts", "projections packed"}),
        ("deepseek_v3", {"a mixture of experts", "projections packed"}),
    ],
)
def test_styles_that_are_not_supported_are_refused_by_name(tmp_path, kind, meanings):
    found = problems(tmp_path, {"model_type": kind}, tp=2)
    assert all(problem.key == "parallel.tp" and problem.remedy == "parallel.tp=1" for problem in found)
    assert all(any(meaning in problem.message for problem in found) for meaning in meanings)


def test_a_style_of_a_later_transformers_is_refused():
    (problem,) = check_styles("new", {"layers.*.q": "colwise", "layers.*.k": "diagonal"})
    assert "new is split by 'diagonal': a style not known here" in problem.message


@pytest.mark.parametrize("parallel", [{}, {"tp": 8}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 8}])
def test_what_fits_is_accepted(tmp_path, parallel):
    assert problems(tmp_path, **parallel) == []


def test_a_new_model_is_checked_too():
    config = Config(parallel=ParallelConfig(tp=4))
    config.mode, config.model.path = "sft", ""
    found = list(check_parallel(config, Place(world_size=4, local_world_size=4)))
    assert [problem.message for problem in found] == ["4 does not divide model.new.kv_heads=2"]


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3"]
)
def test_plans_are_read_as_transformers_has_them(kind):
    from transformers import AutoConfig

    theirs = dict(AutoConfig.for_model(kind).base_model_tp_plan)
    theirs.pop("embed_tokens", None)  # added to a config whose embedding and head are tied
    assert tp_plan(kind) == theirs


def test_no_torch_is_imported():
    code = "import sys; from asyncrl.config.parallel import tp_plan; tp_plan('qwen3'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize(("name", "tp", "refused"), [("muon", 2, True), ("muon", 1, False), ("sgd", 2, False)])
def test_muon_is_not_built_for_split_layers(tmp_path, name, tp, refused):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    config = Config(parallel=ParallelConfig(tp=tp))
    config.model.path, config.optim.name = str(tmp_path), name
    found = [problem.key for problem in check_parallel(config, Place(world_size=8, local_world_size=8))]
    assert found == (["optim.name"] if refused else [])


@pytest.mark.parametrize(
    ("compute", "rank", "shard", "world", "refused"),
    [
        ("bfloat16", 0, False, 2, True),
        ("bfloat16", 0, True, 2, False),
        ("bfloat16", 0, False, 1, False),
        ("float32", 0, False, 2, False),
        ("bfloat16", 8, False, 2, False),  # frozen weights are held in the dtype of computation
    ],
)
def test_whole_copies_compute_in_the_dtype_of_their_masters(compute, rank, shard, world, refused):
    config = Config()
    config.model.compute_dtype, config.lora.rank, config.trainer.shard = compute, rank, shard
    found = [problem.key for problem in check_parallel(config, Place(world_size=world, local_world_size=world))]
    assert found == (["trainer.shard"] if refused else [])
