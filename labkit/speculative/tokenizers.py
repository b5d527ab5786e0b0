"""Whether two tokenizers are one: a drafted id means something to the target only if every id is the same token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit import _check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Merges, normalization and the split into words show in what a text becomes, not in the vocabulary. Several scripts,
# digits, runs of spaces, a composed and a decomposed accent, code, and an emoji of several code points.
PROBE = (
    "The quick brown fox isn't 12,345.67 km away…\n\n\tfor i in range(10):  print(f'{i:>3}')  # né, ne\u0301\n"
    "Straße, œuvre, naïve; Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. 你好，世界。"
    "こんにちは、世界。안녕하세요. สวัสดีชาวโลก 👩‍💻🏳️‍🌈 ½ ≠ ∑ x²  <|im_start|> </s> [MASK]"
)


def check_same_tokenizer(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Compare two tokenizers token by token: every id's token, then which ids were added and which are special, then
    the ids of a text in several scripts. Which of the special tokens ends a text is each model's own affair.

    Errors: ValueError with the first difference: the id, and both tokens.
    """
    for name, tokenizer in (("draft", draft), ("target", target)):
        takes = "a tokenizer of transformers"
        _check.require(callable(getattr(tokenizer, "get_vocab", None)), name, type(tokenizer).__name__, takes)
    if draft is target:
        return
    ours, theirs = _tokens(draft), _tokens(target)
    for token_id in sorted(ours.keys() | theirs.keys()):
        _compare(token_id, _shown(ours, token_id), _shown(theirs, token_id))
    for flag in ("added", "special"):
        _compare_flags(flag, _flagged(draft, flag), _flagged(target, flag), ours)
    first, second = (_encoded(tokenizer) for tokenizer in (draft, target))
    for place in range(max(len(first), len(second))):
        a, b = (ids[place] if place < len(ids) else None for ids in (first, second))
        if a != b:
            got = "the end of the probe text" if a is None else f"id {a}, {ours[a]!r}"
            wants = "the end of it" if b is None else f"id {b}, {ours[b]!r}"
            raise ValueError(
                f"draft: got {got} at place {place} of the probe text; takes {wants}, as the target's does"
            )


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _shown(tokens: dict[int, str], token_id: int) -> str:
    return repr(tokens[token_id]) if token_id in tokens else "no token"


def _compare(token_id: int, got: str, wants: str) -> None:
    if got != wants:
        raise ValueError(f"draft: got {got} as id {token_id}; takes {wants}, which the target's tokenizer has there")


def _flagged(tokenizer: PreTrainedTokenizerBase, flag: str) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token_id for token_id, token in added.items() if flag == "added" or token.special}


def _compare_flags(flag: str, ours: set[int], theirs: set[int], tokens: dict[int, str]) -> None:
    for token_id in sorted(ours ^ theirs):
        has, lacks = ("draft", "target") if token_id in ours else ("target", "draft")
        name = f"{tokens[token_id]!r}, id {token_id},"
        got = f"{name} as {flag} token of the {has}'s tokenizer and not of the {lacks}'s"
        raise ValueError(f"draft: got {got}; takes the same {flag} tokens in both")


def _encoded(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Without what a template puts around a text: the two models may be prompted in different ways.
    return tokenizer(PROBE, add_special_tokens=False)["input_ids"]
