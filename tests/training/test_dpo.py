"""The preference step against transformers run twice with plain softmaxes, one answer at a time, however it is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from asyncrl.data.tokens import Conversation, Pair
from asyncrl.training.dpo import DpoTrainer, by_pair
from asyncrl.training.exact import exact
from asyncrl.training.loading import empty_policy
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy
from asyncrl.training.sft import pack_conversations
from tests.training.ranks import run_ranks
from tests.training.tiny import VOCAB, tiny_folder, tiny_run

OPTIM = {"lr": 1e-2, "warmup_steps": 0, "clip_norm": 1e9, "weight_decay": 0.1, "clip_guard": 0.0}
KINDS = {
    "sigmoid": {"beta": 0.3},
    "conservative": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.2, "length_normalised": True},
    "hinge": {"loss": "hinge", "beta": 0.2},
    "with likelihood": {"beta": 0.5, "length_normalised": True, "sft_weight": 0.3},
}
CPU = torch.device("cpu")


def pairs(count=8, seed=0):
    """Ragged pairs; some sides learn not all that follows the prompt."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = rng.integers(2, VOCAB, rng.integers(1, 7)).astype(np.int32)
        sides = []
        for _ in range(2):
            answer = rng.integers(2, VOCAB, rng.integers(1, 9)).astype(np.int32)
            learnt = np.concatenate([np.zeros(len(prompt), bool), rng.random(len(answer)) < 0.8])
            learnt[-1] = True
            sides.append(Conversation(np.concatenate([prompt, answer]), learnt))
        found.append(Pair(*sides, len(prompt)))
    return found


def dense(lm, batch):
    """Log-probs (P, 2), and numbers of tokens, one answer a forward with all logits."""
    rows, tokens = [], []
    for pair in batch:
        for side in (pair.chosen, pair.rejected):
            ids, learnt = torch.from_numpy(side.ids).long(), torch.from_numpy(side.learnt)
            with exact(lm.dtype):
                logp = F.log_softmax(lm(input_ids=ids[None]).logits[0, :-1], dim=-1)
            rows.append(logp[torch.arange(len(ids) - 1), ids[1:]][learnt[1:]].sum())
            tokens.append(int(learnt.sum()))
    return torch.stack(rows).view(-1, 2), torch.tensor(tokens).view(-1, 2)


def dense_loss(policy, reference, tokens, loss="sigmoid", beta=0.1, label_smoothing=0.0, **more):
    """Written anew, by the papers."""
    ratio = policy - reference
    if more.get("length_normalised"):
        ratio = ratio / tokens
    h = ratio[:, 0] - ratio[:, 1]
    if loss == "sigmoid":
        each = (1 - label_smoothing) * torch.log1p(torch.exp(-beta * h)) + label_smoothing * torch.log1p(
            (beta * h).exp()
        )
    elif loss == "ipo":
        each = (h - 1 / (2 * beta)) ** 2
    else:
        each = torch.clamp(1 - beta * h, min=0)
    return (each - more.get("sft_weight", 0.0) * policy[:, 0] / tokens[:, 0]).mean(), beta * ratio.detach()


class Other:
    """A reference for tests: another model, asked anew for each micro-batch."""

    def __init__(self, path, dtype="float64"):
        self.lm = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    @torch.no_grad()
    def scores(self, batch):
        return dense(self.lm, batch)[0].double() if batch else torch.zeros(0, 2, dtype=torch.float64)


class Kept:
    """A reference for tests: what was scored before, in memory."""

    def __init__(self, batch, scores):
        self.known = {id(pair): row for pair, row in zip(batch, scores, strict=True)}

    def scores(self, batch):
        return torch.stack([self.known[id(pair)] for pair in batch]) if batch else torch.zeros(0, 2)


def build(
    path, other=None, rank=0, world=1, budget=1000, dtype="float64", kind="sigmoid", load=load_policy, **sections
):
    sections["trainer"] = {"token_budget": budget, "steps": 9} | sections.get("trainer", {})
    sections["optim"] = OPTIM | sections.get("optim", {})
    cfg = tiny_run(path, dtype, dpo=KINDS[kind], **sections)
    trainer = DpoTrainer(cfg, load(path, getattr(torch, dtype)), open_mesh(rank, world, parallel=cfg.parallel))
    trainer.recorded = None if other is None else Other(other, dtype)
    return trainer


def oracle(path, other, kind, dtype="float64", steps=2):
    """(losses, figures of the first step, gradient of the first step, weights), one optimizer step a batch."""
    lm, reference = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)), Other(other, dtype)
    decayed = [p for p in lm.parameters() if p.ndim >= 2], [p for p in lm.parameters() if p.ndim < 2]
    groups = [{"params": p, "weight_decay": w} for p, w in zip(decayed, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses, figures, grads = [], [], []
    for step in range(steps):
        policy, tokens = dense(lm, pairs(seed=step))
        loss, reward = dense_loss(policy, reference.scores(pairs(seed=step)), tokens, **KINDS[kind])
        loss.backward()
        grads.append(flat([p.grad for p in lm.parameters()]))
        losses.append(loss.item())
        better, likelier = (reward[:, 0] > reward[:, 1]).double(), (policy[:, 0] > policy[:, 1]).double()
        columns = [*reward.T, reward[:, 0] - reward[:, 1], better, *policy.detach().T, likelier]
        figures.append([c.mean().item() for c in columns])
        optimizer.step()
        optimizer.zero_grad()
    return losses, figures[0], grads[0], flat([p.detach() for _, p in lm.named_parameters()])


def flat(tensors):
    return np.concatenate([t.numpy().ravel() for t in tensors])


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def learnt(trainer, steps=2):
    reports, first, step = [], [], trainer.optimizer.step

    def seen(*args):
        if not first:
            first.append(flat([whole(p.grad) for p in trainer.parameters]))
        return step(*args)

    if not trainer.cfg.optim.in_backward:
        trainer.optimizer.step = seen
    reports = [trainer.learn(pairs(seed=s)) for s in range(steps)]
    figures = [reports[0].figures[name] for name in DpoTrainer.figures]
    weights = flat([whole(p) for _, p in trainer.named_parameters_hf()])
    return [r.loss for r in reports], figures, first[0] if first else None, weights


def same(found, wanted, exactness=1e-12, after=1e-9):
    assert found[0][0] == pytest.approx(wanted[0][0], rel=exactness)
    assert found[0] == pytest.approx(wanted[0], rel=after)
    assert found[1] == pytest.approx(wanted[1], rel=1e-9 if exactness < 1e-8 else 1e-4)
    if found[2] is not None:
        assert np.linalg.norm(found[2] - wanted[2]) < exactness * np.linalg.norm(wanted[2])
    assert np.linalg.norm(found[3] - wanted[3]) < after * np.linalg.norm(wanted[3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_two_dense_models_however_cut(folder, other, kind):
    wanted = oracle(folder, other, kind)
    for budget in (1000, 40) if kind != "sigmoid" else (1000, 40, 1):
        same(learnt(build(folder, other, budget=budget, kind=kind)), wanted)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_in_float32(folder, other, kind):
    same(learnt(build(folder, other, dtype="float32", kind=kind)), oracle(folder, other, kind, "float32"), 2e-6, 1e-4)


@pytest.mark.parametrize("budget", [1000, 40])
def test_the_optimizer_in_the_backward_pass_learns_the_same(folder, other, budget):
    trainer = build(folder, other, budget=budget, optim={"in_backward": True})
    same(learnt(trainer), oracle(folder, other, "sigmoid"))


def ranks_job(rank, world, path, other):
    """By way of dividing the model: what two steps gave, held-out figures, scores."""
    found = {}
    for name, trainer, parallel in (
        ("sharded", {}, {}),
        ("whole", {"shard": False}, {}),
        ("tp", {}, {"tp": 2}),
        ("in backward", {}, {}),
    ):
        optim = {"in_backward": name == "in backward"}
        load = load_policy if name == "whole" else empty_policy
        t = build(path, other, rank, world, 40, load=load, trainer=trainer, parallel=parallel, optim=optim)
        scores = t.scores(pairs(5)).tolist()
        found[name] = t.evaluation(pairs(5)), scores, learnt(t)
        found[name, "one pair"] = t.learn(pairs(1)).loss  # one rank has nothing
    return found


def test_two_ranks_learn_what_one_learns(folder, other):
    alone = build(folder, other)
    held, scores, wanted = alone.evaluation(pairs(5)), alone.scores(pairs(5)), oracle(folder, other, "sigmoid")
    dense_scores, _ = dense(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), pairs(5))
    torch.testing.assert_close(scores, dense_scores.detach(), rtol=1e-12, atol=0)
    learnt(alone)
    last = alone.learn(pairs(1)).loss
    for by_mode in run_ranks(2, ranks_job, folder, other):
        for name in ("sharded", "whole", "tp", "in backward"):
            figures, found_scores, found = by_mode[name]
            assert figures == pytest.approx(held, rel=1e-12)
            np.testing.assert_allclose(found_scores, scores.numpy(), rtol=1e-12)
            same((*found[:2], found[2] if name != "tp" else None, found[3]), wanted)
            assert by_mode[name, "one pair"] == pytest.approx(last, rel=1e-9)


LORA = {"rank": 4, "targets": ["all-linear"]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("more", [{}, {"dora": True}, {"dropout": 0.3}])
def test_at_the_first_step_policy_and_reference_are_the_same_to_the_last_bit(folder, dtype, more):
    trainer = build(folder, dtype=dtype, lora=LORA | more, budget=40)
    held = trainer.evaluation(pairs(16, seed=5))
    report = trainer.learn(pairs(16))
    assert report.loss == pytest.approx(math.log(2.0), abs=1e-15) and report.figures["dpo/margin"] == 0.0
    assert held["eval/loss"] == pytest.approx(math.log(2.0), abs=1e-15)
    assert report.figures["dpo/accuracy"] == held["eval/accuracy"] == 0.5 and held["eval/margin"] == 0.0
    assert trainer.learn(pairs(16)).figures["dpo/margin"] != 0.0


@pytest.mark.parametrize("more", [{}, {"dora": True}, {"dropout": 0.3}])
def test_the_model_without_adapters_is_the_stored_start(folder, more):
    batch = pairs(12)
    results = []
    for stored in (False, True):
        trainer = build(folder, dtype="float32", lora=LORA | more, budget=40)
        trainer.recorded = Kept(batch, trainer.scores(batch)) if stored else None
        reports = [trainer.learn(batch) for _ in range(3)]
        results.append(([r.loss for r in reports], reports[-1].figures, flat([whole(p) for p in trainer.parameters])))
    assert results[0][:2] == results[1][:2] and np.array_equal(results[0][2], results[1][2])
    assert results[0][0][2] < results[0][0][1] < math.log(2.0)


def test_the_reference_is_scored_without_dropout(folder):
    trainer = build(folder, lora=LORA | {"dropout": 0.5})
    batch = pairs(4)
    for _ in range(3):
        trainer.learn(batch)
    packed = pack_conversations(trainer.conversations(batch), CPU)
    with exact(torch.float64):
        plain = trainer._reference(packed, batch)
        with trainer.dropout():
            assert torch.equal(trainer._reference(packed, batch), plain)
            dropped = by_pair(trainer.policy(packed, 1.0)[0], packed)[0]
    start, _ = dense(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), batch)
    torch.testing.assert_close(plain, start.detach(), rtol=1e-12, atol=0)
    assert (dropped - trainer.scores(batch)).abs().min() > 1e-6


def test_each_answer_gets_the_log_probs_of_its_own_tokens():
    """Whatever the order in which a row holds the documents: longest first."""
    batch = pairs(5)
    sides = [side for pair in batch for side in (pair.chosen, pair.rejected)]
    packed = pack_conversations(sides, CPU)
    sums, tokens = by_pair(packed.target_M.float(), packed)
    assert sums.flatten().tolist() == [side.ids[side.learnt].sum() for side in sides]
    assert tokens.flatten().tolist() == [side.learnt.sum() for side in sides]


def test_pairs_without_a_batch_change_nothing(folder):
    trainer = build(folder, lora=LORA)
    report = trainer.learn([])
    assert (report.skipped, report.samples, trainer.version) == ("no_tokens", 0, 1)


class Logits(TorchDispatchMode):
    """Notes tensors that have a vocabulary for each of many tokens."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and VOCAB in x.shape and x.numel() > 32 * VOCAB:
                self.found.append((func, tuple(x.shape)))
        return out


@pytest.mark.parametrize("lora", [{}, LORA])
def test_the_logits_of_all_tokens_never_exist(folder, other, lora):
    trainer = build(folder, None if lora else other, lora=lora or {"rank": 0})
    trainer.policy.logprob_chunk = 16
    with Logits() as seen:
        trainer.learn(pairs(16))
    assert not seen.found
    trainer.policy.logprob_chunk = 4096
    with Logits() as seen:
        trainer.learn(pairs(16))
    assert seen.found, "the instrument sees them when the chunk is that large"


def test_a_preference_is_learnt(folder):
    """Of two answers the one of an even token is chosen; held-out pairs follow the same rule."""

    def ruled(seed, count=24):
        rng, found = np.random.default_rng(seed), []
        for _ in range(count):
            prompt = rng.integers(2, VOCAB, 4).astype(np.int32)
            ends = 2 * rng.integers(1, 4, 2) + np.array([0, 1])
            mask = np.array([False] * 4 + [True])
            found.append(Pair(*(Conversation(np.append(prompt, e).astype(np.int32), mask) for e in ends), 4))
        return found

    trainer = build(folder, dtype="float32", lora={"rank": 8, "targets": ["all-linear"]}, optim={"lr": 5e-3})
    before = trainer.evaluation(ruled(99))
    reports = [trainer.learn(ruled(seed)) for seed in range(25)]
    after = trainer.evaluation(ruled(99))
    assert before["eval/accuracy"] == 0.5 and after["eval/accuracy"] > 0.95
    assert after["eval/likelier"] > before["eval/likelier"] and after["eval/loss"] < 0.5 < before["eval/loss"]
    assert reports[-1].figures["dpo/margin"] > 1.0 and reports[-1].figures["dpo/reward_rejected"] < 0
