"""What an engine decides without vLLM: seeds, stop ids, environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.actors.engine import (
    Completion,
    Engine,
    EngineBroken,
    is_cpu_build,
    prepare_environment,
    sample_seed,
)
from asyncrl.actors.versions import VersionSpans
from asyncrl.config.model_folder import stop_token_ids
from asyncrl.config.schema import GeneratorConfig


def test_seeds_differ_and_stay():
    seeds = {sample_seed(s, o, i) for s in range(3) for o in range(-5, 5) for i in range(8)}
    assert len(seeds) == 3 * 10 * 8 and all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(1, 2, 3) == 1138364116778193076


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"eos_token_id": 5}}, [5]),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 8]}}, [7, 8]),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {}}, [5]),
    ],
)
def test_stop_ids(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids(tmp_path) == expected


def test_a_model_that_never_stops_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    with pytest.raises(ValueError, match="has an eos_token_id"):
        stop_token_ids(tmp_path)


def test_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"})
    prepare_environment(GeneratorConfig(threads=3), "generator/5")
    assert os.environ["ASYNCRL_GENERATOR"] == "generator/5"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "a user's choice stays"
    if is_cpu_build():
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1" and os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_torch_is_not_imported_before_the_environment_is_set():
    code = "import sys, asyncrl.actors.generator; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def completion(ids: list[int], of: list[int], logprobs: list[float], reason: str = "stop") -> Completion:
    """What becomes of a finished request of vLLM (a fake: its fields that we read)."""
    drawn = SimpleNamespace(
        token_ids=ids, finish_reason=reason, logprobs=SimpleNamespace(token_ids=of, logprobs=logprobs)
    )
    output = SimpleNamespace(outputs=[drawn], num_cached_tokens=2)
    return Engine._completion(None, output, VersionSpans(4))  # type: ignore[arg-type]


def test_logprobs_of_other_tokens_than_the_sampled_ones_break_the_engine():
    assert completion([5, 6], [5, 6], [-0.5, -1.0]).versions.tolist() == [4, 4]
    with pytest.raises(EngineBroken, match=r"log-probs of tokens \[5, 7\] came with tokens \[5, 6\]"):
        completion([5, 6], [5, 7], [-0.5, -1.0])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_sample_with_a_logprob_that_is_no_number_fails(value):
    found = completion([5, 6], [5, 6], [-0.5, value])
    assert found.finish_reason == "failed" and found.failure == f"token 1 has log-prob {value}"
    assert len(found.token_ids) == 0 and found.logprobs.dtype == np.float32


def test_a_request_that_the_engine_gave_up_fails():
    """verl-omni #433: it came back as if it had been answered."""
    found = completion([5], [5], [-0.5], reason="abort")
    assert found.finish_reason == "failed" and found.failure == "the engine ended the request with abort"
