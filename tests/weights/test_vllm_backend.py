"""The backend's judgement of what it loads, on a model that only pretends to be vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.weights.digest import combined, tensor_digests
from asyncrl.weights.errors import WeightMismatch
from asyncrl.weights.manifest import Manifest, Staged
from asyncrl.weights.vllm_backend import ZmqInitInfo, ZmqWeightTransferEngine, checkpoint_names, tied_followers

TENSORS = {"embed": torch.arange(6.0).view(3, 2), "q": torch.ones(2), "k": torch.full((2,), 2.0)}
TARGETS = {"embed": "embed", "q": "qk", "k": "qk", "lm_head": ""}  # tied: the engine skips the head silently


class Model:
    """Two parameters; ``qk`` is fused of q and k."""

    def __init__(self):
        self.calls = []
        self.buffers = {"rotary.cos_sin": torch.arange(4.0), "rotary.positions": torch.arange(4)}

    def named_parameters(self):
        return [("embed", None), ("qk", None)]

    def named_buffers(self):
        return list(self.buffers.items())

    def load_weights(self, weights):
        names = [name for name, _ in weights]
        self.calls.append(names)
        for name in names:
            if name not in TARGETS:
                raise ValueError(f"There is no module or parameter named {name!r}")
        return {TARGETS[name] for name in names} - {""}


class Reports:
    """Stands for the receiving thread."""

    def __init__(self, staged: Staged) -> None:
        self.staged, self.sent = staged, []

    def take(self, version: int) -> Staged:
        return self.staged

    def report(self, kind: str, **header) -> None:
        self.sent.append((kind, header))


def staged(tensors: dict[str, torch.Tensor]) -> Staged:
    manifest = Manifest.of((n, t.dtype, t.shape) for n, t in tensors.items())
    stream = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for spec in manifest.specs:
        spec.view(stream).copy_(tensors[spec.name])
    return Staged(3, manifest, stream, manifest.nbytes, tensor_digests(tensors.values()))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr("asyncrl.weights.vllm_backend.initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr("asyncrl.weights.vllm_backend.finalize_layerwise_reload", lambda model, config: None)
    engine = ZmqWeightTransferEngine.__new__(ZmqWeightTransferEngine)
    engine.device, engine.model = torch.device("cpu"), Model()
    engine.model.modules = list
    engine.model_config = SimpleNamespace(quantization=None)
    engine._expected = set(TENSORS)
    return engine


def update(engine: ZmqWeightTransferEngine, what: Staged) -> Reports:
    engine._receiver = reports = Reports(what)
    engine.start_weight_update()
    engine.update_weights({"version": 3})
    engine.finish_weight_update()
    return reports


def test_what_matches_is_loaded_and_reported(engine):
    ((kind, header),) = update(engine, staged(TENSORS)).sent
    assert kind == "loaded" and header["version"] == 3 and header["load_s"] >= header["digest_s"] > 0
    assert header["digest"] == combined(tensor_digests(TENSORS.values()))


def test_tensors_go_one_by_one_the_first_time_and_together_afterwards(engine):
    for _ in range(3):
        ((kind, header),) = update(engine, staged(TENSORS)).sent
        assert kind == "loaded" and header["digest"] == combined(tensor_digests(TENSORS.values()))
    assert engine.model.calls == [["embed"], ["q"], ["k"], ["embed", "q", "k"], ["embed", "q", "k"]]


def test_together_they_must_reach_what_each_reached(engine, monkeypatch):
    update(engine, staged(TENSORS))
    load = engine.model.load_weights
    monkeypatch.setattr(engine.model, "load_weights", lambda weights: load(weights) - {"qk"})
    with pytest.raises(WeightMismatch, match=r"are missing: qk$"):
        update(engine, staged(TENSORS))


def test_a_tensor_that_the_engine_does_not_ask_for_is_named(engine, monkeypatch):
    update(engine, staged(TENSORS))
    monkeypatch.setattr(engine.model, "load_weights", lambda weights: [next(iter(weights))] and {"embed", "qk"})
    with pytest.raises(WeightMismatch, match=r"match nothing in the engine: q, k$"):
        update(engine, staged(TENSORS))


def test_other_names_go_one_by_one_again(engine):
    update(engine, staged(TENSORS))
    with pytest.raises(WeightMismatch, match=r"match nothing in the engine: rotor$"):
        update(engine, staged(TENSORS | {"rotor": torch.zeros(1)}))


@pytest.mark.parametrize("change", [lambda b: b + 1e-6, lambda b: b.bfloat16()], ids=["value", "dtype"])
def test_a_buffer_that_a_load_changed_is_named(engine, monkeypatch, change):
    """SkyRL #1725, verl #5801: rotary frequencies cast with the weights, or stale. They are compared after a sync."""

    def finalize(model, config):
        model.buffers["rotary.cos_sin"] = change(model.buffers["rotary.cos_sin"])

    monkeypatch.setattr("asyncrl.weights.vllm_backend.finalize_layerwise_reload", finalize)
    with pytest.raises(
        WeightMismatch, match=r"1 buffers of the engine changed with the load: rotary\.cos_sin$"
    ) as caught:
        update(engine, staged(TENSORS))
    assert engine._receiver.sent == [("mismatch", {"version": 3, "reason": str(caught.value)})]


def test_all_changed_tensors_are_named_to_everyone(engine):
    what = staged(TENSORS)
    for name in ("embed", "k"):
        next(t for spec, t in what.tensors() if spec.name == name).view(-1)[0] += 1e-6
    with pytest.raises(WeightMismatch, match="2 tensors arrived changed: embed, k") as caught:
        update(engine, what)
    assert caught.value.changed == ["embed", "k"]
    assert engine._receiver.sent == [("mismatch", {"version": 3, "reason": str(caught.value)})]


def test_a_missing_part_of_a_fused_parameter_is_named(engine):
    with pytest.raises(WeightMismatch, match=r"are missing: k$"):
        update(engine, staged({n: t for n, t in TENSORS.items() if n != "k"}))


def test_without_a_checkpoint_the_engines_own_parameters_are_counted(engine):
    engine._expected = None
    with pytest.raises(WeightMismatch, match=r"are missing: embed$"):
        update(engine, staged({n: t for n, t in TENSORS.items() if n != "embed"}))


@pytest.mark.parametrize("name", ["lm_head", "rotor"])
def test_what_the_engine_ignores_or_refuses_is_named(engine, name):
    """SkyRL #1737, verl #7443: tensors skipped by name rules."""
    with pytest.raises(WeightMismatch, match=rf"match nothing in the engine: {name}$"):
        update(engine, staged(TENSORS | {name: torch.zeros(1)}))


def test_a_worker_without_a_publisher_says_so(engine):
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="call init_weight_transfer_engine before"):
        engine.update_weights({"version": 3})


def test_checkpoint_names(tmp_path):
    assert checkpoint_names(tmp_path) is None
    save_file({"a": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    assert checkpoint_names(tmp_path) == {"a", "b"}


def test_a_tied_head_follows_its_embedding():
    net = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3), "last": torch.nn.ReLU()}
    )
    for module in net.values():
        module.quant_method = None
    assert tied_followers(net) == []
    net["head"].weight = net["embed"].weight
    assert tied_followers(net) == [net["head"]]


def ranks_of(engine, monkeypatch, **parallel) -> tuple[int, int]:
    """(rank, workers) under which a worker of vLLM with this ``parallel_config`` subscribes."""
    made = []

    class Subscribed:
        def __init__(self, publisher, generator, rank, workers, **_) -> None:
            made.append((rank, workers))

        def start(self, deadline_s) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr("asyncrl.weights.vllm_backend.Receiver", Subscribed)
    monkeypatch.setattr("asyncrl.weights.vllm_backend.checkpoint_names", lambda folder: set())
    one = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "data_parallel_index": 0, "world_size": 1, "rank": 0}
    engine.parallel_config, engine.model_config.model = SimpleNamespace(**one | parallel), ""
    engine.init_transfer_engine(ZmqInitInfo("tcp://127.0.0.1:1", "generator/0"))
    (found,) = made
    return found


def test_ranks_are_those_that_vllm_gives_its_workers(engine, monkeypatch):
    """SkyRL #1399, prime-rl #2221: ranks calculated from sizes collide with data parallelism.

    Here that is several engines, each with a count of its own.
    """
    assert [ranks_of(engine, monkeypatch, world_size=3, rank=rank) for rank in range(3)] == [(0, 3), (1, 3), (2, 3)]
    for ranks in ({"data_parallel_size": 2}, {"data_parallel_index": 1}):  # of a dense model vLLM resets the size
        with pytest.raises(ValueError, match=r"generator\.replicas"):
            ranks_of(engine, monkeypatch, **ranks)
