"""Exercise `best_draft_length`: how many tokens to draft, from the acceptance and the two costs, as they were measured.

Leviathan et al. 2023, theorem 3.8, with the cost of verifying that the paper takes as 1.
"""

from collections.abc import Callable

from labkit.exercises._ch05_reference import as_count, own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect

_SIGNATURE = "best_draft_length(alpha, draft_cost, verify_cost, most) -> gamma"
# Time of a pass over n tokens, over that of one. The last two come in steps, as blocks of a matmul do.
_VERIFY: dict[str, Callable[[int], float]] = {
    "verifying free of cost": lambda n: 1.0,
    "each token more costs 5% of a step": lambda n: 1 + 0.05 * (n - 1),
    "each token more costs a whole step": float,
    "4 tokens cost as much as one, and each 4 more another half": lambda n: 1 + 0.5 * ((n - 1) // 4),
    "8 tokens cost twice one, and each 8 more as much again": lambda n: 1.0 if n == 1 else 2.0 + (n - 1) // 8,
}
Case = tuple[str, float, float, int]


def _tokens(alpha: float, gamma: int) -> float:
    return sum(alpha**i for i in range(gamma + 1))


def _right(case: Case, gamma: int) -> float:
    """The speed-up; no draft is a plain step."""
    name, alpha, cost, _ = case
    return _tokens(alpha, gamma) / (gamma * cost + _VERIFY[name](gamma + 1))


def _best(case: Case, speedup: Callable[[Case, int], float], least: int = 0) -> int:
    values = [speedup(case, gamma) for gamma in range(least, case[3] + 1)]
    return least + values.index(max(values)) if values else 0


def _first_peak(case: Case) -> int:
    gamma = 0
    while gamma < case[3] and _right(case, gamma + 1) > _right(case, gamma):
        gamma += 1
    return gamma


def _with(
    tokens: Callable[[float, int], float] = _tokens, draft: float = 1.0, more: int = 1
) -> Callable[[Case, int], float]:
    """The speed-up with one thing done otherwise."""
    return lambda c, gamma: tokens(c[1], gamma) / (gamma * c[2] * draft + (_VERIFY[c[0]](gamma + more) if more else 1))


_MISTAKES: dict[str, Callable[[Case], int]] = {
    "where drafting makes it slower, the best length is 0": lambda c: _best(c, _right, least=1),
    "a pass over gamma + 1 tokens costs verify_cost(gamma + 1), and not 1": lambda c: _best(c, _with(more=0)),
    "the pass has gamma + 1 tokens: the last verified one and the drafts": lambda c: _best(
        c, lambda c, gamma: _tokens(c[1], gamma) / (gamma * c[2] + _VERIFY[c[0]](max(1, gamma)))
    ),
    "drafting takes time, too: gamma * draft_cost": lambda c: _best(c, _with(draft=0.0)),
    "each drafted token costs draft_cost, not the draft as a whole": lambda c: _best(
        c, lambda c, gamma: _tokens(c[1], gamma) / ((gamma > 0) * c[2] + _VERIFY[c[0]](gamma + 1))
    ),
    "a call gives one token more than it accepts": lambda c: _best(c, _with(lambda a, g: _tokens(a, g) - 1)),
    "a draft is worth nothing once one before it is rejected: alpha^i": lambda c: _best(
        c, _with(lambda a, g: 1 + a * g)
    ),
    "look at every length: with costs that come in steps, the first peak need not be the highest": _first_peak,
    "this is the most tokens a call, and says nothing of their time": lambda c: _best(
        c, lambda c, gamma: _tokens(c[1], gamma)
    ),
}  # fmt: skip


def _cases() -> list[Case]:
    named = [
        ("verifying free of cost", 0.8, 0.05, 16), ("each token more costs 5% of a step", 0.8, 0.05, 16),
        ("verifying free of cost", 0.5, 0.05, 16), ("each token more costs a whole step", 0.9, 0.0, 16),
        ("each token more costs 5% of a step", 0.0, 0.01, 16), ("each token more costs 5% of a step", 1.0, 0.1, 16),
        ("verifying free of cost", 1.0, 0.0, 5),
    ]  # fmt: skip
    grid = [(v, a, c, most) for v in _VERIFY for a in (0.3, 0.6, 0.75, 0.95) for c in (0.0, 0.03, 0.3)
            for most in (16, 6)]  # fmt: skip
    return named + grid


def _cost_up_to(name: str, most: int) -> Callable[[int], float]:
    """The costs as a measurement knows them: of passes over 1 to most + 1 tokens."""

    def verify_cost(n: int) -> float:
        inside = n == int(n) and 1 <= n <= most + 1
        if not inside:
            raise ValueError(f"verify_cost was measured for 1 to {most + 1} tokens, and asked for {n}")
        return _VERIFY[name](int(n))

    return verify_cost


def _run(answer: Answer, case: Case) -> int:
    name, alpha, cost, most = case
    try:
        value = own(lambda: answer(alpha, cost, _cost_up_to(name, most), most))
    except Failed as failure:
        raise Failed(f"alpha {alpha}, draft_cost {cost}, {name}: {failure}") from None
    return as_count(value, most, "the number of tokens to draft")


def _equal(case: Case, a: int, b: int) -> bool:
    """As fast; where two lengths are, either will do."""
    return abs(_right(case, a) - _right(case, b)) < 1e-9


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    found = [_run(answer, case) for case in cases]
    wrong = [i for i, case in enumerate(cases) if not _equal(case, found[i], _best(case, _right))]
    if wrong:
        case, gamma = cases[wrong[0]], found[wrong[0]]
        best = _best(case, _right)
        told = f"{case[0]}, alpha {case[1]}, draft_cost {case[2]}, at most {case[3]}: {best} drafted tokens give "
        told += f"{_right(case, best):.2f}x, and your {gamma} give {_right(case, gamma):.2f}x"
        pairs = list(zip(cases, found, strict=True))
        why = (text for text, rule in _MISTAKES.items() if all(_equal(c, f, rule(c)) for c, f in pairs))
        expect(False, told + "".join(f": {text}" for text in list(why)[:1]))
    none = sum(not gamma for gamma in found)
    return f"the fastest length in all {len(cases)} cases; in {none} of them it is not to draft at all"


BEST_DRAFT_LENGTH = Exercise(
    name="best_draft_length",
    chapter=5,
    task="The number of drafted tokens with the largest speed-up, from the acceptance rate, the cost of drafting a "
    "token and the cost of verifying several at once.",
    signature=_SIGNATURE,
    hints=(
        "A call drafts gamma tokens, one after another, and verifies them in one pass, together with the last verified "
        "token. How long is that in plain steps, and how many tokens does it give?",
        "It gives 1 + alpha + ... + alpha^gamma tokens and takes gamma * draft_cost + verify_cost(gamma + 1) steps. "
        "For gamma = 0 that is one token in one step: a speed-up of 1.",
        "return max(range(most + 1), key=lambda g: sum(alpha**i for i in range(g + 1)) / (g * draft_cost + "
        "verify_cost(g + 1))).",
    ),
    test=_test,
)
