"""The pass that scores all pairs of a run before its first step: by one rank or two, from any point on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.data.example import Example
from asyncrl.data.mixture import Mixture
from asyncrl.training.errors import CheckpointError
from asyncrl.training.loading import empty_policy
from asyncrl.training.model import load_policy
from asyncrl.training.reference import Upcoming, record
from asyncrl.training.reference_store import ReferenceStore
from tests.training.ranks import run_ranks
from tests.training.test_dpo import build, dense, pairs
from tests.training.tiny import tiny_folder

ALL, HELD = pairs(14, seed=3), pairs(3, seed=4)


class Numbers:
    """A corpus for tests: example i is the i-th of ``ALL``."""

    name, blocks = "numbers", ()

    def __len__(self):
        return len(ALL)

    def example(self, index):
        return Example(str(index))

    def identity(self):
        return {"records": len(ALL)}


def upcoming(steps, drawn=None):
    stream = Mixture([Numbers()], [1.0], seed=5)

    def draw():
        batch = stream.take(4, lambda example: ALL[int(example.place)])
        if drawn is not None:
            drawn.append(batch)
        return batch

    return Upcoming(stream, draw, steps)


def job(rank, world, path, root, fails=False):
    """Scores of all pairs after a pass of 4 steps (an epoch and a bit), what it said, and a failure on rank 0."""
    load = load_policy if world == 1 else empty_policy
    trainer, said, run = build(path, None, rank, world, budget=40, load=load), [], upcoming(4)
    trainer.data = {"records": len(ALL)}
    record(trainer, Path(root) / str(world), run, HELD, said.append)
    scores, bound = trainer.recorded.scores([*ALL, *HELD]).tolist(), trainer.data
    assert run.stream.drawn == [0], "the stream is where it was"
    if rank == 0:
        ReferenceStore.commit = lambda self, **facts: (_ for _ in ()).throw(CheckpointError("no space"))
    with pytest.raises(CheckpointError, match="no space"):
        record(trainer, Path(root) / f"failed_{world}", upcoming(4), HELD, said.append)
    return scores, said, bound


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def test_the_pass_scores_what_the_run_will_draw(path, tmp_path):
    wanted, _ = dense(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), [*ALL, *HELD])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceStore, "commit", ReferenceStore.commit)  # the job replaces it
        alone = job(0, 1, path, str(tmp_path))
    for scores, said, bound in (alone, *run_ranks(2, job, path, str(tmp_path))):
        torch.testing.assert_close(torch.tensor(scores, dtype=torch.float64), wanted.detach(), rtol=1e-12, atol=0)
        assert said[0] == "reference: scoring the pairs of steps 1 to 4 by the starting weights"
        assert said[4] == "reference: 4 of 4 steps scored"
        assert bound == alone[2] and bound["reference.model"]


def test_it_goes_on_where_it_was_and_only_there(path, tmp_path):
    drawn = []
    for _ in range(2):
        trainer = build(path, None)
        record(trainer, tmp_path, upcoming(2, drawn), HELD, len)
        assert len(drawn) == 2
    with pytest.raises(CheckpointError, match="never scored"):
        trainer.recorded.scores(ALL)
    again = build(path, None)
    record(again, tmp_path, upcoming(4, drawn), HELD, len)
    assert len(drawn) == 4 and again.recorded.scores(ALL).shape == (14, 2)
    other = build(path, None)
    other.data = {"records": 3}
    record(other, tmp_path, upcoming(2, drawn), HELD, len)
    assert len(drawn) == 6, "positions in other data mean other pairs"


def test_scores_of_other_weights_are_refused(path, tmp_path):
    record(build(path, None), tmp_path / "a", upcoming(1), HELD, len)
    other = build(tiny_folder(tmp_path / "other", seed=7), None)
    with pytest.raises(CheckpointError, match="log-probs of other weights than those of"):
        record(other, tmp_path / "a", upcoming(1), HELD, len)
