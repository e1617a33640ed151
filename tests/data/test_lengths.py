"""What is too long: refused, left out, cut or split, and counted; no token is invented and none is learnt twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import SftConfig
from asyncrl.data.chat import encode
from asyncrl.data.errors import DataError
from asyncrl.data.example import Example
from asyncrl.data.lengths import fates, fit
from asyncrl.data.tokens import Conversation
from tests.data.families import chatml, learnt
from tests.data.test_chat import TALK


@pytest.fixture(scope="module")
def tokenizer():
    return chatml()


def encoded(tokenizer, too_long, max_length=15):
    """TALK has 35 tokens and more; its first answer ends beyond 15."""
    return encode(tokenizer, Example("talk", messages=TALK), SftConfig(max_length=max_length, too_long=too_long))


def test_an_error_names_the_lengths_and_the_choices(tokenizer):
    with pytest.raises(DataError, match=r"talk: \d+ tokens are more than sft.max_length=15\n.*skip, cut or split"):
        encoded(tokenizer, "error")


def test_cut_keeps_the_beginning_and_teaches_no_end(tokenizer):
    [whole] = encoded(tokenizer, "error", 1000).samples
    for limit in range(15, len(whole)):
        found = encoded(tokenizer, "cut", limit)
        if not found.samples:
            assert found.fate == "skipped" and not whole.learnt[:limit].any()
            continue
        [sample] = found.samples
        assert found.fate == "cut" and sample.ids.tolist() == whole.ids[:limit].tolist()
        assert sample.learnt.tolist() == whole.learnt[:limit].tolist()
        runs = "".join(learnt(sample, tokenizer))
        assert "".join(learnt(whole, tokenizer)).startswith(runs)


def test_counts_of_a_step(tokenizer):
    keys = {"sample/cut": 0, "sample/split": 0, "sample/skipped": 0}
    for policy, key in (("cut", "cut"), ("split", "split"), ("skip", "skipped")):
        found = [encoded(tokenizer, policy, 22), encoded(tokenizer, policy, 1000), encoded(tokenizer, policy, 21)]
        assert fates(found) == keys | {f"sample/{key}": 2}
        assert len(found[1].samples) == 1 and found[1].fate == "whole"
    assert encoded(tokenizer, "skip").samples == []
    assert fates([encoded(tokenizer, "cut", 3)]) == keys | {"sample/skipped": 1}, "nothing is learnt before the cut"


@given(mask=st.lists(st.booleans(), min_size=2, max_size=60), limit=st.integers(2, 20))
def test_split_learns_every_token_once_in_order(mask, limit):
    mask[0] = False
    whole = Conversation(np.arange(len(mask), dtype=np.int32), np.asarray(mask))
    if not any(mask):
        with pytest.raises(DataError, match="no token to learn"):
            fit(whole, SftConfig(), "x")
        return
    found = fit(whole, SftConfig(max_length=limit, too_long="split"), "x")
    targets = [int(t) for piece in found.samples for t in piece.ids[piece.learnt]]
    assert targets == np.flatnonzero(mask).tolist()
    for piece in found.samples:
        assert len(piece) <= limit and not piece.learnt[0] and piece.learnt.any()
        assert (np.diff(piece.ids) == 1).all(), "consecutive tokens: each is predicted from the one before it"
    assert found.fate == ("whole" if len(mask) <= limit else "split")


def test_a_split_text(tokenizer):
    text = "the quick brown fox jumps over the lazy dog " * 5
    [whole] = encode(tokenizer, Example("text", text=text), SftConfig()).samples
    pieces = encode(tokenizer, Example("text", text=text), SftConfig(max_length=16, too_long="split")).samples
    assert sum(int(p.learnt.sum()) for p in pieces) == len(whole) - 1
    assert sum(tokenizer.eos_token_id in p.ids for p in pieces) == 1
