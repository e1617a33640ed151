"""Levers that do not work together, or not on this machine."""

from __future__ import annotations

import json

import pytest

from asyncrl.config import levers
from asyncrl.config.levers import check_levers, recomputed_every
from asyncrl.config.schema import Config


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """An H100 with a compiler."""
    monkeypatch.setattr(levers, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(levers.shutil, "which", lambda name: f"/usr/bin/{name}")


def problems(gpus=1, **values):
    config = Config()
    for key, value in values.items():
        section, name = key.split("__")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return list(check_levers(config, gpus))


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        ({"trainer__activation_checkpointing": "some"}, "trainer.activation_checkpointing", "'some' is not a choice"),
        ({"trainer__activation_checkpointing": "every_0"}, "trainer.activation_checkpointing", "is not a choice"),
        ({"trainer__activation_offload": True, "gpus": 0}, "trainer.activation_offload", "in host memory already"),
        ({"trainer__cpu_offload": True, "gpus": 0}, "trainer.cpu_offload", "in host memory already"),
        ({"trainer__cpu_offload": True, "trainer__shard": False}, "trainer.cpu_offload", "trainer.shard is false"),
        ({"trainer__cpu_offload": True, "parallel__tp": 2}, "trainer.cpu_offload", "split over ranks"),
        ({"trainer__cpu_offload": True, "optim__in_backward": True}, "trainer.cpu_offload", "optim.in_backward"),
        ({"trainer__cpu_offload": True, "optim__name": "muon"}, "trainer.cpu_offload", "gathers whole matrices"),
        ({"trainer__cpu_offload": True, "weights__backend": "ipc"}, "trainer.cpu_offload", "weights.backend=ipc"),
        ({"model__compute_dtype": "float8", "gpus": 0}, "model.compute_dtype", "no GPU"),
        ({"model__compute_dtype": "float8", "trainer__master_dtype": "float64"}, "trainer.master_dtype", "float32"),
        (
            {"trainer__compile": True, "model__compute_dtype": "float64", "trainer__master_dtype": "float64"},
            "trainer.compile",
            "float64",
        ),
        (
            {"trainer__compile": True, "trainer__activation_checkpointing": "selective"},
            "trainer.activation_checkpointing",
            "fuses",
        ),
        ({"trainer__compile": True, "parallel__tp": 2}, "trainer.compile", "split over ranks"),
    ],
)
def test_what_does_not_work_is_refused_with_its_key(values, key, says):
    (problem,) = problems(**values)
    assert problem.key == key and says in problem.message and problem.remedy


def test_float8_is_refused_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr(levers, "compute_capability", lambda: (8, 0))
    (problem,) = problems(model__compute_dtype="float8")
    assert "this one has 8.0" in problem.message and problem.remedy == "model.compute_dtype=bfloat16"


def model_of(folder, hidden, mlp):
    """The headers of a folder with the matrices of one MLP."""
    shapes = {"gate_proj": [mlp, hidden], "down_proj": [hidden, mlp]}
    entries = {
        f"model.layers.0.mlp.{name}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * hidden * mlp]}
        for name, shape in shapes.items()
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * hidden * mlp))
    return str(folder)


@pytest.mark.parametrize(
    ("hidden", "mlp", "tp", "says"),
    [
        (24, 32, 1, "gate_proj is 32 x 24"),
        (32, 40, 1, "gate_proj is 40 x 32"),
        (32, 48, 2, "gate_proj is 24 x 32 on a rank"),
        (32, 64, 2, None),
        (32, 48, 1, None),
    ],
)
def test_float8_is_refused_for_a_model_whose_sizes_have_none(tmp_path, hidden, mlp, tp, says):
    path = model_of(tmp_path, hidden, mlp)
    found = problems(model__compute_dtype="float8", model__path=path, parallel__tp=tp)
    assert [p.key for p in found] == (["model.compute_dtype"] if says else [])
    assert all(says in p.message and "multiples of 16" in p.message for p in found)


def test_compile_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(levers.shutil, "which", lambda name: None)
    (problem,) = problems(trainer__compile=True)
    assert "C++ compiler" in problem.message


@pytest.mark.parametrize(
    "values",
    [
        {"model__compute_dtype": "float8", "trainer__compile": True, "trainer__activation_checkpointing": "full"},
        {"trainer__activation_offload": True, "trainer__cpu_offload": True},
        {"parallel__tp": 2, "model__compute_dtype": "float8", "trainer__activation_checkpointing": "selective"},
    ],
)
def test_what_works_is_accepted(values):
    assert problems(**values) == []


@pytest.mark.parametrize(
    ("choice", "every"), [("none", 0), ("selective", 0), ("full", 1), ("every_1", 1), ("every_12", 12)]
)
def test_how_many_layers_are_recomputed(choice, every):
    assert recomputed_every(choice) == every
