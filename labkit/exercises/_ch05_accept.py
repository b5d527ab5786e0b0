"""Exercise `accept_step`: how many drafted tokens a verifying call accepts.

Leviathan et al. 2023, Algorithm 1. The uniform numbers are given, so that there is one right answer for each case.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.exercises._ch05_reference import as_count, call_with_copies, distributions, in_words
from labkit.exercises._exercise import Answer, Exercise, expect

_SIGNATURE = "accept_step(drafts, q, p, uniform) -> n_accepted"
_VOCAB = 5
_RANDOM_CASES = 300
# Whether one drafted token is accepted, of (p and q of it, p one position later, uniform number).
Rule = Callable[[float, float, float, float], bool]


@dataclass(frozen=True)
class _Case:
    """drafts (k,), q (k, vocab), p (k + 1, vocab), uniform (k,)."""

    drafts: Tensor
    q: Tensor
    p: Tensor
    uniform: Tensor

    @classmethod
    def random(cls, seed: int, k: int) -> "_Case":
        choose = torch.Generator().manual_seed(seed)
        q = distributions(2 * seed, k, _VOCAB)
        drafts = torch.multinomial(q, 1, generator=choose).flatten() if k else torch.zeros(0, dtype=torch.int64)
        return cls(drafts, q, distributions(2 * seed + 1, k + 1, _VOCAB), torch.rand(k, generator=choose))

    @classmethod
    def of(cls, *tokens: tuple[float, float, float]) -> "_Case":
        """Token 1 drafted at each place, with this (q, p, uniform) of its own; the rest lies on token 0."""
        q, p, uniform = torch.tensor(tokens).T
        both = [torch.stack((1 - x, x), -1) for x in (q, p)]
        after = torch.tensor([[0.5, 0.5]])
        return cls(torch.ones(len(tokens), dtype=torch.int64), both[0], torch.cat((both[1], after)), uniform)

    def verdicts(self, rule: Rule) -> list[bool]:
        places = torch.arange(len(self.drafts))
        of_draft = [x[places + n, self.drafts].tolist() for x, n in ((self.p, 0), (self.q, 0), (self.p, 1))]
        return [rule(*numbers) for numbers in zip(*of_draft, self.uniform.tolist(), strict=True)]

    def accepted(self, rule: Rule) -> int:
        """How many stand before the first that the rule rejects."""
        return [*self.verdicts(rule), False].index(False)

    def __str__(self) -> str:
        at = torch.arange(len(self.drafts)), self.drafts
        numbers = {"p": self.p[at], "q": self.q[at], "uniform numbers": self.uniform}
        return "for drafts with " + ", ".join(f"{name} {in_words(x)}" for name, x in numbers.items())


def _right(p: float, q: float, later: float, u: float) -> bool:
    return u < p / q


_MISTAKES: dict[str, Callable[[_Case], int]] = {
    "count those before the first rejection: what was drafted after a wrong token is worth nothing": lambda c: sum(
        c.verdicts(_right)
    ),
    "a rejected token is not accepted: the token drawn in its place is not counted": lambda c: min(
        c.accepted(_right) + 1, len(c.drafts)
    ),
    "this counts the token that the target adds to the accepted ones": lambda c: c.accepted(_right) + 1,
    "this accepts with p alone and forgets q, which the token was drawn with": lambda c: c.accepted(
        lambda p, q, later, u: u < p
    ),
    "p is divided by itself here, which accepts nearly everything": lambda c: c.accepted(
        lambda p, q, later, u: u < p / (p + 1e-10)
    ),
    "p is read one position late: row i of p is what the target says of draft i": lambda c: c.accepted(
        lambda p, q, later, u: u < later / q
    ),
    "p and q changed places": lambda c: c.accepted(lambda p, q, later, u: u < q / p),
    "this accepts with the probability of a rejection": lambda c: c.accepted(lambda p, q, later, u: u >= p / q),
    "a token that the draft likes too much is rejected by chance, not always": lambda c: c.accepted(
        lambda p, q, later, u: p >= q
    ),
    "q alone says nothing of the target": lambda c: c.accepted(lambda p, q, later, u: u < q),
}  # fmt: skip


def _cases() -> list[_Case]:
    chosen = [
        _Case.of((0.5, 0.25, 0.4)), _Case.of((0.5, 0.25, 0.6)), _Case.of((0.25, 0.5, 0.999)),
        _Case.of((0.5, 0.4, 0.1), (0.5, 0.1, 0.9), (0.5, 0.4, 0.1)), _Case.of((0.9, 0.01, 0.9), (0.1, 0.9, 0.0)),
        _Case.of((1.0, 1.0, 0.99), (1e-6, 1e-3, 0.99), (1.0, 0.5, 0.45)),
    ]  # fmt: skip
    return chosen + [_Case.random(seed, seed % 7) for seed in range(_RANDOM_CASES)]


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    impossible = _Case.of((0.5, 0.0, 0.0))
    cases = [*_cases(), impossible]
    found = []
    for case in cases:
        value = call_with_copies(answer, case.drafts, case.q, case.p, case.uniform)
        # One too many is told apart below.
        found.append(as_count(value, len(case.drafts) + 1, "the number of accepted tokens"))
    right = [case.accepted(_right) for case in cases]
    if found[:-1] != right[:-1]:
        at = next(i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1])
        why = (f": {text}" for text, rule in _MISTAKES.items() if found[:-1] == [rule(case) for case in cases[:-1]])
        expect(False, f"{cases[at]}, {right[at]} should be accepted, and yours says {found[at]}{next(why, '')}")
    told = "a token that the target never gives (p is 0) should be rejected even by the uniform number 0"
    expect(found[-1] == 0, told)
    rate = sum(right) / sum(min(n + 1, len(case.drafts)) for n, case in zip(right, cases, strict=True))
    return f"each of {len(cases)} calls stops where it should; of the drafts that were tested, {rate:.0%} were accepted"


ACCEPT_STEP = Exercise(
    name="accept_step",
    chapter=5,
    task="How many drafted tokens are accepted: each with probability min(1, p/q), until the first that is not.",
    signature=_SIGNATURE,
    hints=(
        "Draft i was drawn from q[i]. Which row of p is the target's distribution for that same place, and what is the "
        "last row of p for?",
        "A token that the draft gives more often than the target has to go in the share 1 - p/q of its cases: keep it "
        "where uniform[i] < p[i, x] / q[i, x]. Everything after the first that goes, goes too.",
        "at = torch.arange(len(drafts)); keep = uniform < p[at, drafts] / q[at, drafts]; return "
        "int(keep.long().cumprod(0).sum()).",
    ),
    test=_test,
)
