"""The optimizer in the backward pass on one rank. Several ranks: test_in_backward_ranks.py."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from asyncrl.training import rules
from asyncrl.training.errors import PartialSteps
from asyncrl.training.in_backward import UnitOptimizer, plan_units
from asyncrl.training.model import layers
from tests.training.in_backward_cases import batches, compiled, different, everything, frozen, lora, run, trainer
from tests.training.tiny import make_samples, tiny_folder

FREE = {"clip_norm": 1e9, "clip_guard": 0.0}  # nothing is clipped: all rules are the same


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def both(path, **options):
    """(in the backward pass, the same step function after it)"""
    return trainer(path, in_backward=True, **options), trainer(path, clip="delayed", **options)


CASES = {
    "tied": {},
    "untied": {"tied": False},
    "recomputed": {"sections": {"trainer": {"steps": 9, "activation_checkpointing": "full"}}},
    "frozen": {"change": frozen},
    "lora": {"change": lora, "clip_norm": 0.02},  # smaller gradients
    "sgd": {"name": "sgd"},
    "muon": {"name": "muon"},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_state_equal_those_of_the_step_after_backward_bit_for_bit(path, case):
    """Three micro-batches a step, scaled loss and guard at work: weights, moments, counters and reports."""
    inside, after = both(path, **CASES[case])
    reports = run(inside, 0, 3), run(after, 0, 3)
    assert not different(everything(inside), everything(after))
    assert inside.optimizer.clip.state() == after.optimizer.clip.state()
    for a, b in zip(*reports, strict=True):
        assert a.pop("grad_norm") == pytest.approx(b.pop("grad_norm"), rel=1e-6)  # added in another order
        assert a.pop("partial_units") == 0 and a.pop("partial_total") == 0
        assert a | {"partial_units": None, "partial_total": None} == b and a["skipped"] is None
    assert reports[0][-1]["clip_scale"] < 1 and sum(r["guarded_units"] for r in reports[0][1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers(path, backend):
    inside, after = both(path, change=partial(compiled, backend=backend))
    run(inside, 0, 3), run(after, 0, 3)
    assert not different(everything(inside), everything(after))


def test_without_clipping_it_is_torch_adamw_bit_for_bit(path):
    inside, plain = trainer(path, in_backward=True, **FREE), trainer(path, **FREE)
    assert type(plain.optimizer) is torch.optim.AdamW
    run(inside, 0, 4), run(plain, 0, 4)
    assert not different(everything(inside), everything(plain))


def test_state_dicts_have_adamw_s_layout_and_load_each_other(path):
    inside, plain = trainer(path, in_backward=True, **FREE), trainer(path, **FREE)
    run(inside, 0, 2), run(plain, 0, 2)
    ours, torchs = inside.optimizer.state_dict(), plain.optimizer.state_dict()
    assert ours["param_groups"] == torchs["param_groups"]
    assert {g["weight_decay"] for g in ours["param_groups"]} == {0.1, 0.0}
    assert ours["state"].keys() == torchs["state"].keys()
    for key, state in ours["state"].items():
        assert {k: (v.dtype, v.shape) for k, v in state.items()} == {
            k: (v.dtype, v.shape) for k, v in torchs["state"][key].items()
        }
    inside.optimizer.load_state_dict(copy.deepcopy(torchs))
    plain.optimizer.load_state_dict(copy.deepcopy(ours))
    run(inside, 2, 4), run(plain, 2, 4)
    assert not different(everything(inside), everything(plain))


@pytest.mark.parametrize("rule", [{"clip": "delayed"}, FREE])
def test_a_run_may_switch_at_every_checkpoint(path, tmp_path, rule):
    """torchtune #2390: in-backward state could not be loaded. Here either mode continues the other, bit for bit.

    With the same clipping rule: its averages are in the checkpoint, also where the plain optimizer does not use them.
    """
    uninterrupted = trainer(path, in_backward=True, **rule)
    run(uninterrupted, 0, 6)
    for first, second in itertools.permutations((True, False)):
        for leg, (start, stop) in enumerate(((0, 2), (2, 4), (4, 6))):
            t = trainer(path, in_backward=(first, second, first)[leg], **rule)
            t.load_latest(tmp_path / str(first))
            run(t, start, stop)
            t.save(tmp_path / str(first))
        assert not different(everything(t), everything(uninterrupted))


def test_the_averages_of_delayed_clipping_outlive_a_leg_without_it(path, tmp_path):
    """The plain optimizer does not use them; a run that clips by them again goes on from where they were."""
    kinds, states = [], []
    for leg, clip in enumerate(("delayed", "global", "delayed")):
        t = trainer(path, clip=clip)
        t.load_latest(tmp_path)
        if clip == "delayed":
            states.append(t.optimizer.clip.state())
        run(t, 2 * leg, 2 * leg + 2)
        t.save(tmp_path)
        if leg == 0:
            states.append(t.optimizer.clip.state())
        kinds.append(type(t.optimizer))
    assert kinds == [UnitOptimizer, torch.optim.AdamW, UnitOptimizer]
    fresh, after, again = states
    assert fresh["norm"] is None and after["norm"] > 0 and again == after


def test_a_resumed_run_rounds_bf16_weights_alike(path, tmp_path):
    whole = trainer(path, "bfloat16", in_backward=True)
    run(whole, 0, 4)
    first = trainer(path, "bfloat16", in_backward=True)
    run(first, 0, 2)
    second = trainer(path, "bfloat16", in_backward=True)
    second.load(first.save(tmp_path))
    run(second, 2, 4)
    assert not different(everything(second), everything(whole))


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_momentum_is_in_the_checkpoint(path, tmp_path, name):
    options = {"name": name, "in_backward": True, "accumulation": "momentum"}
    whole, first, second = (trainer(path, **options) for _ in range(3))
    run(whole, 0, 3), run(first, 0, 2)
    second.load(first.save(tmp_path))
    run(second, 2, 3)
    assert not different(everything(second), everything(whole))


def test_a_parameter_that_had_no_gradient_in_some_steps_keeps_its_own_count():
    p, rare = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    ours = UnitOptimizer({"one": [p, rare]}, [{"params": [p, rare], "lr": 0.1}], rules.AdamWRule())
    q, seldom = (torch.nn.Parameter(x.detach().clone()) for x in (p, rare))
    torchs = torch.optim.AdamW([q, seldom], lr=0.1, fused=True)
    for step in range(4):
        ours.arm()
        for optimizer, often, sometimes in ((ours, p, rare), (torchs, q, seldom)):
            (often.square().sum() + (sometimes.square().sum() if step != 1 else 0.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(p, q) and torch.equal(rare, seldom)
    assert [int(ours.state[x]["step"]) for x in (p, rare)] == [4, 3] == [ours._steps[x][1] for x in (p, rare)]


def test_updates_of_one_millionth_survive_in_bf16_weights(path):
    """torchtune, measured: bf16(0.02) - 1e-6 == bf16(0.02). The mean over many weights must move as in fp32.

    A rounding moves a weight w by at most 2^-7 |w|, with a variance of at most 2^-16 w^2. Over all weights that is a
    closed bound on the error of their mean; five standard deviations are allowed, and the signal must exceed them.
    """
    options = {"lr": 2e-4, "warmup_steps": 0, "weight_decay": 0.0, "schedule": "constant", **FREE}
    half = trainer(path, "bfloat16", in_backward=True, **options)
    start = {n: p.detach().double().clone() for n, p in half.named_parameters_hf()}
    run(half, 0, 1)
    moved = torch.cat([(p.detach().double() - start[n]).flatten() for n, p in half.named_parameters_hf()])
    sign = torch.cat(
        [-half.optimizer.state[p]["exp_avg"].double().sign().flatten() for _, p in half.named_parameters_hf()]
    )
    live = sign != 0
    deviation = math.sqrt(sum(float(w.square().sum()) for w in start.values()) * 2**-16) / int(live.sum())
    # AdamW's first step is lr times the sign of the gradient.
    assert abs(float((moved * sign)[live].mean()) - 2e-4) < 5 * deviation < 1e-4


def test_row_4_every_parameter_sees_the_rate_of_every_step_also_after_a_resume(path, tmp_path, monkeypatch):
    """torchtune: single-device in-backward ignores the schedule; distributed takes the first step at the full rate."""
    seen: list[tuple[int, float]] = []
    fused = torch._fused_adamw_

    def spy(params, *args, lr, **kwargs):
        seen.extend((p.data_ptr(), lr) for p in params)
        return fused(params, *args, lr=lr, **kwargs)

    monkeypatch.setattr(rules.torch, "_fused_adamw_", spy)
    t = trainer(path, in_backward=True)
    rates = []
    for i in range(6):
        if i == 3:
            folder = t.save(tmp_path)
            t = trainer(path, in_backward=True)
            t.load(folder)
        seen.clear()
        (report,) = run(t, i, i + 1)
        rates.append(report["lr"])
        assert sorted(seen) == sorted((p.data_ptr(), report["lr"]) for p in t.parameters)
    assert rates[:3] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3]) and len(set(rates)) == 6


def test_schedulers_of_torch_act_on_it():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = UnitOptimizer({"one": [p]}, [{"params": [p], "lr": 0.5}], rules.MomentumRule())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 2)
    for want in (0.25, 0.5):
        before, m = p.detach().clone(), optimizer.state[p].get("momentum_buffer", torch.zeros(3)).clone()
        optimizer.arm()
        p.sum().backward()
        optimizer.step()
        assert torch.allclose(before - p.detach(), want * (0.95 * m + 1.0)) and p.grad is None
        scheduler.step()


def live_bytes(t, micro_batches) -> tuple[int, int]:
    """(largest sum of gradients alive at once in a step, bytes of all gradients), counted whenever one is complete."""
    peak, handles = [0], []

    def count(_):
        peak[0] = max(peak[0], sum(p.grad.nbytes for p in t.parameters if p.grad is not None))

    # Registered after the optimizer's own hooks these would see freed gradients, so count before they run.
    for p in t.parameters:
        own = dict(p._post_accumulate_grad_hooks or {})
        for key in own:
            del p._post_accumulate_grad_hooks[key]
        handles.append(p.register_post_accumulate_grad_hook(count))
        p._post_accumulate_grad_hooks.update(own)
    t.step(micro_batches)
    return peak[0], sum(p.nbytes for p in t.parameters)


def test_gradients_of_one_unit_live_at_a_time(path):
    samples = make_samples()
    inside = trainer(path, in_backward=True, tied=False)
    peak, whole = live_bytes(inside, [samples])
    units = plan_units(inside.policy, False).values()
    assert peak == max(sum(p.nbytes for p in unit) for unit in units) < whole / 2
    assert live_bytes(trainer(path, tied=False), [samples])[0] == whole
    # Armed accumulation keeps them between micro-batches, as documented; folding does not.
    assert live_bytes(trainer(path, in_backward=True, tied=False), [samples[:3], samples[3:]])[0] == whole
    for options in ({"name": "sgd", "accumulation": "momentum"}, {"accumulation": "adama"}):
        t = trainer(path, in_backward=True, tied=False, **options)
        assert live_bytes(t, [samples[:3], samples[3:]])[0] == peak


def test_weights_change_in_the_last_backward_and_not_before_the_gathers_are_done(path):
    """Contract Weight sync: gathers end before the first hook of a backward that steps in it."""
    t = trainer(path, in_backward=True)
    before, calls, versions = everything(t), [], []
    weight = layers(t.policy.lm)[0].mlp.down_proj.weight
    t.policy.register_forward_hook(lambda *_: versions.append(weight._version))

    def ready():
        calls.append((len(versions), {k: before[k] for k in different_weights(t, before)}))

    t.step(batches(0), ready)
    assert calls == [(3, {})]  # once, after all three forwards, nothing changed yet
    assert len(set(versions)) == 1 and weight._version > versions[0]
    assert different_weights(t, before)


def different_weights(t, before):
    return [n for n, p in t.named_parameters_hf() if not np.array_equal(p.detach().numpy(), before[n])]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({}, "loss_not_finite"),
        ({"max_loss": 1e-6}, "loss_over_limit"),
        ({"max_ratio": 1.01}, "ratio_over_limit"),
        ({"max_kl": 1e-6}, "kl_over_limit"),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_refused_step_changes_nothing_at_all(path, limits, reason, inside):
    t = trainer(path, in_backward=inside, clip="delayed")
    run(t, 0, 2)
    for key, value in limits.items():
        setattr(t.cfg.optim, key, value)
    micro_batches = batches(2)
    if not limits:
        micro_batches[-1][0].logprobs[:] = -1e4  # the ratio overflows, in the last micro-batch
        micro_batches[-1][0].advantages[:] = -1.0
    before, clip, called = everything(t), t.optimizer.clip.state(), []
    report = t.step(micro_batches, lambda: called.append(1))
    assert report.skipped == reason and not called and t.version == 3
    assert not different(everything(t), before) and t.optimizer.clip.state() == clip
    assert t.partial_steps == 0 and t.skipped == {reason: 1}
    if limits:
        assert math.isfinite(report.grad_norm) and report.grad_norm > 0  # the norm is measured all the same
    assert not any(p.grad is not None for p in t.parameters)
    for key in limits:
        setattr(t.cfg.optim, key, 0.0)
    other = trainer(path, in_backward=inside, clip="delayed")
    run(other, 0, 2)
    other.version, other.skipped = 3, t.skipped
    run(t, 3, 5), run(other, 3, 5)
    assert not different(everything(t), everything(other))  # as if the batch had never been


@pytest.mark.parametrize("micro_batches", [[], [[]], [[], []]])
def test_nothing_to_train(path, micro_batches):
    t = trainer(path, in_backward=True)
    before = everything(t)
    report = t.step(micro_batches)
    assert report.skipped == "no_tokens" and t.version == 1 and not different(everything(t), before)
    assert run(t, 1, 2)[0]["skipped"] is None


def test_a_gradient_that_is_not_finite_drops_its_unit_and_is_counted(path):
    t, reference = trainer(path, in_backward=True, **FREE), trainer(path, in_backward=True, **FREE)
    run(t, 0, 2), run(reference, 0, 2)
    bad = layers(t.policy.lm)[0].mlp.down_proj.weight
    mine = {n for n, _ in t.named_parameters_hf() if n.startswith("model.layers.0.")}
    before = everything(t)
    handle = bad.register_hook(lambda g: g * float("inf"))
    report = t.step(batches(2))
    handle.remove()
    reference.step(batches(2))
    assert report.skipped is None and report.partial_units == 1 and report.partial_total == 1
    assert report.metrics()["train/partial_units"] == 1 and not math.isfinite(report.grad_norm)
    now, want = everything(t), everything(reference)
    for key in now:
        in_unit = key.split("/")[0] in mine
        assert np.array_equal(now[key], (before if in_unit else want)[key]), key
    assert all(math.isfinite(n) for n in t.optimizer.clip.unit_norms.values())
    good = t.step(batches(3))
    assert good.partial_units == 0 and good.partial_total == 1 and math.isfinite(good.loss)


def test_too_many_partial_steps_end_the_run_also_after_a_resume(path, tmp_path):
    t = trainer(path, in_backward=True, max_partial_steps=1)
    layers(t.policy.lm)[0].mlp.down_proj.weight.register_hook(lambda g: g * float("nan"))
    t.step(batches(0)), t.step(batches(1))
    folder = t.save(tmp_path)
    with pytest.raises(PartialSteps, match=r"2 steps updated only a part.*optim\.max_partial_steps=1"):
        t.step(batches(2))
    other = trainer(path, in_backward=True, max_partial_steps=1)
    other.load(folder)
    with pytest.raises(PartialSteps):
        other.step(batches(2))


def test_too_many_partial_steps_fail_a_run_that_ends_with_them(path, tmp_path):
    t = trainer(path, in_backward=True, max_partial_steps=0)
    t.step(batches(0))
    t.end()
    layers(t.policy.lm)[0].mlp.down_proj.weight.register_hook(lambda g: g * float("nan"))
    t.step(batches(1))
    with pytest.raises(PartialSteps, match="1 steps updated only a part"):
        t.end()


def test_when_no_gradient_is_finite_the_step_is_skipped(path):
    t = trainer(path, in_backward=True)
    before = everything(t)
    handles = [p.register_hook(lambda g: g * float("nan")) for p in t.parameters]
    report = t.step(batches(0))
    assert report.skipped == "gradient_not_finite" and t.partial_steps == 0
    assert not [n for n in different_weights(t, before)]
    for handle in handles:
        handle.remove()
    assert run(t, 1, 2)[0]["skipped"] is None


def test_the_loss_is_scaled_by_the_norms_before_and_the_true_norm_is_reported(path):
    exact = trainer(path, "float64", clip_norm=1e9, clip_guard=0.0)
    t = trainer(path, "float64", in_backward=True, clip_norm=0.5, clip_guard=0.0, clip_memory=0.0, lr=0.0)
    exact.cfg.optim.lr = 0.0  # the weights stay, so both see the same gradients
    norms, scales = [], []
    for i in range(3):
        norms.append(exact.step(batches(i)).grad_norm)
        report = t.step(batches(i))
        scales.append(report.clip_scale)
        assert report.grad_norm == pytest.approx(norms[-1], rel=1e-12)
    assert scales[0] == 1.0
    share = 0.5 / math.sqrt(len(t.optimizer.units))  # the first step had no history: each unit was cut to its share
    assert scales[1] == pytest.approx(0.5 / t_first_norm(share, t), rel=1e-5)
    assert scales[2] == pytest.approx(0.5 / (norms[1] + 1e-6), rel=1e-9)


def t_first_norm(share, t):
    return math.sqrt(len(t.optimizer.units)) * share + 1e-6


def test_momentum_accumulation_is_exact(path):
    """m = b m + sum of the micro-batches' gradients, in whatever portions: against torch's SGD on the sum."""
    options = {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0, **FREE}
    folded = trainer(path, "float64", in_backward=True, accumulation="momentum", **options)
    armed = trainer(path, "float64", in_backward=True, **options)
    plain = trainer(path, "float64", **FREE)
    plain.optimizer = torch.optim.SGD(plain.parameters, lr=1e-3, momentum=0.9)
    for t in (folded, armed, plain):
        t.optimizer.defaults["lr"] = 1e-3
        run(t, 0, 4)
    a, b, c = everything(folded), everything(armed), everything(plain)
    for name in c:
        for other in (a, b):
            assert np.linalg.norm(other[name] - c[name]) <= 1e-12 * np.linalg.norm(c[name]), name


def test_momentum_accumulation_of_muon_is_exact(path):
    folded, armed = (
        trainer(path, "float64", in_backward=True, name="muon", accumulation=a, **FREE) for a in ("momentum", "armed")
    )
    run(folded, 0, 3), run(armed, 0, 3)
    a, b = everything(folded), everything(armed)
    assert max(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(b[k]) for k in a) < 1e-9


def test_muon_makes_hidden_matrices_orthogonal_and_moves_the_rest_by_sign(path):
    t = trainer(path, "float64", in_backward=True, name="muon", lr=0.1, weight_decay=0.0, warmup_steps=0, **FREE)
    before = everything(t)
    t.step(batches(0))
    names = dict(t.named_parameters_hf())
    hidden, embedding = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"
    moved = (before[hidden] - names[hidden].detach().numpy()) / t.step(batches(1)).lr
    singular = np.linalg.svd(moved, compute_uv=False) / (0.2 * max(moved.shape) ** 0.5)
    assert singular.min() > 0.4 and singular.max() < 2.6  # two steps of singular values between 0.7 and 1.2
    t2 = trainer(path, "float64", in_backward=True, name="muon", lr=0.1, weight_decay=0.0, warmup_steps=0, **FREE)
    report = t2.step(batches(0))
    step = (before[embedding] - everything(t2)[embedding]) / report.lr
    assert set(np.unique(np.round(step, 9))) <= {-0.2, 0.0, 0.2}


def test_adama_is_what_its_paper_says_and_not_adam(path):
    """v adds the squares of each micro-batch's gradient; with one micro-batch it is AdamW."""
    options = {"weight_decay": 0.0, "warmup_steps": 0, **FREE}
    t = trainer(path, "float64", in_backward=True, accumulation="adama", **options)
    reference = trainer(path, "float64", **options)
    gradients = []
    for micro in batches(0):  # each with the denominator of the whole batch
        probe = trainer(path, "float64", **options)
        share = sum(len(s.token_ids) for s in micro) / sum(len(s.token_ids) for m in batches(0) for s in m)
        found = {}
        probe.step([micro], lambda probe=probe, found=found: found.update({p: p.grad for p in probe.parameters}))
        gradients.append([share * found[p] if p in found else torch.zeros_like(p) for p in probe.parameters])
    t.step(batches(0)), reference.step(batches(0))
    for p, *g in zip(t.parameters, *gradients, strict=True):
        state = t.optimizer.state[p]
        assert torch.allclose(state["exp_avg"], 0.1 * sum(g), rtol=1e-9, atol=1e-15)
        assert torch.allclose(state["exp_avg_sq"], 0.05 * sum(x * x for x in g), rtol=1e-9, atol=1e-18)
    assert any(not torch.allclose(a, b) for a, b in zip(t.parameters, reference.parameters, strict=True))
    one, two = (trainer(path, "float64", in_backward=True, accumulation=a, **options) for a in ("adama", "armed"))
    for i in range(3):
        one.step([make_samples(seed=i)]), two.step([make_samples(seed=i)])
    a, b = everything(one), everything(two)
    assert max(np.linalg.norm(a[k] - b[k]) / np.linalg.norm(b[k]) for k in a) < 1e-9


@pytest.mark.parametrize("options", [{"name": "sgd", "accumulation": "momentum"}, {"accumulation": "adama"}])
def test_a_batch_refused_late_leaves_gradients_in_the_state_and_says_so(path, options):
    t = trainer(path, in_backward=True, **options)
    run(t, 0, 1)
    before = everything(t)
    bad = batches(1)
    bad[-1][0].logprobs[:] = -1e4
    bad[-1][0].advantages[:] = -1.0
    report = t.step(bad)
    assert report.skipped == "loss_not_finite" and not different_weights(t, before)
    assert report.partial_total == 1 and report.partial_units == 0
    changed = different(everything(t), before)
    assert changed and all("/" in name for name in changed)
    assert all(np.isfinite(x).all() for x in everything(t).values())
    bad[0][0].logprobs[:] = -1e4  # refused at the first micro-batch: nothing at all
    bad[0][0].advantages[:] = -1.0
    before = everything(t)
    report = t.step(bad)
    assert report.skipped == "loss_not_finite" and report.partial_total == 1 and not different(everything(t), before)
    assert run(t, 3, 4)[0]["skipped"] is None


def test_a_second_gradient_after_the_step_is_an_error(path):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = UnitOptimizer({"one": [p]}, [{"params": [p]}], rules.AdamWRule())
    optimizer.arm()
    p.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        p.sum().backward()


def test_a_parameter_without_a_gradient_does_not_hold_back_its_unit():
    p, unused = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    optimizer = UnitOptimizer({"one": [p, unused]}, [{"params": [p, unused]}], rules.AdamWRule())
    optimizer.arm()
    p.sum().backward()
    assert torch.equal(p, torch.ones(3))  # waits for the other
    optimizer.step()
    assert not torch.equal(p, torch.ones(3)) and torch.equal(unused, torch.ones(2))
    assert not optimizer.state[unused] and p.grad is None
