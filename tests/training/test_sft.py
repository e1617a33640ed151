"""The SFT step against transformers' own loss, one conversation at a time, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from asyncrl.data.chat import Conversation
from asyncrl.training.exact import exact
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy
from asyncrl.training.sft import SftTrainer, share
from tests.training.ranks import run_ranks
from tests.training.tiny import VOCAB, tiny_folder, tiny_run

OPTIM = {"lr": 1e-2, "warmup_steps": 0, "clip_norm": 1e9, "weight_decay": 0.1}


def talks(count=11, seed=0):
    """Ragged conversations, some with two answers, one with nothing learnt."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        n = int(rng.integers(3, 17))
        learnt = rng.random(n) < 0.4
        learnt[0] = False
        learnt[-1] = i != 3
        found.append(Conversation(rng.integers(2, VOCAB, n).astype(np.int32), learnt & (i != 3)))
    return found


def build(path, rank=0, world=1, budget=1000, shard=True, **optim):
    cfg = tiny_run(path, optim=OPTIM | optim, trainer={"token_budget": budget, "shard": shard})
    return SftTrainer(cfg, load_policy(path, torch.float64), open_mesh(rank, world))


def oracle(path, steps=2):
    """(losses, weights) with transformers' attention, all logits, one conversation a forward."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    groups = [
        {"params": [p for p in lm.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in lm.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        batch = talks(seed=step)
        tokens = sum(int(c.learnt.sum()) for c in batch)
        total = 0.0
        for c in batch:
            ids, learnt = torch.from_numpy(c.ids).long(), torch.from_numpy(c.learnt)
            with exact(torch.float64):
                logits = lm(input_ids=ids[None]).logits[0, :-1]
                loss = F.cross_entropy(logits[learnt[1:]], ids[1:][learnt[1:]], reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, np.concatenate([p.detach().numpy().ravel() for _, p in lm.named_parameters()])


def learn(trainer, steps=2):
    losses = [trainer.learn(talks(seed=step)).loss for step in range(steps)]
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for _, p in trainer.named_parameters_hf()]
    return losses, np.concatenate([w.detach().numpy().ravel() for w in weights])


def close(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-9)
    assert np.linalg.norm(found[1] - wanted[1]) / np.linalg.norm(wanted[1]) < 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("budget", [1000, 20, 1])
def test_steps_are_those_of_transformers_however_cut(folder, budget):
    close(learn(build(folder, budget=budget)), oracle(folder))


@pytest.mark.parametrize("budget", [1000, 20])
def test_the_optimizer_in_the_backward_pass_learns_the_same(folder, budget):
    trainer = build(folder, budget=budget, in_backward=True)
    close(learn(trainer), oracle(folder))
    before = learn(trainer, 0)[1]
    trainer.cfg.optim.max_loss = 1e-9
    report = trainer.learn(talks())
    assert report.skipped == "loss_over_limit" and np.array_equal(learn(trainer, 0)[1], before)
    assert report.grad_norm > 0


def ranks_job(rank, world, path):
    """By sharding: the loss before, then what two steps gave."""
    found = {}
    for shard in (True, False):
        trainer = build(path, rank, world, budget=30, shard=shard)
        found[shard] = trainer.loss(talks()), learn(trainer)
    return found


def test_steps_are_those_of_transformers_on_three_ranks(folder):
    wanted = oracle(folder)
    for by_mode in run_ranks(3, ranks_job, folder):
        for before, found in by_mode.values():
            assert before == pytest.approx(wanted[0][0], rel=1e-9)
            close(found, wanted)


def test_the_loss_of_a_batch_changes_nothing(folder):
    trainer = build(folder)
    before = trainer.loss(talks())
    assert trainer.loss(talks()) == before
    assert trainer.learn(talks()).loss == pytest.approx(before, rel=1e-12)
    assert trainer.loss(talks()) < before


def test_a_batch_without_anything_learnt_is_skipped(folder):
    trainer = build(folder)
    weights = [p.detach().clone() for p in trainer.parameters]
    report = trainer.learn([talks()[3]])
    assert (report.skipped, trainer.version) == ("no_tokens", 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, trainer.parameters, strict=True))


def test_every_rank_has_as_many_micro_batches():
    batch = talks(7)
    cuts = [share(batch, rank, 3, budget=20) for rank in range(3)]
    assert len({len(cut) for cut in cuts}) == 1
    assert sorted(len(c) for cut in cuts for micro in cut for c in micro) == sorted(map(len, batch))
    for micro in (micro for cut in cuts for micro in cut):
        assert len(micro) <= 1 or sum(map(len, micro)) <= 20
    assert share(batch[:1], 2, 3, budget=20) == [[]]
