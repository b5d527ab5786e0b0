"""Exercise `prompt_lookup`: a draft without a model, looked up in the text itself.

The longest n-gram that ends the text and stands earlier in it says what may come next. Tested on texts by hand and on
random ones over few tokens, where matches overlap and repeat.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.exercises._ch05_reference import own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect

_SIGNATURE = "prompt_lookup(tokens, max_ngram, n) -> list of at most n tokens"
_RANDOM_CASES = 200
Case = tuple[list[int], int, int]


def _look(case: Case, *, sizes: Callable[[int], list[int]] | None = None, latest: bool = False, itself: bool = False,
          overlap: bool = True, skip: int = 0) -> list[int]:  # fmt: skip
    """The lookup, with one thing done otherwise if asked; `sizes`: of the n-grams, in the order tried."""
    tokens, max_ngram, n = case
    for size in sizes(min(max_ngram, len(tokens) - 1)) if sizes else range(min(max_ngram, len(tokens) - 1), 0, -1):
        starts = range(len(tokens) - size + itself)
        for start in reversed(starts) if latest else starts:
            apart = overlap or start + size <= len(tokens) - size
            if apart and tokens[start : start + size] == tokens[len(tokens) - size :]:
                return tokens[start + size + skip :][:n]
    return []


_MISTAKES: dict[str, Callable[[Case], list[int]]] = {
    "the last n-gram always matches itself, at the very end, and nothing follows it there": lambda c: _look(
        c, itself=True, latest=True
    ),
    "of several places take the first": lambda c: _look(c, latest=True),
    "try the longest n-gram first, then shorter ones": lambda c: _look(c, sizes=lambda most: list(range(1, most + 1))),
    "where the longest n-gram stands nowhere but at the end, look for a shorter one": lambda c: _look(c, itself=True),
    "in a text no longer than max_ngram, a shorter n-gram may stand twice": lambda c: _look(
        c, sizes=lambda most: [c[1]]
    ),
    "no n-gram is longer than max_ngram": lambda c: _look((c[0], len(c[0]), c[2])),
    "a single token is an n-gram, too": lambda c: _look(c, sizes=lambda most: list(range(most, 1, -1))),
    "the earlier place may overlap with the end": lambda c: _look(c, overlap=False),
    "the continuation begins right after the n-gram": lambda c: _look(c, skip=1),
    "the draft is what follows the n-gram, without it": lambda c: _with_ngram(c),
    "at most n tokens are asked for": lambda c: _look((c[0], c[1], len(c[0]))),
    "the match is in the text, not in a cycle: where it ends, the draft ends": lambda c: _cycled(c),
}


def _with_ngram(case: Case) -> list[int]:
    tokens, max_ngram, n = case
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        if _look(case, sizes=lambda most, size=size: [size]):
            return (tokens[len(tokens) - size :] + _look(case))[:n]
    return []


def _cycled(case: Case) -> list[int]:
    found = _look(case)
    return [found[i % len(found)] for i in range(case[2])] if found else []


def _cases() -> list[tuple[str, Case]]:
    by_hand: list[tuple[str, Case]] = [
        ("an n-gram of three that stands earlier", ([7, 1, 2, 3, 8, 9, 4, 1, 2, 3], 3, 3)),
        ("only its last two tokens stand earlier", ([5, 2, 3, 8, 9, 4, 1, 2, 3], 3, 2)),
        ("only its last token stands earlier", ([5, 6, 3, 8, 9, 4, 1, 2, 3], 3, 2)),
        ("nothing stands twice", ([1, 2, 3, 4, 5], 3, 4)),
        ("the last token stands nowhere else, others do", ([1, 2, 1, 2, 1, 2, 9], 2, 4)),
        ("a short n-gram has an earlier place than the longest", ([5, 2, 9, 9, 1, 2, 8, 8, 1, 2], 2, 2)),
        ("several places", ([1, 2, 7, 7, 1, 2, 8, 8, 1, 2], 2, 2)),
        ("more is asked for than follows", ([4, 5, 6, 4, 5], 2, 10)),
        ("one token all along", ([3, 3, 3, 3], 2, 3)),
        ("an overlap", ([1, 2, 1, 2, 1], 3, 4)),
        ("a longer n-gram stands earlier than max_ngram allows", ([1, 2, 3, 4, 0, 3, 4, 9, 1, 2, 3, 4], 2, 1)),
        ("two tokens, the same", ([6, 6], 3, 2)),
        ("a single token", ([6], 3, 2)),
        ("max_ngram beyond the text", ([1, 2, 1], 50, 2)),
    ]
    generator = torch.Generator().manual_seed(5)
    for seed in range(_RANDOM_CASES):
        length, kinds, ngram, n = (int(torch.randint(1, most, (), generator=generator)) for most in (30, 6, 5, 6))
        tokens = torch.randint(kinds, (length,), generator=generator).tolist()
        by_hand.append((f"random text {seed + 1}", (tokens, ngram, n)))
    return by_hand


def _run(answer: Answer, case: Case, where: str) -> list[int]:
    tokens = list(case[0])
    value = own(lambda: answer(tokens, *case[1:]))
    expect(tokens == case[0], f"{where}: the list that you were given should stay as it is")
    if isinstance(value, Tensor):
        value = value.tolist()
    expect(isinstance(value, list | tuple), f"return a list of tokens; got {type(value).__name__}")
    try:
        return [int(t) for t in value]
    except (TypeError, ValueError):
        raise Failed(f"return a list of tokens, which are whole numbers; got {value!r:.60}") from None


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    named = _cases()
    found = [_run(answer, case, where) for where, case in named]
    cases = [case for _, case in named]
    right = [_look(case) for case in cases]
    if found != right:
        at = next(i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
        tokens, max_ngram, n = cases[at]
        told = f"{named[at][0]}: after {tokens}, with max_ngram {max_ngram} and n {n}, the draft is {right[at]}; yours "
        why = (t for t, rule in _MISTAKES.items() if found == [rule(case) for case in cases])
        expect(False, f"{told}is {found[at]}" + "".join(f": {text}" for text in list(why)[:1]))
    return f"the longest match in all {len(cases)} texts, and nothing where nothing stands twice"


PROMPT_LOOKUP = Exercise(
    name="prompt_lookup",
    chapter=5,
    task="A draft looked up in the text: what followed the last tokens the first time they stood there, by the longest "
    "n-gram that is found.",
    signature=_SIGNATURE,
    hints=(
        "Begin with the last max_ngram tokens. If they stand nowhere earlier, try one token fewer, down to one.",
        "Walk the starts from 0 to len(tokens) - size - 1: the start len(tokens) - size is the n-gram itself. A match "
        "may overlap with it, and what follows may reach into it.",
        "for size in range(min(max_ngram, len(tokens) - 1), 0, -1): for start in range(len(tokens) - size): "
        "if tokens[start : start + size] == tokens[-size:]: return tokens[start + size : start + size + n]. Then "
        "return [].",
    ),
    test=_test,
)
