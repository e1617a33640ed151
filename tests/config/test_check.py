"""Relations between keys: each contradiction is refused with its key and a remedy that, once followed, is accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncrl.config import check as checks
from asyncrl.config import model_folder
from asyncrl.config.check import check, check_devices, is_loopback
from asyncrl.config.context import Place
from asyncrl.config.errors import ConfigError
from asyncrl.config.files import from_dict
from tests.config.folders import make_model_folder


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Builds a Config from dotted keys on top of one that is accepted, whatever is installed or being installed."""
    monkeypatch.setattr(model_folder, "REGISTRIES", {})
    monkeypatch.setattr(checks, "REPOSITORY", tmp_path)
    monkeypatch.setattr(checks, "entry_points", lambda group: [SimpleNamespace(name="asyncrl")])
    (tmp_path / "asyncrl" / "modes").mkdir(parents=True)
    (tmp_path / "asyncrl" / "modes" / "grpo.py").touch()
    folder = make_model_folder(tmp_path / "model")

    def build(**changes):
        values: dict = {}
        for key, value in ({"model.path": str(folder), "env.task": "spell_backward"} | changes).items():
            node = values
            *parents, leaf = key.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
        return from_dict(values)

    return build


def keys(config, gpus=0, **place):
    try:
        check(config, Place(**place), gpus)
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    return []


def test_the_base_is_accepted(make):
    assert keys(make()) == []


BF16 = {"trainer.master_dtype": "bfloat16", "model.compute_dtype": "bfloat16"}
CONTRADICTIONS = [
    ({"mode": "zo"}, "mode"),
    ({"batch.group_size": 1}, "batch.group_size"),
    ({"staleness.max_steps": 0, "staleness.window": 2}, "staleness.window"),
    ({"staleness.max_steps": 1, "batch.groups": 8, "staleness.window": 10}, "staleness.window"),
    ({"sampling.top_p": 0.9}, "sampling.top_p"),
    ({"sampling.top_k": 50}, "sampling.top_k"),
    ({"sampling.min_p": 0.1}, "sampling.min_p"),
    ({"sampling.repetition_penalty": 1.1}, "sampling.repetition_penalty"),
    ({"sampling.max_tokens": 128, "generator.max_model_len": 128}, "sampling.max_tokens"),
    ({"eval.max_tokens": 200, "generator.max_model_len": 128}, "eval.max_tokens"),
    ({"trainer.token_budget": 127, "generator.max_model_len": 128}, "trainer.token_budget"),
    ({"generator.max_model_len": 1025, "trainer.token_budget": 1100}, "generator.max_model_len"),
    ({"model.compute_dtype": "float64"}, "trainer.master_dtype"),
    ({"trainer.master_dtype": "bfloat16"}, "trainer.master_dtype"),
    (BF16 | {"optim.name": "sgd"}, "trainer.master_dtype"),
    (BF16 | {"optim.in_backward": True, "optim.accumulation": "adama"}, "trainer.master_dtype"),
    ({"optim.in_backward": True, "optim.clip": "global"}, "optim.clip"),
    ({"optim.accumulation": "adama"}, "optim.accumulation"),
    ({"optim.in_backward": True, "optim.accumulation": "momentum"}, "optim.accumulation"),
    ({"optim.in_backward": True, "optim.accumulation": "adama", "optim.name": "muon"}, "optim.accumulation"),
    ({"transport.host": "0.0.0.0"}, "transport.host"),
    ({"transport.host": "10.0.0.1"}, "transport.host"),
    ({"transport.keys_dir": "/no/such/folder"}, "transport.keys_dir"),
    ({"transport.heartbeat_s": 5.0, "transport.dead_after_s": 6.0}, "transport.dead_after_s"),
    ({"weights.chunk_bytes": 2, "weights.window_bytes": 1}, "weights.window_bytes"),
    ({"env.train_seed": 2, "env.heldout_seed": 2}, "env.heldout_seed"),
    ({"env.train_seed": 2, "env.size": 10, "env.heldout_seed": 11}, "env.heldout_seed"),
    ({"env.train_seed": 100, "env.heldout_seed": 90, "env.heldout_size": 11}, "env.heldout_seed"),
    ({"model.path": "/no/such/model"}, "model.path"),
    ({"resume": "/no/such/run"}, "resume"),
    ({"generator.replicas": 4, "generator.memory_share": 0.4}, "generator.memory_share"),
]


@pytest.mark.parametrize(
    ("changes", "key"), CONTRADICTIONS, ids=[f"{key}-{i}" for i, (_, key) in enumerate(CONTRADICTIONS)]
)
def test_contradiction_is_refused(make, changes, key):
    assert keys(make(**changes)) == [key]


ACCEPTED = [
    {"staleness.max_steps": 0, "staleness.window": 1},
    {"staleness.max_steps": 1, "batch.groups": 8, "staleness.window": 9},
    {"trainer.token_budget": 128, "generator.max_model_len": 128},
    {"model.compute_dtype": "float64", "trainer.master_dtype": "float64"},
    BF16,
    BF16 | {"optim.in_backward": True},
    {"optim.in_backward": True, "optim.accumulation": "adama"},
    {"optim.in_backward": True, "optim.accumulation": "momentum", "optim.name": "sgd"},
    {"optim.in_backward": True, "optim.accumulation": "momentum", "optim.name": "muon"},
    {"optim.clip": "delayed"},
    {"optim.name": "muon"},
    {"transport.host": "localhost"},
    {"transport.host": "::1"},
    {"transport.host": "10.0.0.1", "transport.keys_dir": "/tmp"},
    {"trainer.steps": 2, "optim.warmup_steps": 3},
    {"env.train_seed": 2, "env.size": 10, "env.heldout_seed": 12},
    {"env.train_seed": 100, "env.heldout_seed": 90, "env.heldout_size": 10},
    {"env.kind": "function", "env.function": "module:task", "env.train_seed": 2, "env.heldout_seed": 2},
]


@pytest.mark.parametrize("changes", ACCEPTED)
def test_the_limit_itself_is_accepted(make, changes):
    assert keys(make(**changes)) == []


def test_biased_sampling_says_why(make):
    """TRL #6789, PR #7269, vLLM RFC #42259: a truncated support turns the ratio into kept mass."""
    with pytest.raises(
        ConfigError, match=r"sampling\.top_p: 0\.8 biases the ratio .* replay of its support is not available"
    ):
        check(make(**{"sampling.top_p": 0.8}), Place(), 0)


def test_all_problems_are_reported_at_once(make):
    config = make(**{"sampling.top_p": 0.8, "staleness.window": 1000, "env.heldout_seed": 1})
    assert set(keys(config)) == {"sampling.top_p", "staleness.window", "env.heldout_seed"}


@pytest.mark.parametrize(
    ("changes", "place", "gpus", "expected"),
    [
        ({"generator.replicas": 2, "generator.memory_share": 0.9}, {}, 1, ["generator.replicas"]),
        ({"generator.replicas": 2, "generator.memory_share": 0.4}, {}, 1, []),  # two share one GPU
        ({"generator.replicas": 2, "generator.memory_share": 0.9}, {}, 2, []),
        (
            {"generator.replicas": 2, "generator.tensor_parallel": 2, "generator.memory_share": 0.9},
            {},
            2,
            ["generator.replicas"],
        ),
        ({"generator.tensor_parallel": 4}, {}, 2, ["generator.tensor_parallel"]),
        ({"generator.tensor_parallel": 2}, {}, 0, ["generator.tensor_parallel"]),
        ({"generator.tensor_parallel": 1}, {}, 0, []),
        ({}, {"local_world_size": 3, "world_size": 3}, 2, ["--nproc-per-node"]),
        ({}, {"local_world_size": 2, "world_size": 2}, 2, []),
        ({}, {"local_world_size": 2, "world_size": 2}, 0, []),  # gloo ranks share the CPU
    ],
)
def test_devices(make, changes, place, gpus, expected):
    assert keys(make(**changes), gpus, **place) == expected


@pytest.mark.parametrize(
    ("changes", "place", "gpus", "expected"),
    [
        ({"weights.backend": "ipc"}, {}, 0, ["weights.backend"]),
        ({"weights.backend": "nccl"}, {}, 0, ["weights.backend"]),
        ({"weights.backend": "ipc"}, {}, 1, []),
        ({"weights.backend": "ipc", "generator.tensor_parallel": 2}, {}, 2, ["weights.backend"]),
        # all replicas on one GPU, though there are two
        (
            {"weights.backend": "ipc", "generator.replicas": 2, "generator.memory_share": 0.6},
            {},
            2,
            ["generator.replicas"],
        ),
        ({"weights.backend": "nccl"}, {}, 1, ["weights.backend"]),
        ({"weights.backend": "nccl"}, {}, 2, []),
        ({"weights.backend": "nccl", "generator.replicas": 2}, {}, 2, ["weights.backend"]),
        ({"weights.backend": "nccl", "generator.tensor_parallel": 2}, {"local_world_size": 2, "world_size": 2}, 4, []),
        (
            {"weights.backend": "nccl", "generator.tensor_parallel": 2},
            {"local_world_size": 3, "world_size": 3},
            4,
            ["weights.backend"],
        ),
    ],
)
def test_ways_of_moving_weights(make, changes, place, gpus, expected):
    assert keys(make(**changes), gpus, **place) == expected


SFT = {"mode": "sft"}
BEST = {"checkpoint.keep_best": 1, "checkpoint.every": 10, "eval.every": 10}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (BEST, []),
        (BEST | {"checkpoint.best_by": "eval/accuracy"}, []),
        (BEST | {"eval.every": 4}, []),  # step 20 is both
        (BEST | {"eval.every": 0}, ["checkpoint.keep_best"]),
        (BEST | {"checkpoint.every": 0}, ["checkpoint.keep_best"]),
        (BEST | {"eval.every": 7}, ["checkpoint.keep_best"]),
        (BEST | {"env.heldout_size": 0}, ["checkpoint.keep_best"]),
        (BEST | {"checkpoint.best_by": "eval/loss"}, ["checkpoint.best_by"]),
        (BEST | SFT | {"checkpoint.best_by": "eval/loss"}, []),
        (BEST | SFT | {"checkpoint.best_by": "eval/accuracy"}, ["checkpoint.best_by"]),
        ({"eval.every": 0}, []),
    ],
)
def test_the_best_checkpoint_needs_evaluations(make, tmp_path, changes, expected):
    (tmp_path / "asyncrl" / "modes" / "sft.py").touch()
    assert keys(make(**{"trainer.steps": 60} | changes)) == expected


def test_an_example_fits_into_a_micro_batch(make, tmp_path):
    (tmp_path / "asyncrl" / "modes" / "sft.py").touch()
    budget = {"trainer.token_budget": 4096}
    long = {"model.path": str(make_model_folder(tmp_path / "long", max_position_embeddings=1 << 20))}
    assert keys(make(**SFT | budget | long | {"sft.max_length": 4096})) == []
    assert keys(make(**SFT | budget | long | {"sft.max_length": 4097})) == ["sft.max_length"]
    assert keys(make(**budget | {"sft.max_length": 4097})) == [], "of no concern to grpo"


@pytest.mark.parametrize("made", [False, True])
def test_an_example_fits_into_the_model_and_no_engine_limits_it(make, tmp_path, made):
    (tmp_path / "asyncrl" / "modes" / "sft.py").touch()
    model = {"model.path": "", "model.new.max_positions": 1024} if made else {}
    engine = {"generator.max_model_len": 10**6, "sampling.max_tokens": 10**6}
    assert keys(make(**SFT | model | engine | {"sft.max_length": 1024})) == []
    assert keys(make(**SFT | model | engine | {"sft.max_length": 1025})) == ["sft.max_length"]
    assert keys(make(**SFT | model | {"trainer.token_budget": 64, "sft.max_length": 64})) == []


def test_ranks_of_other_machines_need_an_address_that_they_reach(make, tmp_path):
    across = {"world_size": 4, "local_world_size": 2}
    assert keys(make(), **across) == ["transport.host"]
    assert keys(make(**{"transport.host": "10.0.0.1", "transport.keys_dir": str(tmp_path)}), **across) == []


def test_a_machine_without_gpus_gets_the_remedy(make):
    reason = r"tensor_parallel: 2 splits an engine over GPUs and none is here\n    -> generator\.tensor_parallel=1; "
    with pytest.raises(ConfigError, match=reason):
        check(make(**{"generator.tensor_parallel": 2}), Place(), 0)
    with pytest.raises(ConfigError, match=r"ipc moves weights from GPU to GPU and none is here\n    -> set it to zmq"):
        check(make(**{"weights.backend": "ipc"}), Place(), 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("node7", False)],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


def test_a_checkout_that_is_not_installed_is_refused(make, monkeypatch):
    """Without the entry point every engine would die at its start, and be restarted in vain."""
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    assert keys(make()) == ["installation"]


def test_a_run_to_resume_needs_its_config(make, tmp_path):
    (tmp_path / "run").mkdir()
    config = make(resume=str(tmp_path / "run"))
    assert keys(config) == ["resume"]
    for text in ("{", "[]", '{"architectures": ["Qwen3ForCausalLM"]}'):  # damaged, and those of other folders
        (tmp_path / "run" / "config.json").write_text(text)
        assert keys(config) == ["resume"]
    (tmp_path / "run" / "config.json").write_text('{"mode": "grpo"}')
    assert keys(config) == []
    assert keys(make(resume=str(tmp_path / "run"), **{"run.dir": "x"})) == ["run.dir"]


def test_the_remedy_for_too_many_engines_can_be_followed(make):
    for replicas, remedy in ((4, "generator.memory_share=0.22 or less"), (100_000, "a smaller generator.replicas")):
        config = make(**{"generator.replicas": replicas, "generator.memory_share": 0.5})
        (problem,) = (p for p in check_devices(config, Place(), 0))
        assert problem.remedy.endswith(remedy)
