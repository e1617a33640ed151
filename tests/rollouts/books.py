"""Small groups and samples for tests of the ledger."""

from __future__ import annotations

import numpy as np

from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.types import Group, Prompt, Sample

SIZE = 2  # samples a group


def make_group(ordinal: int) -> Group:
    index = (7 * ordinal) % 13
    ids = np.arange(3 + ordinal % 4, dtype=np.int32)
    return Group(
        ordinal, Prompt(f"train:{index}", index, ids, {"question": f"{index}+1", "x": [1]}), epoch=ordinal // 13
    )


def make_sample(ordinal: int, index: int, version: int = 0, tokens: int = 5, text: str = "é 4") -> Sample:
    rng = np.random.default_rng([ordinal, index])
    return Sample(
        ordinal,
        index,
        rng.integers(0, 1000, tokens, dtype=np.int32),
        -rng.random(tokens, dtype=np.float32),
        np.full(tokens, version, np.int32),
        "stop",
        "g0",
        text=text,
    )


def dispatch(ledger: Ledger, ordinal: int, version: int = 0) -> Group:
    group = make_group(ordinal)
    ledger.dispatched(group, "g0", size=SIZE, version=version, cursor={"position": ordinal + 1})
    return group


def finish(ledger: Ledger, ordinal: int, version: int = 0, **kwargs) -> Group:
    """Dispatch, sample and score a whole group."""
    group = dispatch(ledger, ordinal, version)
    for index in range(SIZE):
        sample = make_sample(ordinal, index, version, **kwargs)
        assert ledger.sample(sample)
        sample.reward = float(index)
        ledger.scored(ordinal, index, reward=sample.reward)
        group.samples.append(sample)
    return group


def assert_same_group(got: Group, want: Group) -> None:
    assert (got.ordinal, got.epoch) == (want.ordinal, want.epoch)
    assert (got.prompt.item_id, got.prompt.index, got.prompt.entry) == (
        want.prompt.item_id,
        want.prompt.index,
        want.prompt.entry,
    )
    np.testing.assert_array_equal(got.prompt.token_ids, want.prompt.token_ids)
    assert len(got.samples) == len(want.samples)
    for a, b in zip(got.samples, want.samples, strict=True):
        plain = ("ordinal", "index", "finish_reason", "generator", "reward", "failure", "text")
        assert [getattr(a, name) for name in plain] == [getattr(b, name) for name in plain]
        for name in ("token_ids", "logprobs", "versions"):
            assert getattr(a, name).dtype == getattr(b, name).dtype
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
