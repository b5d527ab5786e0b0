"""Exercise `fixed_speculation`: a whole speculative loop, right where the draft is the target's twin and no token hangs
on the one before it.

The form with the faults, as the notebook shows it:

    def speculate(target, draft, tokens, n_new, gamma, generator):
        def pick(probs):
            return int(torch.multinomial(probs, 1, generator=generator))

        tokens, end, n_tested, n_matches = list(tokens), len(tokens) + n_new, 0, 0
        while len(tokens) < end:
            drafts, q, n = [], [], 0
            for _ in range(gamma):
                q.append(draft(tokens + drafts))
                drafts.append(pick(q[-1]))
            p = target(tokens + drafts)[-gamma:]
            while n < gamma and torch.rand((), generator=generator) < p[n][drafts[n]] / q[n][drafts[n]]:
                n += 1
            n_tested, n_matches = n_tested + min(n + 1, gamma), n_matches + n
            tokens = tokens + drafts[:n]
            if n == gamma:
                tokens.append(pick(p[-1]))
        return tokens[:end], n_matches / n_tested

The target's distributions are read one position late, and a call that accepts nothing adds nothing, so that with a
draft that is always wrong the loop does not end (with others its output is biased).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.exercises._ch05_reference import distributions, improbable, own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect
from labkit.exercises._limit import Endless, within

_SIGNATURE = "fixed_speculation(target, draft, tokens, n_new, gamma, generator) -> (tokens, acceptance_rate)"
_VOCAB = 3
_RUNS = 300
# Of computing, for the first checks, which take milliseconds; the later ones draw a thousand sequences, and get more.
_LIMIT_S, _PATIENCE = 5.0, 12
_ENDLESS = "a call that accepts nothing must still give one token, the target's own, or the loop does not end"


@dataclass
class _Models:
    """A target and a draft whose next token hangs on the last one alone: tables (vocab, vocab), a row for each last
    token. What they are called with is counted."""

    target_table: Tensor
    draft_table: Tensor
    allowed: int = 1_000_000
    target_calls: int = 0
    draft_calls: int = 0

    @classmethod
    def memoryless(cls, p: Tensor, q: Tensor, **more: int) -> "_Models":
        """The same row whatever the last token was."""
        return cls(p.expand(len(p), -1), q.expand(len(q), -1), **more)

    def target(self, tokens: list[int]) -> Tensor:
        """(len(tokens), vocab): row i is the distribution of the token after tokens[: i + 1]."""
        self.target_calls += 1
        self._count()
        return self.target_table[torch.as_tensor(tokens)]

    def draft(self, tokens: list[int]) -> Tensor:
        """(vocab,): the draft's distribution of the token after `tokens`."""
        self.draft_calls += 1
        self._count()
        return self.draft_table[int(tokens[-1])].clone()

    def _count(self) -> None:
        if (calls := self.target_calls + self.draft_calls) > self.allowed:
            raise Endless(f"{calls:,} calls of target and draft, and not done: {_ENDLESS}")


def _run(answer: Answer, models: _Models, n_new: int, gamma: int, seed: int, prompt: tuple[int, ...] = (0, 1)):
    """The new tokens and the acceptance rate, checked for their form."""
    given, generator = list(prompt), torch.Generator().manual_seed(seed)
    value = answer(models.target, models.draft, given, n_new, gamma, generator)
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two things, (tokens, acceptance_rate); got {type(value).__name__}")
    try:
        tokens, rate = [int(t) for t in value[0]], float(value[1])
    except (TypeError, ValueError, RuntimeError):
        raise Failed("tokens should be a list of whole numbers, and acceptance_rate a number") from None
    expect(given == list(prompt), "the list of tokens that you were given should stay as it is")
    expect(tokens[: len(given)] == given, "the tokens should begin with those that you were given")
    told = f"{n_new} new tokens were asked for, with gamma {gamma}, and {len(tokens) - len(given)} came"
    expect(len(tokens) == len(given) + n_new, told)
    return tokens[len(given) :], rate


def _test_twin(answer: Answer) -> None:
    """A draft that is the target: all is accepted, and each call gives gamma + 1 tokens. The faulty form does this."""
    p = distributions(3, _VOCAB)
    for n_new, gamma in ((12, 3), (10, 4), (5, 1)):
        models = _Models.memoryless(p, p, allowed=100 * n_new)
        _, rate = _run(answer, models, n_new, gamma, seed=n_new)
        where = f"a draft that equals the target, {n_new} tokens, gamma {gamma}"
        expect(rate == 1, f"{where}: everything should be accepted; your rate is {rate:.2f}")
        calls = math.ceil(n_new / (gamma + 1))
        told = f"{where}: a call gives gamma + 1 tokens, the last of them the target's own, so that {calls} are enough"
        expect(models.target_calls == calls, f"{told}; yours took {models.target_calls}")


def _test_always_wrong(answer: Answer) -> None:
    """A draft that says only what the target never says: one token a call, none of them the draft's."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    for gamma in (1, 3):
        models = _Models.memoryless(p, q, allowed=400)
        tokens, rate = _run(answer, models, 8, gamma, seed=gamma)
        where = f"a draft that is always wrong, gamma {gamma}"
        expect(2 not in tokens, f"{where}: its token, which the target never gives, came out")
        expect(rate == 0, f"{where}: none of its tokens is accepted; your rate is {rate:.2f}")
        told = f"{where}: each call should give one token, the target's own, so that 8 take 8 calls"
        expect(models.target_calls == 8, f"{told}; yours took {models.target_calls}")


def _chain(table: Tensor, last: int, length: int) -> Tensor:
    """The probability of each sequence of `length` tokens after `last`, flat, the first token leading."""
    reached = table[last]
    for _ in range(length - 1):
        reached = (reached[:, None] * table.repeat(len(reached) // _VOCAB, 1)).flatten()
    return reached


def _why(models: _Models, counts: Tensor, last: int) -> str:
    """The usual mistake that shows in the first token of each sequence: `counts` flat, it leading."""
    first = counts.view(_VOCAB, -1).sum(-1)
    return "" if improbable(first, models.draft_table[last]) else ": the first of them are the draft's own"


def _test_distribution(answer: Answer, same: bool) -> None:
    """Sequences come with the probability that the target gives them, for a draft that is the target and another."""
    target = distributions(8, _VOCAB, _VOCAB, sharpness=2.0)
    models = _Models(target, target if same else distributions(9, _VOCAB, _VOCAB, sharpness=2.0))
    length = 3
    for gamma in (2,) if same else (1, 2, 4):
        counts = torch.zeros(_VOCAB**length)
        for run in range(_RUNS):
            models.allowed, models.target_calls, models.draft_calls = 1000, 0, 0
            tokens, rate = _run(answer, models, length, gamma, seed=1000 * gamma + run, prompt=(2, 0, 1))
            counts[sum(t * _VOCAB ** (length - 1 - i) for i, t in enumerate(tokens))] += 1
            told = "a draft that equals the target is accepted whole; yours was rejected: is p read where it belongs?"
            expect(not same or rate == 1, told)
        kind = "that equals the target" if same else "unlike the target"
        told = f"a draft {kind}, gamma {gamma}: {_RUNS} times {length} tokens should come as often as the target gives "
        wrong = improbable(counts, _chain(target, 1, length))
        expect(not wrong, f"{told}them, and do not" + (_why(models, counts, 1) if wrong else ""))


def _test_rate(answer: Answer) -> None:
    """The acceptance rate is sum min(p, q): accepted drafts over those that a verdict was given on."""
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.4, 0.4])
    alpha, n_new, gamma = float(torch.minimum(p, q).sum()), 800, 4
    _, rate = _run(answer, _Models.memoryless(p, q), n_new, gamma, seed=77)
    told = f"with sum min(p, q) = {alpha:.2f} your acceptance rate is {rate:.2f}. It is accepted drafts over those "
    told += (
        "that a verdict was given on: what follows a rejection was not tested, and the target's own token is no draft"
    )
    expect(abs(rate - alpha) < 0.1, told)


def _test_ends(answer: Answer) -> None:
    _test_twin(answer)
    _test_always_wrong(answer)


def _test_draws(answer: Answer) -> None:
    _test_distribution(answer, same=True)
    _test_distribution(answer, same=False)
    _test_rate(answer)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    endless = f"your function had not ended after {_LIMIT_S:g} seconds: {_ENDLESS}"
    within(_LIMIT_S, lambda: own(lambda: _test_ends(answer)), endless)
    # No more watched: it takes time, and whoever calls labkit's own did so above.
    within(_LIMIT_S * _PATIENCE, lambda: _test_draws(answer), endless)
    return "the target's distribution, whatever the draft; an end, even where nothing is accepted; and an honest rate"


FIXED_SPECULATION = Exercise(
    name="fixed_speculation",
    chapter=5,
    task="Find the bugs: two faults in a speculative loop, neither of which shows where the draft is the target's twin "
    "and no token hangs on the one before it. Mend it.",
    signature=_SIGNATURE,
    hints=(
        "Try two drafts: one that the target never agrees with, and one that is the target, but with a next token that "
        "hangs on the last. What does each call add?",
        "target(tokens + drafts) has a row for each token in it. Which row speaks of the first draft, and how many "
        "rows are needed with the bonus token? And what is drawn after a rejection?",
        "p = target(tokens + drafts)[-gamma - 1 :]; after a rejection at n append pick((p[n] - q[n]).clamp(min=0)), "
        "which multinomial divides by its sum; after none, pick(p[gamma]).",
    ),
    test=_test,
)
