"""From an engine's answer to the trainer: what is trained is what was drawn."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncrl.actors.batches import cut, payloads
from asyncrl.actors.messages import sample_of
from asyncrl.config.schema import Config
from asyncrl.rollouts.cut import decode
from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.types import Group, Prompt, Sample
from tests.actors.test_messages import message_of

PIECES = ["a", "b", "aa", "ab", "ba", "aab", "Ġ", "Ġa", "Ã", "©", "Ã©"]  # the last three: two halves of é, and é
MERGES = [("a", "a"), ("a", "b"), ("b", "a"), ("aa", "b"), ("Ġ", "a"), ("Ã", "©")]
BPE = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, MERGES))
BPE.pre_tokenizer, BPE.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
IDS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12)


def drawn(ordinal: int, index: int, ids: list[int]) -> Sample:
    rng = np.random.default_rng([ordinal, index])
    logprobs = -rng.random(len(ids), dtype=np.float32)
    return Sample(
        ordinal, index, np.array(ids, np.int32), logprobs, np.zeros(len(ids), np.int32), "stop", "generator/1"
    )


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    with Ledger(tmp_path_factory.mktemp("ledger")) as ledger:
        yield ledger


NUMBERS = count()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(IDS, min_size=2, max_size=4))
@example([[0, 0], [0, 1, 0], [8, 9], [8]])  # a+a for aa, a+b for ab, a character cut in two, half a character
def test_token_ids_reach_the_trainer_as_they_were_drawn(ledger, answers):
    """TRL #5224, ms-swift #10012, NeMo-Gym #1416: text that was decoded and encoded again has other ids."""
    ordinal = next(NUMBERS)
    group = Group(ordinal, Prompt(f"train:{ordinal}", ordinal, np.array([0, 0, 1], np.int32), {}))
    ledger.dispatched(group, "generator/1", size=len(answers), version=0)
    for index, ids in enumerate(answers):
        sample = sample_of(message_of(drawn(ordinal, index, ids)))
        sample.text = BPE.decode(ids)
        ledger.sample(sample)
        ledger.scored(ordinal, index, reward=float(index))
    (rank,) = payloads(cut(0, [ledger.group(ordinal)], Config()), 1, 1024)
    trained = {s.index: s for micro in decode(*rank) for s in micro}
    for index, ids in enumerate(answers):
        assert trained[index].token_ids.tolist() == ids
        assert trained[index].prompt_ids.tolist() == [0, 0, 1]
        np.testing.assert_array_equal(trained[index].logprobs, drawn(ordinal, index, ids).logprobs)


def test_the_splits_above_are_adversarial():
    assert BPE.encode(BPE.decode([0, 0])).ids == [2] and BPE.encode(BPE.decode([8, 9])).ids == [10]


def test_ranks_that_split_a_layer_get_the_same_micro_batches():
    groups = []
    for ordinal in range(3):
        group = Group(ordinal, Prompt(f"train:{ordinal}", ordinal, np.array([0, 1], np.int32), {}))
        group.samples = [drawn(ordinal, index, [0] * (index + 1)) for index in range(4)]
        for sample in group.samples:
            sample.reward = float(sample.index)
        groups.append(group)
    batch = cut(0, groups, Config())
    ranks = [decode(*payload) for payload in payloads(batch, ranks=4, token_budget=1024, tp=2)]
    seen = [[(s.ordinal, s.index) for micro in rank for s in micro] for rank in ranks]
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert sorted(seen[0] + seen[2]) == [(ordinal, index) for ordinal in range(3) for index in range(4)]
