"""Tokenizers compared token by token: each kind of difference is found, and named."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from labkit.speculative.tokenizers import PROBE, check_same_tokenizer

WORDS = ["<unk>", "the", "quick", "brown", "fox", "range", "print", "The", "isn"]


def made(words: list[str] | None = None, *, added: str | AddedToken | None = None, lower: bool = False, **options: str):
    words = WORDS if words is None else words
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **options)
    if added is not None:
        made.add_tokens([added])
    return made


def test_the_same_vocabulary_passes() -> None:
    check_same_tokenizer(made(), made())
    check_same_tokenizer(made(added="<x>"), made(added="<x>"))


def test_models_may_end_a_text_with_different_special_tokens() -> None:
    both = [*WORDS, "<a>", "<b>"]
    ours = made(both, eos_token="<a>", pad_token="<b>")
    check_same_tokenizer(ours, made(both, eos_token="<b>", pad_token="<a>"))


@pytest.mark.parametrize(("words", "found"), [
    ([*WORDS[:3], "fox", "brown", *WORDS[5:]], "draft: got 'fox' as id 3; takes 'brown', which the target's"),
    (WORDS[:-1], "draft: got no token as id 8; takes 'isn'"),
    ([*WORDS, "more"], "draft: got 'more' as id 9; takes no token"),
])  # fmt: skip
def test_the_first_different_token_is_named_with_its_id(words: list[str], found: str) -> None:
    with pytest.raises(ValueError) as error:
        check_same_tokenizer(made(words), made())
    assert str(error.value).startswith(found)


def test_an_added_token_on_one_side_is_a_difference() -> None:
    with pytest.raises(ValueError, match="got no token as id 9; takes '<x>'"):
        check_same_tokenizer(made(), made(added="<x>"))
    # The same id and the same text, but one cuts it out of any text and the other does not.
    with pytest.raises(ValueError, match="'<x>', id 9, as added token of the target's tokenizer and not of the draft"):
        check_same_tokenizer(made([*WORDS, "<x>"]), made([*WORDS, "<x>"], added="<x>"))


def test_a_special_token_on_one_side_is_a_difference() -> None:
    special = made(added=AddedToken("<x>", special=True))
    with pytest.raises(ValueError, match="'<x>', id 9, as special token of the draft's tokenizer and not of the targ"):
        check_same_tokenizer(special, made(added="<x>"))


def test_a_text_that_becomes_other_ids_is_a_difference() -> None:
    with pytest.raises(ValueError, match="got id 1, 'the' at place 0 of the probe text; takes id 7, 'The'"):
        check_same_tokenizer(made(lower=True), made())


def test_the_probe_has_several_scripts_and_both_forms_of_an_accent() -> None:
    for low, high in ((0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x4E00, 0x9FFF)):
        assert any(low <= ord(character) <= high for character in PROBE), hex(low)
    assert "\u00e9" in PROBE and "e\u0301" in PROBE


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="target: got 'str'; takes a tokenizer"):
        check_same_tokenizer(made(), "smollm2")
