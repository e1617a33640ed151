from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.rollouts.types import TrainSample
from asyncrl.training.errors import BatchError
from asyncrl.training.packing import pack
from tests.training.tiny import make_samples

CPU = torch.device("cpu")


def sample(prompt, answer, versions=None, **kw):
    n = len(answer)
    return TrainSample(
        prompt_ids=np.asarray(prompt, np.int32),
        token_ids=np.asarray(answer, np.int32),
        logprobs=kw.get("logprobs", np.full(n, -1.0, np.float32)),
        versions=np.asarray(versions if versions is not None else [0] * n, np.int32),
        advantages=kw.get("advantages", np.ones(n, np.float32)),
    )


def test_plain_layout_by_hand():
    batch = pack([sample([5, 6, 7], [8, 9]), sample([3], [4, 2, 1])], 0, CPU, share=False)
    assert batch.input_1T.tolist() == [[5, 6, 7, 8, 3, 4, 2]]  # the last token predicts nothing
    assert batch.position_1T.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.predict_M.tolist() == [2, 3, 4, 5, 6]
    assert batch.target_M.tolist() == [8, 9, 4, 2, 1]
    assert batch.mask.sample_M.tolist() == [0, 0, 1, 1, 1]
    assert batch.documents.stem_lengths == [4, 3]


def test_shared_layout_by_hand():
    group = [sample([5, 6, 7, 3, 3], answer) for answer in ([8, 9], [4], [2, 1])]
    batch = pack(group, 0, CPU)
    assert batch.input_1T.tolist() == [
        [5, 6, 7, 3, 3, 8, 3, 2, 3]
    ]  # one stem, then each branch from the last prompt token
    assert batch.position_1T.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 4]]
    assert batch.target_M.tolist() == [8, 9, 2, 1, 4]
    assert batch.predict_M.tolist() == [4, 5, 6, 7, 8]
    assert batch.documents.branch_stem == [0, 0, 0]


def test_prompts_are_shared_only_if_that_saves_tokens():
    group = make_samples(groups=4, size=8, prompt=(20, 20), answer=(4, 4))
    assert pack(group, 0, CPU).input_1T.shape[1] == 4 * 19 + 32 * 4
    alone = make_samples(groups=8, size=1)
    assert not pack(alone, 0, CPU).documents.branch_lengths


def test_an_empty_micro_batch_becomes_a_dummy_that_trains_nothing():
    batch = pack([], 3, CPU)
    assert batch.tokens == batch.samples == 0
    assert len(batch.target_M) == 1 and not batch.mask.trained_M.any()


def test_samples_without_tokens_are_left_out():
    batch = pack([sample([5, 6], []), sample([5, 6], [7])], 0, CPU)
    assert batch.samples == 1 and batch.tokens == 1


def test_ages_are_split_from_samples_of_several_versions():
    batch = pack([sample([5], [1, 2, 3], [4, 4, 4]), sample([6], [1, 2], [4, 5])], 6, CPU)
    assert batch.age_M.tolist() == [2, 2, 2, -1, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "empty prompt"),
        ({"logprobs": np.zeros(1, np.float32)}, "2 tokens but 1 log-probs"),
        ({"logprobs": np.asarray([0.0, np.nan], np.float32)}, "not finite"),
        ({"logprobs": np.asarray([0.0, -np.inf], np.float32)}, "not finite"),
        ({"advantages": np.asarray([0.0, np.inf], np.float32)}, "not finite"),
    ],
)
def test_samples_that_cannot_be_trained_are_refused(change, message):
    """TRL #5001, NeMo #1885, AReaL #1554: NaN, -inf or missing log-probs."""
    with pytest.raises(BatchError, match=message):
        pack([replace(sample([5, 6], [7, 8]), **change)], 0, CPU)
