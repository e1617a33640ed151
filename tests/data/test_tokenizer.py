"""The small tokenizer: fixed text is one token, everything else one token a byte, and any text survives."""

from __future__ import annotations

import pytest

from asyncrl.data.tokenizer import build_tokenizer, fixed_pieces

WORDS = ["ammonia", "bower", "zebra", "quiet", "Abe", "theory"]
TEXTS = [f"Spell this word backward (example: sun -> nus): {word}" for word in WORDS]
BOTH = [f"Find the letters of {word}. Give only the letters." for word in WORDS]


def test_fixed_text_is_one_token_and_letters_are_single():
    tokenizer = build_tokenizer(TEXTS)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": TEXTS[0]}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert len(ids) == len("ammonia") + 4  # user, instruction, end, assistant
    assert tokenizer.convert_ids_to_tokens(ids[2:-2]) == list("ammonia")


def test_pieces_at_both_ends():
    assert fixed_pieces(BOTH) == [". Give only the letters.", "Find the letters of "]
    assert len(build_tokenizer(BOTH)(BOTH[1])["input_ids"]) == len("bower") + 2


def test_texts_without_anything_in_common():
    assert fixed_pieces(["cat", "dog"]) == []
    assert build_tokenizer(["cat", "dog"])("cat")["input_ids"] != build_tokenizer(["cat", "dog"])("act")["input_ids"]


@pytest.mark.parametrize("text", ["", "plain", "naïve → ∑ 木\n\t 🙂", "a  b", " .", TEXTS[2], "Spell this word"])
def test_any_text_comes_back(text):
    tokenizer = build_tokenizer(TEXTS)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_same_texts_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        build_tokenizer(TEXTS).save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "chat_template.jinja" in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
