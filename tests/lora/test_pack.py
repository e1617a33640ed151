"""Each adapter of a pack against the same adapter trained alone, and what one adapter does to the others: nothing."""

from __future__ import annotations

import pytest

from tests.lora.cases import JOBS, alone, distance, job, learn, packed, state, steps_of
from tests.training.tiny import tiny_folder

SAME = ("loss", "grad_norm", "lr", "tokens", "samples", "micro_batches", "packing_efficiency", "padding_share")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("head", ["policy", "logprob"])
def test_a_packed_adapter_learns_what_it_learns_alone(path, head):
    """T0 for a whole model: ranks, alphas, targets, schedules, batch sizes, accumulation, dropout and clips differ."""
    cfgs = {kind: job(path, kind, algorithm={"loss_head": head}) for kind in JOBS}
    pack, slots = packed(cfgs)
    reports = {kind: [] for kind in JOBS}
    for _ in range(3):
        for kind, report in learn(pack, slots).items():
            reports[kind].append(report)
    for kind, cfg in cfgs.items():
        solo = alone(cfg)
        wanted = steps_of(solo, kind, 3)
        assert distance(state(slots[kind]), state(solo)) < 1e-9
        for found, want in zip(reports[kind], wanted, strict=True):
            for name in SAME:
                assert getattr(found, name) == pytest.approx(getattr(want, name), rel=1e-9), (kind, name)
            assert found.skipped is want.skipped is None
    assert [r.micro_batches for r in reports["dropped"]] != [1, 1, 1]
    assert reports["dropped"][0].grad_norm > cfgs["dropped"].optim.clip_norm, "the clip acts"
