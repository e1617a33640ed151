"""What an adapter of a pack may be, and in what jobs that share a base may differ."""

from __future__ import annotations

import pytest

from asyncrl.config.context import Place
from asyncrl.config.packing import base_of, check_pack, check_packed
from asyncrl.config.schema import Config


def config(**keys: object) -> Config:
    found = Config(mode="sft")
    found.lora.rank = 8
    for key, value in keys.items():
        section, _, name = key.partition("__")
        assert hasattr(getattr(found, section), name)
        setattr(getattr(found, section), name, value)
    return found


def keys_of(problems) -> list[str]:
    return [problem.key for problem in problems]


def test_a_plain_adapter_is_accepted():
    assert not list(check_packed(config(), Place()))
    assert not list(check_packed(config(model__compute_dtype="bfloat16"), Place()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora.rank", 0),
        ("lora.rank", 129),
        ("lora.dora", True),
        ("sft.loss", "dpo"),
        ("optim.name", "muon"),
        ("optim.in_backward", True),
        ("optim.clip", "delayed"),
        ("model.path", ""),
        ("model.compute_dtype", "float8"),
        ("trainer.compile", True),
        ("trainer.cpu_offload", True),
        ("trainer.activation_offload", True),
        ("trainer.master_dtype", "float64"),
    ],
)
def test_what_a_slot_cannot_train_is_refused_by_name(key, value):
    assert keys_of(check_packed(config(**{key.replace(".", "__"): value}), Place())) == [key]


def test_several_devices_are_refused():
    assert keys_of(check_packed(config(), Place(world_size=2))) == ["--nproc-per-node"]


def test_jobs_may_differ_in_what_is_their_own():
    own = {"lora__rank": 4, "optim__lr": 1.0, "trainer__steps": 9, "sft__batch_size": 3, "trainer__token_budget": 99}
    jobs = [config(), *(config(**{key: value}) for key, value in own.items()), config(model__path="other")]
    assert not list(check_pack(jobs, range(len(jobs))))
    assert len({base_of(job) for job in jobs}) == 2


@pytest.mark.parametrize(
    ("key", "values", "says"),
    [
        ("packing.token_cap", (10, 20), "jobs of one pack share it, and here it is 10 and 20"),
        ("trainer.threads", (1, 2), "here it is 1 and 2"),
        ("algorithm.loss_head", ("policy", "logprob"), "policy and logprob"),
        ("sft.export", ("x", "x"), "jobs 3 and 4 would replace each other's adapter: x"),
        ("run.name", ("x", "x"), "jobs 3 and 4 have one name: x"),
    ],
)
def test_what_they_share_is_the_same_and_what_is_theirs_is_not(key, values, says):
    jobs = [config(lora__rank=n, **{key.replace(".", "__"): value}) for n, value in enumerate(values, 1)]
    (problem,) = check_pack(jobs, [3, 4])
    assert problem.key == key and says in problem.message


def test_a_job_twice_is_refused():
    (problem,) = check_pack([config(), config(lora__rank=3), config()], range(3))
    assert problem.key == "-m" and "jobs 0 and 2 are the same" in problem.message
