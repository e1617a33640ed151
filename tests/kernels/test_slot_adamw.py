"""Clip and AdamW of many slots against torch's, slot by slot; isolation of slots that are not finite or not active."""

from __future__ import annotations

import pytest
import torch

from kernels.slot_adamw import SlotBuffers, SlotHyper, slot_adamw

F64 = torch.float64
BOUNDS = (0, 48, 48, 80, 208)  # the second slot is empty


def make(dtype=F64, weight=None) -> tuple[SlotBuffers, SlotHyper]:
    g = torch.Generator().manual_seed(0)
    n, slots = BOUNDS[-1], len(BOUNDS) - 1
    master = torch.randn(n, generator=g, dtype=F64).to(dtype)
    copy = master if weight is None else master.to(weight)
    buffers = SlotBuffers(BOUNDS, copy, master, *(torch.zeros(n, dtype=dtype) for _ in range(3)))

    def vector(*values):
        return torch.tensor(values, dtype=F64)

    integers = torch.zeros(2, slots, dtype=torch.int64)
    return buffers, SlotHyper(
        lr=vector(1e-2, 1.0, 3e-3, 1e-4), beta1=vector(0.9, 0.9, 0.8, 0.95), beta2=vector(0.999, 0.9, 0.95, 0.99),
        eps=vector(1e-8, 1e-8, 1e-6, 1e-8), weight_decay=vector(0.1, 0.0, 0.0, 0.01),
        clip=vector(1.0, 1.0, torch.inf, 0.5), grad_scale=vector(1.0, 1.0, 0.25, 2.0), step=integers[0],
        skipped=integers[1], active=torch.ones(slots, dtype=torch.bool), finite=torch.ones(slots, dtype=torch.bool),
    )  # fmt: skip


def gradient(step: int) -> torch.Tensor:
    return torch.randn(BOUNDS[-1], generator=torch.Generator().manual_seed(100 + step), dtype=F64)


def state(buffers: SlotBuffers, slot: int) -> list[torch.Tensor]:
    flat = (buffers.weight, buffers.master, buffers.exp_avg, buffers.exp_avg_sq)
    return [x[BOUNDS[slot] : BOUNDS[slot + 1]].clone() for x in flat]


@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (torch.float32, 5e-7)], ids=["fp64", "fp32"])
def test_each_slot_follows_torch_alone(dtype, bound):
    """Ten steps against clip_grad_norm_ and AdamW in float64; one slot sits out two of them."""
    buffers, hyper = make(dtype)
    models = []
    for i in (0, 2, 3):
        p = torch.nn.Parameter(buffers.master[BOUNDS[i] : BOUNDS[i + 1]].to(F64, copy=True))
        betas, numbers = (hyper.beta1[i].item(), hyper.beta2[i].item()), [hyper.lr[i].item(), hyper.eps[i].item()]
        options = {"betas": betas, "lr": numbers[0], "eps": numbers[1], "weight_decay": hyper.weight_decay[i].item()}
        models.append((i, p, torch.optim.AdamW([p], **options)))
    for step in range(10):
        buffers.grad.copy_(gradient(step))
        hyper.active[2] = step not in (3, 4)
        norm, stepped = slot_adamw(buffers, hyper)
        assert stepped.tolist() == hyper.active.tolist()
        for i, p, optimizer in models:
            if hyper.active[i]:
                p.grad = buffers.grad[BOUNDS[i] : BOUNDS[i + 1]].double() * hyper.grad_scale[i]
                wanted = torch.nn.utils.clip_grad_norm_([p], hyper.clip[i].item())
                assert abs(norm[i] - wanted) < 1e-6 * wanted
                optimizer.step()
            mine = buffers.master[BOUNDS[i] : BOUNDS[i + 1]].double()
            assert (mine - p.detach()).norm() < bound * p.detach().norm()
    assert hyper.step.tolist() == [10, 10, 8, 10] and hyper.skipped.tolist() == [0] * 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_slot_that_is_not_finite_is_skipped_counted_and_harms_nobody(where, value):
    def run(broken: bool) -> tuple[SlotBuffers, SlotHyper]:
        buffers, hyper = make(torch.float32, torch.bfloat16)
        for step in range(3):
            buffers.grad.copy_(gradient(step))
            hyper.finite.fill_(True)
            if broken and step == 1:
                if where == "loss":
                    hyper.finite[2] = False
                else:
                    buffers.grad[BOUNDS[2] + 7] = value
                before = state(buffers, 2)
            slot_adamw(buffers, hyper)
            if broken and step == 1:
                assert all(torch.equal(a, b) for a, b in zip(state(buffers, 2), before, strict=True))
        return buffers, hyper

    (clean, _), (harmed, hyper) = run(False), run(True)
    for slot in (0, 3):
        assert all(torch.equal(a, b) for a, b in zip(state(clean, slot), state(harmed, slot), strict=True))
    assert hyper.skipped.tolist() == [0, 0, 1, 0] and hyper.step.tolist() == [3, 3, 2, 3]
    assert all(torch.isfinite(x).all() for x in state(harmed, 2))


def test_a_slot_that_is_not_active_keeps_every_bit():
    buffers, hyper = make(torch.float32)
    buffers.grad.copy_(gradient(0))
    hyper.active[3] = False
    buffers.grad[BOUNDS[3] :] = torch.nan
    before = state(buffers, 3)
    slot_adamw(buffers, hyper)
    assert all(torch.equal(a, b) for a, b in zip(state(buffers, 3), before, strict=True))
    assert hyper.step[3] == 0 and hyper.skipped[3] == 0


def test_buffers_that_do_not_fit_are_refused():
    buffers, hyper = make()
    with pytest.raises(ValueError, match=r"lr must be \(4,\)"):
        slot_adamw(buffers, SlotHyper(**(vars(hyper) | {"lr": hyper.lr[:3]})))
    with pytest.raises(ValueError, match=r"exp_avg is torch\.float32"):
        slot_adamw(SlotBuffers(**(vars(buffers) | {"exp_avg": buffers.exp_avg.float()})), hyper)
    with pytest.raises(ValueError, match="rise from 0"):
        slot_adamw(SlotBuffers(**(vars(buffers) | {"bounds": (0, 48, 40, 80, 208)})), hyper)
