from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.report.keys import declared
from asyncrl.rollouts.types import TrainSample
from asyncrl.training.errors import BatchError, ModelError
from asyncrl.training.exact import exact
from asyncrl.training.mesh import needed_backend, open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.opening import build_trainer
from asyncrl.training.step import Trainer
from tests.training.tiny import make_samples, tiny_folder, tiny_lm, tiny_run


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in trainer.named_parameters_hf()]).clone()


def gradient(trainer, micro_batches) -> torch.Tensor:
    """The summed gradient of a step, before clipping."""
    seen = []
    trainer.step(micro_batches, lambda: seen.append(torch.cat([p.grad.flatten() for p in trainer.parameters])))
    return seen[0]


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-6)])
def test_gradients_do_not_depend_on_cuts_order_or_packing(path, aggregation, dtype, limit, monkeypatch):
    """One global denominator, ragged samples, empty micro-batches.

    prime-rl #2562, open-instruct #1137, torchtune #2980: a mean of means. ms-swift #10116: divided by the number of
    micro-batches once more. SkyRL #1635: 0 * NaN.
    """
    samples = make_samples(groups=5, size=4)
    shuffled = [samples[i] for i in np.random.default_rng(1).permutation(len(samples))]

    def run(micro_batches):
        cfg = tiny_run(path, dtype, algorithm={"aggregation": aggregation})
        return gradient(build_trainer(cfg, 0, 1), micro_batches)

    whole = run([samples])
    assert relative(run([samples[:3], [], samples[3:4], samples[4:]]), whole) < limit
    assert relative(run([shuffled]), whole) < limit
    assert relative(run([[s] for s in samples]), whole) < limit
    monkeypatch.setattr("asyncrl.training.packing.SHARE_BELOW", 0.0)
    assert relative(run([samples]), whole) < limit


def test_activation_checkpointing_changes_no_gradient(path):
    samples = make_samples()
    plain, recomputed = (
        gradient(build_trainer(tiny_run(path, trainer={"activation_checkpointing": choice}), 0, 1), [samples])
        for choice in ("none", "full")
    )
    assert relative(recomputed, plain) < 1e-13


def test_weights_change_once_before_update_has_returned(path):
    trainer = build_trainer(tiny_run(path), 0, 1)
    before, calls = weights(trainer), []
    trainer.step([make_samples()], lambda: calls.append(torch.equal(weights(trainer), before)))
    assert calls == [True]
    assert not torch.equal(weights(trainer), before)


def test_every_step_uses_the_rate_of_its_version(path):
    """torchtune: in-backward optimizers ignored the schedule, and took the first warm-up step at the full rate."""
    cfg = tiny_run(path, optim={"lr": 0.1, "warmup_steps": 4, "schedule": "linear"}, trainer={"steps": 8})
    trainer = build_trainer(cfg, 0, 1)
    seen = []
    for _ in range(3):
        report = trainer.step([make_samples()])
        seen.append(report.lr)
        assert {g["lr"] for g in trainer.optimizer.param_groups} == {report.lr}
    assert seen == pytest.approx([0.025, 0.05, 0.075])


def test_the_norm_is_reported_before_clipping_and_the_update_is_clipped(path):
    cfg = tiny_run(path, optim={"clip_norm": 0.01})
    trainer = build_trainer(cfg, 0, 1)
    clipped = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (clipped.append(torch.cat([p.grad.flatten() for p in trainer.parameters])), step())
    report = trainer.step([make_samples()])
    assert report.grad_norm > 0.1
    assert clipped[0].norm().item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(path, kind, monkeypatch):
    trainer = build_trainer(tiny_run(path, "float32"), 0, 1)
    trainer.step([make_samples()])
    before, optimizer_before = weights(trainer), trainer.optimizer.state[trainer.parameters[0]]["exp_avg"].clone()
    samples = make_samples()
    if kind == "loss":
        samples[0].logprobs[:] = -1e4  # the ratio overflows
        samples[0].advantages[:] = -1.0
    else:
        hook = trainer.parameters[3].register_hook(lambda g: g * float("inf"))
    called = []
    report = trainer.step([samples[:2], samples[2:]], lambda: called.append(1))
    assert report.skipped == f"{kind}_not_finite"
    assert not called and torch.equal(weights(trainer), before)
    assert torch.equal(trainer.optimizer.state[trainer.parameters[0]]["exp_avg"], optimizer_before)
    assert trainer.version == report.version == 2 and trainer.skipped == {f"{kind}_not_finite": 1}
    if kind == "gradient":
        hook.remove()
    good = trainer.step([make_samples()])
    assert good.skipped is None and math.isfinite(good.loss)


@pytest.mark.parametrize("micro_batches", [[], [[]], [[], []]])
def test_a_batch_with_nothing_to_train_is_skipped(path, micro_batches):
    """torchtune, open-instruct #1685: nothing to learn from, 0/0; or the loss has no gradient and FSDP hangs."""
    trainer = build_trainer(tiny_run(path), 0, 1)
    before = weights(trainer)
    report = trainer.step(micro_batches)
    assert report.skipped == "no_tokens" and trainer.version == 1
    assert torch.equal(weights(trainer), before)


def scored_samples(temperature: float = 1.0) -> list[TrainSample]:
    """Three samples with the log-probs that transformers gives them under the weights of ``path``."""
    samples, lm = make_samples(groups=3, size=1), tiny_lm().double()
    with exact(torch.float64), torch.no_grad():
        for s in samples:
            ids = torch.as_tensor(np.concatenate([s.prompt_ids, s.token_ids]), dtype=torch.int64)
            logp = (lm(ids[None]).logits[0, :-1] / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            s.logprobs[:] = logp[len(s.prompt_ids) - 1 :].float().numpy()
    return samples


def test_ratios_of_tokens_and_samples_by_hand(path):
    """TRL #4772: the ratio of a sequence explodes with its length; a mean over tokens does not show it."""
    samples = scored_samples()
    for s in samples:
        s.logprobs -= 0.1
    report = build_trainer(tiny_run(path), 0, 1).step([samples])
    sequences = [math.exp(0.1 * len(s.token_ids)) for s in samples]
    assert len(set(sequences)) > 1
    assert report.ratio_sequence_mean == pytest.approx(np.mean(sequences), rel=1e-5)
    assert report.ratio_mean == pytest.approx(math.exp(0.1), rel=1e-5)
    assert report.ratio_geometric_mean == pytest.approx(math.exp(0.1), rel=1e-5)
    assert report.ess_share == pytest.approx(1.0, abs=1e-6)


def test_ratio_is_one_at_any_temperature_with_unchanged_weights(path):
    """TRL #4159: with T != 1 the first ratio was 2. Behaviour log-probs are those of the distribution sampled from."""
    for temperature in (0.6, 1.0, 1.3):
        trainer = build_trainer(tiny_run(path, sampling={"temperature": temperature}), 0, 1)
        samples = scored_samples(temperature)
        report = trainer.step([samples])
        assert report.ratio_mean == pytest.approx(1.0, abs=1e-6)
        assert report.mismatch < 1e-6 and report.clip_low_share == report.clip_high_share == 0


def test_mismatch_is_measured_on_current_samples_of_one_version_and_split_from_staleness(path):
    trainer = build_trainer(tiny_run(path), 0, 1)
    trainer.version = 5
    samples = make_samples(groups=4, size=1, answer=(4, 4))
    for s, versions in zip(samples, ([5] * 4, [3] * 4, [4, 4, 5, 5], [5] * 4), strict=True):
        s.versions[:] = versions
    report = trainer.step([samples[:1], samples[1:]])
    assert report.mismatch_tokens == 8
    assert set(report.mismatch_by_age) == {"2", "mixed"}
    # The same numbers for each sample alone:
    alone = []
    for s in samples:
        one = build_trainer(tiny_run(path), 0, 1)
        one.version = 5
        r = one.step([[s]])
        alone.append(r.mismatch if r.mismatch is not None else next(iter(r.mismatch_by_age.values())))
    assert report.mismatch == pytest.approx((alone[0] + alone[3]) / 2, rel=1e-12)
    assert report.mismatch_by_age == pytest.approx({"2": alone[1], "mixed": alone[2]}, rel=1e-12)
    assert report.mismatch_max >= report.mismatch
    assert {k: v for k, v in report.metrics().items() if k.startswith("mismatch/age/")} == {
        f"mismatch/age/{age}": mean for age, mean in report.mismatch_by_age.items()
    }
    for key in report.metrics():
        declared(key)


def test_the_noise_floor_is_what_the_trainer_differs_from_itself(path):
    """TRL #6789, comment: chunk sizes alone move log-probs. The floor shows how much of a mismatch is the trainer's."""
    samples, cuts = make_samples(groups=4, size=4), slice(0, 10)
    single, double = (
        build_trainer(tiny_run(path, dtype, report={"noise_floor_every": 2}), 0, 1) for dtype in ("float32", "float64")
    )
    reports = [trainer.step([samples[cuts], samples[10:], []]) for trainer in (single, double)]
    for report, least, most in zip(reports, (1e-9, 1e-18), (1e-5, 1e-13), strict=True):
        assert report.floor_tokens == sum(len(s.token_ids) for s in samples[cuts])
        assert least < report.floor <= report.floor_max < most
    assert single.step([samples]).floor is None  # version 1
    assert single.step([samples]).floor is not None


def test_the_noise_floor_sees_a_layout_that_changes_log_probs(path, monkeypatch):
    trainer = build_trainer(tiny_run(path), 0, 1)
    score = trainer._score_otherwise
    calls = []

    def off_by_a_tenth(samples):
        calls.append(len(samples))
        batch, logp_M = score(samples)
        return batch, logp_M + 0.1

    monkeypatch.setattr(trainer, "_score_otherwise", off_by_a_tenth)
    report = trainer.step([make_samples(groups=3, size=1)])
    assert calls == [2, 1]
    assert report.floor == pytest.approx(0.1) and report.floor_max == pytest.approx(0.1)


def test_measuring_the_noise_floor_changes_no_weight(path):
    with_floor, without = (build_trainer(tiny_run(path, report={"noise_floor_every": every}), 0, 1) for every in (1, 0))
    for trainer in (with_floor, without):
        trainer.step([make_samples(), []])
    assert torch.equal(weights(with_floor), weights(without))


def test_report_means_are_over_all_tokens_not_over_micro_batches(path):
    samples = make_samples(groups=5, size=3)
    one, cut = (build_trainer(tiny_run(path), 0, 1).step(m) for m in ([samples], [samples[:2], [], samples[2:]]))
    names = "loss entropy ratio_mean ratio_max ratio_sequence_mean ratio_geometric_mean ess_share approx_kl"
    for name in (*names.split(), "clip_low_share", "clip_high_share", "advantage_abs_mean", "grad_norm"):
        assert getattr(cut, name) == pytest.approx(getattr(one, name), rel=1e-10), name
    assert one.clip_low_share > 0 and one.clip_high_share > 0
    assert one.tokens == sum(len(s.token_ids) for s in samples) and one.samples == len(samples)


def test_report_metrics_are_declared(path):
    for key in build_trainer(tiny_run(path), 0, 1).step([make_samples()]).metrics():
        declared(key)


def test_updates_of_one_millionth_survive_with_fp32_masters(path):
    """AReaL #1369: AdamW on bf16 parameters loses updates of 1e-6: bf16(0.02) - 1e-6 == bf16(0.02)."""
    cfg = tiny_run(path, "float32", optim={"lr": 1e-6, "warmup_steps": 0})
    trainer = build_trainer(cfg, 0, 1)
    before = weights(trainer)
    trainer.step([make_samples()])
    moved = (weights(trainer) - before).abs()
    assert 0.5e-6 < moved.median() < 2e-6


def test_a_bad_sample_is_an_error_before_anything_changes(path):
    trainer = build_trainer(tiny_run(path), 0, 1)
    samples = make_samples()
    samples[3].logprobs[0] = np.nan
    with pytest.raises(BatchError, match="group 0"):
        trainer.step([samples])
    assert trainer.version == 0


def test_what_is_trained_but_never_sent_is_refused(path):
    """verl #7495: for two months the frozen base was sent while other parameters were trained."""
    policy = prepare(tiny_lm(), torch.float32)
    policy.lora = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ModelError, match=r"1 trained parameters would never reach an engine, e\.g\. lora"):
        Trainer(tiny_run(path, "float32"), policy, open_mesh(0, 1))
    policy.lora.requires_grad_(False)
    Trainer(tiny_run(path, "float32"), policy, open_mesh(0, 1))


def test_tied_weights_are_listed_once_in_model_order(path):
    names = [n for n, _ in build_trainer(tiny_run(path), 0, 1).named_parameters_hf()]
    assert names[0] == "model.embed_tokens.weight" and "lm_head.weight" not in names
    assert len(names) == len(set(names))
    untied = Trainer(tiny_run(path), prepare(tiny_lm(tied=False).double(), torch.float64), open_mesh(0, 1))
    assert untied.named_parameters_hf()[-1][0] == "lm_head.weight"


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bf16_compute_on_one_cpu_rank(path, group_of_one):
    """AReaL #1292: with bf16 parameters the moments of AdamW were bf16 too, and updates of 1e-6 were lost."""
    cfg = tiny_run(path, "float32", optim={"lr": 1e-6, "warmup_steps": 0})
    assert needed_backend(cfg, 1) is None or torch.cuda.is_available()
    cfg.model.compute_dtype = "bfloat16"
    assert needed_backend(cfg, 1) is not None
    trainer = build_trainer(cfg, 0, 1, torch.device("cpu"))
    before = torch.cat([p.full_tensor().flatten() for _, p in trainer.named_parameters_hf()]).detach().clone()
    report = trainer.step([make_samples()])
    moments = [state[key] for state in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(trainer.parameters) and {m.dtype for m in moments} == {torch.float32}
    after = torch.cat([p.full_tensor().flatten() for _, p in trainer.named_parameters_hf()]).detach()
    exact_report = build_trainer(tiny_run(path, "float32"), 0, 1, torch.device("cpu")).step([make_samples()])
    assert 0.5e-6 < (after - before).abs().median() < 2e-6
    assert report.grad_norm == pytest.approx(exact_report.grad_norm, rel=0.05)
    assert report.grad_norm != exact_report.grad_norm


def test_bf16_compute_without_a_process_group_is_refused(path):
    cfg = tiny_run(path, "float32")
    cfg.model.compute_dtype = "bfloat16"
    with pytest.raises(ModelError, match="process group"):
        build_trainer(cfg, 0, 1, torch.device("cpu"))
