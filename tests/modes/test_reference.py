"""The trainer against the oracle, on samples that the oracle drew from a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from asyncrl.config.files import save_config
from asyncrl.modes import reference
from asyncrl.rollouts.types import Prompt
from asyncrl.training.opening import build_trainer
from tests.training.ranks import run_ranks
from tests.training.test_ranks import all_weights
from tests.training.tiny import VOCAB, tiny_folder, tiny_run

STEPS = 5


def config(path, dtype, aggregation="token_mean", advantage="group_norm"):
    return tiny_run(
        path,
        dtype,
        algorithm={"aggregation": aggregation, "advantage": advantage},
        sampling={"temperature": 0.8, "max_tokens": 8},
        batch={"groups": 4, "group_size": 4},
        trainer={"steps": STEPS},
        optim={"weight_decay": 0.1, "schedule": "cosine", "lr": 3e-3},
    )


def prompts():
    rng = np.random.default_rng(0)
    index = 0
    while True:
        yield Prompt(f"p:{index}", index, rng.integers(2, VOCAB, rng.integers(3, 9)).astype(np.int32), {})
        index += 1


def reward(prompt, text):
    return float(text.count("7") > 0) + 0.5 * (len(text.split()) % 2)


def flat(weights):
    return np.concatenate([w.double().numpy().ravel() for w in weights.values()])


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def cut(batch, rank, world):
    mine = batch[rank::world]
    return [mine[:3], mine[3:]] if rank == 0 else [mine, []]


CASES = [(tied, dtype) for tied in (True, False) for dtype in ("float64", "float32")]
LIMIT = {"float64": 1e-9, "float32": 1e-5}


def trainer_job(rank, world, recorded):
    """(weights, largest mismatch, last gradient norm) of the trainer for each recorded run."""
    out = {}
    for case, (cfg, batches) in recorded.items():
        trainer = build_trainer(cfg, rank, world)
        reports = [trainer.step(cut(batch, rank, world)) for batch in batches]
        out[case] = all_weights(trainer), max(r.mismatch for r in reports), reports[-1].grad_norm
    return out


def test_trainer_ends_at_the_oracle_s_weights(tmp_path):
    """Five synchronous steps, replayed by the oracle and trained on one and two ranks."""
    recorded, want, norms = {}, {}, {}
    for case in CASES:
        tied, dtype = case
        path = tiny_folder(tmp_path / f"{tied}_{dtype}", tied)
        cfg = config(path, dtype, "token_mean" if tied else "sequence_mean")
        lines = []
        trained, batches = reference.train(cfg, prompts(), reward, lines.append)
        recorded[case], want[case], norms[case] = (cfg, batches), flat(trained), lines[-1]["grad_norm"]
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert relative(want[case], flat(reference.weights(reference.load(cfg)[0]))) > 1e-3
        assert relative(flat(reference.replay(path, batches, cfg)), want[case]) < LIMIT[dtype]
    for ranks in ([trainer_job(0, 1, recorded)], run_ranks(2, trainer_job, recorded)):
        for case in CASES:
            for weights, mismatch, norm in (rank[case] for rank in ranks):
                assert relative(weights, want[case]) < LIMIT[case[1]], case
                assert mismatch < 1e-5  # the oracle's generation and the trainer agree on every token
                assert norm == pytest.approx(norms[case], rel=1e-5)


def test_on_policy_ratio_is_one_and_finish_is_the_end_token(tmp_path):
    cfg = config(tiny_folder(tmp_path / "model"), "float64")
    lines = []
    _, batches = reference.train(cfg, prompts(), reward, lines.append)
    assert [line["ratio"] for line in lines] == pytest.approx([1.0] * STEPS, abs=1e-6)
    for sample in (s for batch in batches for s in batch):
        ends = np.flatnonzero(sample.token_ids == 1)
        assert len(sample.token_ids) == (ends[0] + 1 if len(ends) else cfg.sampling.max_tokens)


@pytest.mark.parametrize("advantage", ["group_norm", "group_mean"])
def test_advantages_are_those_of_the_controller(tmp_path, advantage):
    from asyncrl.algorithms.advantage import ADVANTAGES

    cfg = config(tiny_folder(tmp_path / "model"), "float32", advantage=advantage)
    cfg.trainer.steps = 1
    rewards = []

    def noted(prompt, text):
        rewards.append((prompt.index, reward(prompt, text)))
        return rewards[-1][1]

    _, (batch,) = reference.train(cfg, prompts(), noted, lambda _: None)
    kept = {tuple(s.prompt_ids) for s in batch}
    ids = [i for i, _ in rewards]
    want = ADVANTAGES[advantage]([r for _, r in rewards], ids)
    by_prompt = {}
    for (i, _), a in zip(rewards, want, strict=True):
        by_prompt.setdefault(i, []).append(a)
    used = [a for a in by_prompt.values() if any(a)]
    assert len(kept) == cfg.batch.groups
    got = [s.advantages[0] for s in batch]
    np.testing.assert_allclose(got, [a for group in used for a in group][: len(got)], rtol=1e-5)


def test_groups_of_equal_rewards_stop_the_run_with_the_reason(tmp_path):
    cfg = config(tiny_folder(tmp_path / "model"), "float32")
    cfg.algorithm.max_filtered_groups = 6
    with pytest.raises(RuntimeError, match="equal rewards"):
        reference.train(cfg, prompts(), lambda p, t: 1.0, lambda _: None)


TASK = """
def task(split, index, completion=None):
    if completion is None:
        return {"prompt": f"t{2 + index % 50} t{3 + index % 40}"}
    return float(len(completion.split()) % 3)
"""


def test_the_command_trains_the_configuration_of_a_run(tmp_path):
    cfg = config(tiny_folder(tmp_path / "model"), "float32")
    (tmp_path / "task.py").write_text(TASK)
    cfg.env.kind, cfg.env.function = "function", f"{tmp_path}/task.py:task"
    cfg.trainer.steps = 2
    save_config(cfg, tmp_path)
    command = [sys.executable, "-m", "asyncrl.modes.reference", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in lines)
