"""asyncrl.rollouts.cut: what a rank decodes is what was planned for it, without copies; broken frames are refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouts.cut import decode, encode, train_samples
from asyncrl.rollouts.packing import plan
from asyncrl.rollouts.types import Group, Prompt, Sample, TrainSample

FIELDS = ("prompt_ids", "token_ids", "logprobs", "versions", "advantages")


def make(ordinal: int, prompt: int, tokens: int) -> TrainSample:
    rng = np.random.default_rng([ordinal, prompt, tokens])
    return TrainSample(
        prompt_ids=rng.integers(0, 100, prompt, dtype=np.int32),
        token_ids=rng.integers(0, 100, tokens, dtype=np.int32),
        logprobs=-rng.random(tokens, dtype=np.float32),
        versions=rng.integers(0, 9, tokens, dtype=np.int32),
        advantages=rng.random(tokens, dtype=np.float32),
        ordinal=ordinal,
        index=ordinal % 3,
    )


def over_the_wire(header, buffers):
    return msgpack.unpackb(msgpack.packb(header)), [bytes(buffer) for buffer in buffers]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20), st.integers(1, 3))
def test_round_trip(shapes, ranks):
    samples = [make(number, *shape) for number, shape in enumerate(shapes)]
    packed = plan([len(sample) for sample in samples], ranks, 20)
    seen = []
    for rank in range(ranks):
        header, buffers = over_the_wire(*encode(packed, rank, samples, version=7))
        assert header["version"] == 7
        micro = decode(header, buffers)
        assert [[sample.ordinal for sample in batch] for batch in micro] == packed.rank[rank].micro
        for sample in (sample for batch in micro for sample in batch):
            seen.append(sample.ordinal)
            expected = samples[sample.ordinal]
            assert sample.index == expected.index
            for name in FIELDS:
                got, want = getattr(sample, name), getattr(expected, name)
                assert got.dtype == want.dtype
                np.testing.assert_array_equal(got, want)
    assert sorted(seen) == list(range(len(samples)))


def one_rank():
    samples = [make(0, 3, 4), make(1, 2, 5)]
    return over_the_wire(*encode(plan([7, 7], 1, 20), 0, samples, version=0))


def test_decoding_copies_nothing():
    header, buffers = one_rank()
    token_ids = np.frombuffer(buffers[5], np.int32)
    assert all(np.shares_memory(sample.token_ids, token_ids) for sample in decode(header, buffers)[0])


@pytest.mark.parametrize("number", range(9))
def test_a_short_buffer_is_refused(number):
    header, buffers = one_rank()
    buffers[number] = buffers[number][:-8]
    with pytest.raises(ValueError):
        decode(header, buffers)


@pytest.mark.parametrize("micro", [[1], [3], [3, -1], []])
def test_counts_that_do_not_add_up_are_refused(micro):
    header, buffers = one_rank()
    with pytest.raises(ValueError):
        decode({**header, "micro": micro}, buffers)


def test_negative_lengths_and_missing_buffers_are_refused():
    header, buffers = one_rank()
    with pytest.raises(ValueError):
        decode(header, buffers[:-1])
    buffers[3] = np.array([10, -1], "<i4").tobytes()
    with pytest.raises(ValueError, match="negative"):
        decode(header, buffers)


def test_a_plan_for_other_samples_is_refused():
    with pytest.raises(ValueError, match="plan"):
        encode(plan([7, 8], 1, 20), 0, [make(0, 3, 4), make(1, 2, 5)], version=0)


def test_arrays_of_different_lengths_are_refused():
    sample = make(4, 3, 4)
    sample.versions = sample.versions[:-1]
    with pytest.raises(ValueError, match="sample 4/1"):
        encode(plan([7], 1, 20), 0, [sample], version=0)


class TestTrainSamples:
    prompt = Prompt("train:1", 1, np.array([1, 2], np.int32), {})

    def group(self) -> Group:
        tokens = np.array([5, 6, 7], np.int32)
        samples = [
            Sample(9, index, tokens, np.full(3, -0.5, np.float32), np.full(3, 2, np.int32), "stop", "g0")
            for index in range(3)
        ]
        return Group(9, self.prompt, samples)

    def test_failed_samples_are_left_out_and_advantages_are_per_token(self):
        samples = train_samples([self.group()], [[0.5, None, -1.0]])
        assert [sample.index for sample in samples] == [0, 2]
        np.testing.assert_array_equal(samples[1].advantages, np.full(3, -1.0, np.float32))
        assert samples[0].advantages.dtype == np.float32
        assert len(samples[0]) == 5

    @pytest.mark.parametrize("advantages", [[[0.5, float("nan"), 1.0]], [[0.5]], []])
    def test_bad_advantages_are_refused(self, advantages):
        with pytest.raises(ValueError):
            train_samples([self.group()], advantages)
