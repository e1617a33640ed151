"""Which GPUs there are, and which engine gets which."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncrl.config import machine
from asyncrl.config.machine import assign_gpus, visible_gpus

FOUR = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("gpus", "trainers", "replicas", "tensor_parallel", "expected"),
    [
        (FOUR, 1, 3, 1, [["1"], ["2"], ["3"]]),
        (FOUR, 2, 1, 2, [["2", "3"]]),
        (FOUR, 2, 2, 1, [["2"], ["3"]]),
        (FOUR, 2, 3, 1, [["2"], ["3"], ["0"]]),  # the third shares with a trainer
        (FOUR, 4, 2, 1, [["0"], ["1"]]),
        (["5", "GPU-ab"], 1, 1, 1, [["GPU-ab"]]),
        (["0"], 1, 2, 1, [["0"], ["0"]]),
        ([], 2, 2, 1, [[], []]),
    ],
)
def test_each_engine_gets_gpus_of_its_own_while_there_are_enough(gpus, trainers, replicas, tensor_parallel, expected):
    assert assign_gpus(gpus, trainers, replicas, tensor_parallel) == expected


@pytest.mark.parametrize("tensor_parallel", [1, 2, 3])
@pytest.mark.parametrize("replicas", range(1, 9))
@pytest.mark.parametrize("trainers", range(1, 5))
def test_sharing_is_even_and_an_engine_never_has_one_gpu_twice(trainers, replicas, tensor_parallel):
    assigned = assign_gpus(FOUR, trainers, replicas, tensor_parallel)
    assert all(len(set(gpus)) == tensor_parallel for gpus in assigned)
    engines = Counter({gpu: 0 for gpu in FOUR})
    engines.update(gpu for gpus in assigned for gpu in gpus)
    assert max(engines.values()) - min(engines.values()) <= 1
    if trainers + replicas * tensor_parallel <= len(FOUR):
        assert not set(FOUR[:trainers]) & {gpu for gpus in assigned for gpu in gpus}


def test_an_engine_that_wants_more_than_there_are():
    with pytest.raises(ValueError, match="an engine on 3 GPUs, and this machine has 2"):
        assign_gpus(["0", "1"], 1, 1, 3)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, FOUR), ("", []), ("2,0", ["2", "0"]), ("1, GPU-ab", ["1", "GPU-ab"]), ("3,-1,0", ["3"]), ("-1", [])],
)
def test_visible_gpus_are_those_of_cuda(monkeypatch, variable, expected):
    monkeypatch.setattr(machine, "_count_present", lambda: 4)
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected
