"""What each token of a speculative generation was: drafted and kept, drafted and refused, or the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.speculative.stats import Call

# In the order in which a reader meets them; what each is, as the legend says it.
KINDS = {
    "accepted": "drafted, and kept",
    "rejected": "drafted, and refused",
    "untested": "drafted after a refused one: never looked at",
    "residual": "the target's correction",
    "bonus": "bonus: the whole draft was right",
    "plain": "the target's own, nothing drafted",
    "prompt": "from the prompt's pass",
}
# Of the text that stands in the end.
EMITTED = ("accepted", "residual", "bonus", "plain", "prompt")
# How blanks are shown.
VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class Token:
    """One token: its text, what it was, and the call it came from: 0 is the prompt's pass, 1 the first verifying."""

    text: str
    kind: str
    call: int


def tokens_of(call: Call, index: int, decode: Callable[[int], str], tree: bool = False) -> list[Token]:
    """The tokens of one call, drafted ones first, as they stand in the text.

    Of a tree's other branches it is not known which were looked at: all of them count as refused.
    """
    kept, own = call.emitted[: call.n_accepted], call.emitted[call.n_accepted :]
    left = _left_over(call.drafted, kept) if tree else list(call.drafted[call.n_accepted :])
    refused = len(left) if tree else int(call.kind == "residual")
    last = call.kind if call.drafted or call.kind == "prompt" else "plain"
    groups = [(kept, "accepted"), (left[:refused], "rejected"), (left[refused:], "untested"), (own, last)]
    return [Token(decode(token), kind, index) for tokens, kind in groups for token in tokens]


def _left_over(drafted: Sequence[int], kept: Sequence[int]) -> list[int]:
    """What was drafted and not kept; siblings are different tokens, so that one of each value goes."""
    left = list(drafted)
    for token in kept:
        left.remove(token)
    return left


def draft_lengths(calls: Sequence[Call], num_assistant_tokens: int, max_new_tokens: int) -> list[int]:
    """Drafted tokens of each call that had room for a whole draft; a lookup drafts fewer, or none, where it finds no
    more."""
    lengths, made = [], 0
    for call in calls:
        if call.kind != "prompt" and made + num_assistant_tokens + 1 <= max_new_tokens:
            lengths.append(len(call.drafted))
        made += len(call.emitted)
    return lengths


def visible(text: str) -> str:
    """With blanks that can be seen."""
    return "".join(VISIBLE.get(character, character) for character in text)
