"""A sample survives the trip from a generator to the controller, and damage is refused."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.actors.messages import CONTROLLER_SCHEMA, sample_message, sample_of
from asyncrl.rollouts.types import Sample
from asyncrl.transport.frames import Message, ProtocolError


def message_of(sample: Sample, **changes) -> Message:
    header, arrays = sample_message(sample)
    CONTROLLER_SCHEMA.check("sample", header, len(arrays))
    buffers = {i: memoryview(a.tobytes()) for i, a in enumerate(arrays)} | changes.get("buffers", {})
    return Message("sample", header | changes.get("header", {}), tuple(buffers.values()), "generator/1")


def sample(**changes) -> Sample:
    fields = {
        "ordinal": 7, "index": 2, "token_ids": np.array([5, 6, 7]), "logprobs": np.array([-0.5, -1.25, -2.0]),
        "versions": np.array([3, 3, 4]), "finish_reason": "stop", "generator": "generator/1",
    }  # fmt: skip
    return Sample(**fields | changes)


def test_round_trip():
    got = sample_of(message_of(sample()))
    assert (got.ordinal, got.index, got.finish_reason, got.generator) == (7, 2, "stop", "generator/1")
    assert got.token_ids.tolist() == [5, 6, 7] and got.token_ids.dtype == np.int32
    assert got.logprobs.tolist() == [-0.5, -1.25, -2.0] and got.logprobs.dtype == np.float32
    assert got.versions.tolist() == [3, 3, 4] and got.versions.dtype == np.int32


def test_a_failed_sample_may_be_empty():
    empty = np.zeros(0)
    got = sample_of(message_of(sample(token_ids=empty, logprobs=empty, versions=empty, failure="refused: too long")))
    assert got.failure == "refused: too long" and len(got.token_ids) == 0


def test_lengths_must_agree():
    with pytest.raises(ProtocolError, match=r"sample 7/2 of generator/1: 3 tokens, 2 log-probs, 3 versions"):
        sample_of(message_of(sample(logprobs=np.array([-1.0, -2.0]))))


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_log_prob_that_is_not_finite_is_refused(bad):
    with pytest.raises(ProtocolError, match="not finite"):
        sample_of(message_of(sample(logprobs=np.array([-1.0, bad, -2.0]))))
