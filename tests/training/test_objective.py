"""The policy-loss head in the trainer: the step of the four-product head, by one product less."""

from __future__ import annotations

import pytest
import torch

from asyncrl.training import model
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.objective import batch_loss
from asyncrl.training.opening import build_trainer
from asyncrl.training.packing import pack
from asyncrl.training.step import Trainer
from tests.kernels.dense import LargestTensor
from tests.training.tiny import VOCAB, make_samples, tiny_folder, tiny_lm, tiny_run


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def step(path, head, aggregation="token_mean", chunk=1 << 20, dtype="float64"):
    algorithm = {"loss_head": head, "aggregation": aggregation}
    trainer, seen = (
        build_trainer(tiny_run(path, dtype, algorithm=algorithm, trainer={"loss_chunk_bytes": chunk}), 0, 1),
        [],
    )
    samples = make_samples(groups=5, size=4)
    report = trainer.step(
        [samples[:9], [], samples[9:]],
        lambda: seen.append(torch.cat([p.grad.flatten() for p in trainer.parameters])),
    )
    facts = {k: v for k, v in vars(report).items() if not k.endswith("_s") and k != "seconds"}
    return seen[0], facts


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-12), ("float32", 1e-6)])
def test_both_heads_make_the_same_step(path, aggregation, dtype, limit):
    """torchtune #2425: a loss invariant to how tokens are cut; here also into chunks of the head."""
    want, report = step(path, "logprob", aggregation, dtype=dtype)
    assert report["clip_low_share"] > 0 and report["clip_high_share"] > 0
    for chunk in (1 << 20, 7 * 8 * VOCAB):
        got, same = step(path, "policy", aggregation, chunk, dtype)
        assert (got - want).norm() / want.norm() < limit
        for key, value in report.items():
            assert same[key] == (pytest.approx(value, rel=1e3 * limit) if isinstance(value, float) else value), key


def test_a_masked_micro_batch_has_zero_gradients_and_no_nan():
    """The dummy of a rank without samples (#22 of the notes, PipelineRL cc0a881), with NaN where nothing may look."""
    cfg = tiny_run("", "float32")
    batch = pack([], 0, torch.device("cpu"))
    batch.behaviour_M.fill_(torch.nan)
    batch.advantage_M.fill_(torch.nan)
    for head in ("policy", "logprob"):
        cfg.algorithm.loss_head = head
        policy = prepare(tiny_lm(), torch.float32)
        loss, _, _, metrics = batch_loss(policy, batch, cfg, 1)
        loss.backward()
        assert loss == 0 and metrics["ratio"] == 0
        assert all(p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in policy.parameters())


def test_the_policy_head_of_a_changed_model_follows_the_rule_of_its_logits(path):
    """Soft-capping reaches this head too."""
    cfg, losses = tiny_run("", "float64"), []
    for head in ("policy", "logprob"):
        cfg.algorithm.loss_head = head
        policy = prepare(tiny_lm(final_logit_softcapping=0.5).double(), torch.float64)
        assert policy.rule.softcap == 0.5
        batch = pack(make_samples(), 0, torch.device("cpu"), torch.float64)
        loss, _, _, _ = batch_loss(policy, batch, cfg, batch.tokens)
        loss.backward()
        losses.append([loss.item(), torch.cat([p.grad.flatten() for p in policy.parameters()])])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12)
    assert (losses[0][1] - losses[1][1]).norm() < 1e-12 * losses[1][1].norm()


def test_the_chunks_of_the_config_reach_the_heads(path, monkeypatch):
    seen = {}

    def note(name):
        kept = getattr(model, name)

        def call(*args, **options):
            seen[name] = {key: value for key, value in options.items() if "chunk" in key}
            return kept(*args, **options)

        monkeypatch.setattr(model, name, call)

    for name in ("selected_logprob", "policy_loss"):
        note(name)
    chunks = {"logprob_chunk": 5, "vocab_chunk": 7, "loss_chunk_bytes": 4000}
    for head in ("logprob", "policy"):
        trainer = build_trainer(tiny_run(path, algorithm={"loss_head": head}, trainer=chunks), 0, 1)
        trainer.step([make_samples()])
    assert seen == {
        "selected_logprob": {"token_chunk": 5, "vocab_chunk": 7},
        "policy_loss": {"chunk_bytes": 4000},
    }


@pytest.mark.parametrize("head", ["policy", "logprob"])
def test_a_step_never_holds_the_logits_of_all_its_tokens(head):
    """NeMo #4222, #3124, verl #6699, #6984, TRL #5349: the head of the loss, of scoring and of the noise floor."""
    vocabulary, rows = 4000, 16
    chunks = {"logprob_chunk": rows, "loss_chunk_bytes": rows * 4 * vocabulary}
    cfg = tiny_run("", "float32", algorithm={"loss_head": head}, trainer=chunks, report={"noise_floor_every": 1})
    trainer = Trainer(cfg, prepare(tiny_lm(vocab_size=vocabulary), torch.float32, rows), open_mesh(0, 1))
    samples = make_samples(groups=8, size=4)
    with LargestTensor() as largest:
        report = trainer.step([samples])
    embedding = trainer.policy.lm.get_output_embeddings().weight.numel()
    assert report.skipped is None and report.floor_tokens == report.tokens
    assert largest.elements <= max(embedding, rows * vocabulary) < report.tokens * vocabulary
