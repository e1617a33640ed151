"""Preference pairs: two answers to one prompt, learnt from where they begin."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import SftConfig
from asyncrl.data.chat import encode, encode_pair
from asyncrl.data.errors import DataError
from asyncrl.data.example import Example
from tests.data.families import CHATML, FAMILIES, REASONING, SPANS, chatml, learnt
from tests.data.test_chat import TALK


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def pair(tokenizer, chosen, rejected, **keys):
    example = Example("pair", messages=chosen, rejected=rejected)
    return encode_pair(tokenizer, example, SftConfig(**keys))


@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_are_those_of_the_template_and_learn_their_own_answer(name):
    tokenizer = FAMILIES[name][0]()
    chosen, rejected = [*TALK[:3], answer("it says hello")], [*TALK[:3], answer("it says nothing")]
    [found] = pair(tokenizer, chosen, rejected, train_on="all").samples
    prompt = tokenizer.apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert found.prompt == len(prompt)
    for side, messages in ((found.chosen, chosen), (found.rejected, rejected)):
        assert side.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
        assert side.ids[: found.prompt].tolist() == prompt and not side.learnt[: found.prompt].any()
        assert side.learnt[found.prompt]
        [text] = learnt(side, tokenizer)
        assert text.lstrip().startswith(messages[-1]["content"] + FAMILIES[name][1])
    assert len(found) == len(found.chosen) + len(found.rejected)


def test_several_turns_may_differ():
    tokenizer = chatml()
    more = [TALK[0], answer("four"), {"role": "user", "content": "why?"}, answer("it is")]
    [found] = pair(tokenizer, TALK[:2], more).samples
    assert learnt(found.chosen, tokenizer) == ["it is 4.<|im_end|>"]
    assert learnt(found.rejected, tokenizer) == ["four<|im_end|>", "it is<|im_end|>"]
    [last] = pair(tokenizer, TALK[:2], more, train_on="last").samples
    assert learnt(last.rejected, tokenizer) == ["it is<|im_end|>"]


def test_earlier_answers_of_a_pair_need_not_be_told_apart():
    """A template that drops earlier reasoning: the last turn alone is learnt, and its prompt is the same."""
    tokenizer = chatml(REASONING)
    talk = [TALK[0], answer("<think>two</think>4"), TALK[2]]
    [found] = pair(tokenizer, [*talk, answer("yes")], [*talk, answer("no")]).samples
    assert learnt(found.chosen, tokenizer) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        (TALK[:2], TALK[:2]),
        (TALK[:2], TALK),
        (TALK[:2], [TALK[2], TALK[3]]),
        ([answer("a")], [answer("b")]),
        (TALK[:2], [TALK[0], TALK[2]]),
    ],
    ids=["equal", "one goes on", "other prompts", "no prompt", "no answer"],
)
def test_what_is_no_preference_is_refused(chosen, rejected):
    with pytest.raises(DataError, match="pair: chosen and rejected are not two answers to one prompt"):
        pair(chatml(), chosen, rejected)


def test_a_template_that_changes_the_prompt_is_refused():
    sides = [TALK[0], answer("a")], [TALK[0], answer("b")]
    for template, reason in (
        (CHATML, "message 1 differently"),
        (SPANS, "do not both begin with those"),
    ):
        with pytest.raises(DataError, match=reason):
            pair(chatml("{{ messages[-1]['content'][:1] }}" + template), *sides)


def test_forms_are_not_mixed_up():
    example = Example("pair", messages=TALK[:2], rejected=[TALK[0], answer("b")])
    with pytest.raises(DataError, match="is a preference pair"):
        encode(chatml(), example, SftConfig())
    with pytest.raises(DataError, match="is no preference pair"):
        encode_pair(chatml(), Example("talk", messages=TALK), SftConfig())


def test_too_long():
    tokenizer = chatml()
    sides = [TALK[0], answer("a" * 40)], [TALK[0], answer("b" * 40)]
    [whole] = pair(tokenizer, *sides).samples
    limit = whole.prompt + 5
    with pytest.raises(DataError, match="skip or cut"):
        pair(tokenizer, *sides, max_length=limit)
    with pytest.raises(DataError, match="half a preference"):
        pair(tokenizer, *sides, max_length=limit, too_long="split")
    assert pair(tokenizer, *sides, max_length=limit, too_long="skip").fate == "skipped"
    cut = pair(tokenizer, *sides, max_length=limit, too_long="cut")
    [sample] = cut.samples
    assert cut.fate == "cut" and len(sample.chosen) == len(sample.rejected) == limit
    assert int(sample.chosen.learnt.sum()) == 5
    assert pair(tokenizer, *sides, max_length=whole.prompt, too_long="cut").fate == "skipped"
    late = [TALK[0], answer("a" * 8 + "c")], [TALK[0], answer("a" * 8 + "d")]
    assert pair(tokenizer, *late, max_length=limit, too_long="cut").fate == "skipped", "nothing that differs is left"


def test_a_side_without_a_token_to_learn():
    with pytest.raises(DataError, match="no token to learn"):
        pair(chatml(), [TALK[0], answer("a", weight=0)], [TALK[0], answer("b")])
