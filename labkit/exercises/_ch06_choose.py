"""Exercise `choose_stack`: the fastest of the measured steps of a ladder that fits the memory and keeps the quality."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit.exercises._ch06_reference import own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect

_SIGNATURE = 'choose_stack(steps, memory_limit, max_loss) -> the name of a step, or "" if none will do'
_RANDOM_CASES = 300


@dataclass(frozen=True)
class Step:
    """A measured step of a ladder. loss: of perplexity over the baseline's, as a share."""

    name: str
    peak_bytes: float
    tokens_per_second: float
    loss: float


Case = tuple[list[Step], float, float]


def _fits(case: Case) -> list[Step]:
    steps, memory, loss = case
    return [step for step in steps if step.peak_bytes <= memory and step.loss <= loss]


def _best(steps: list[Step], order: Callable[[Step], tuple[float, ...]]) -> str:
    return min(steps, key=order).name if steps else ""


def _order(step: Step) -> tuple[float, ...]:
    """The fastest first; of equally fast ones the least loss, then the least memory."""
    return -step.tokens_per_second, step.loss, step.peak_bytes


def _right(case: Case) -> str:
    return _best(_fits(case), _order)


def _if_fits(case: Case, name: str) -> str:
    return name if name in {step.name for step in _fits(case)} else ""


_MISTAKES: dict[str, Callable[[Case], str]] = {
    "this looks at the quality alone, and not at the memory": lambda c: _best(
        [s for s in c[0] if s.loss <= c[2]], _order
    ),
    "this looks at the memory alone, and not at the quality": lambda c: _best(
        [s for s in c[0] if s.peak_bytes <= c[1]], _order
    ),
    "the fastest of all may not fit where a slower one does": lambda c: _if_fits(c, _best(c[0], _order)),
    "a step that is at the limit fits": lambda c: _best(
        [s for s in c[0] if s.peak_bytes < c[1] and s.loss < c[2]], _order
    ),
    "a model may have got better: only a loss above the limit is too much": lambda c: _best(
        [s for s in c[0] if s.peak_bytes <= c[1] and abs(s.loss) <= c[2]], _order
    ),
    "this is the first that fits, and a later one may be faster": lambda c: next((s.name for s in _fits(c)), ""),
    "the last rung is not always the fastest": lambda c: next((s.name for s in reversed(_fits(c))), ""),
    "this is the smallest that fits; asked is the fastest": lambda c: _best(_fits(c), lambda s: (s.peak_bytes,)),
    "this is the one with the least loss; asked is the fastest": lambda c: _best(_fits(c), lambda s: (s.loss,)),
    "of equally fast ones take the one with the least loss": lambda c: _best(
        _fits(c), lambda s: (-s.tokens_per_second,)
    ),
    "of equally fast ones the loss decides before the memory": lambda c: _best(
        _fits(c), lambda s: (-s.tokens_per_second, s.peak_bytes, s.loss)
    ),
    "of equally fast ones with the same loss take the smallest": lambda c: _best(
        _fits(c), lambda s: (-s.tokens_per_second, s.loss)
    ),
    "asked is the fastest, not the slowest": lambda c: _best(
        _fits(c), lambda s: (s.tokens_per_second, s.loss, s.peak_bytes)
    ),
}


def _ladder() -> list[Step]:
    return [
        Step("baseline", 610e6, 11.0, 0.0), Step("bfloat16", 330e6, 14.0, 0.001), Step("INT8", 240e6, 25.0, 0.004),
        Step("INT4", 190e6, 31.0, 0.09), Step("INT4, INT8 KV", 180e6, 29.0, 0.091),
        Step("INT4, speculation", 260e6, 42.0, 0.09),
    ]  # fmt: skip


def _cases() -> list[Case]:
    steps = _ladder()
    limits = [(1e9, 1.0), (250e6, 1.0), (1e9, 0.01), (250e6, 0.01), (185e6, 0.2), (100e6, 1.0), (1e9, -0.1),
              (610e6, 0.0), (190e6, 0.09), (330e6, 0.001)]  # fmt: skip
    cases = [(steps, *limit) for limit in limits] + [(steps[::-1], *limit) for limit in limits] + [([], 1e9, 1.0)]
    choose = torch.Generator().manual_seed(6)

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=choose))

    for _ in range(_RANDOM_CASES):
        found = {(1e6 * pick(5), 1.0 + pick(3), 0.01 * (pick(5) - 2)): None for _ in range(1 + pick(6))}
        named = [Step(f"step {i}", *values) for i, values in enumerate(found)]
        cases.append((named, 1e6 * pick(5), 0.01 * (pick(5) - 2)))
    return cases


def _run(answer: Answer, case: Case) -> str:
    steps = list(case[0])
    value = own(lambda: answer(steps, *case[1:]))
    expect(steps == case[0], "the list that you were given should stay as it is")
    if not isinstance(value, str):
        raise Failed(f'return a name, step.name, or "" if none will do; got {type(value).__name__}')
    return value


def _said(case: Case) -> str:
    steps = "; ".join(
        f"{s.name}: {s.peak_bytes / 1e6:g} MB, {s.tokens_per_second:g} tokens/s, {s.loss:+.1%}" for s in case[0]
    )
    return f"at most {case[1] / 1e6:g} MB and {case[2]:+.1%} of [{steps}]"


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    found = [_run(answer, case) for case in cases]
    wrong = [i for i, case in enumerate(cases) if found[i] != _right(case)]
    if wrong:
        case = cases[wrong[0]]
        why = (f": {text}" for text, rule in _MISTAKES.items() if found == [rule(c) for c in cases])
        expect(False, f'{_said(case)}: "{_right(case)}" it is; yours says "{found[wrong[0]]}"{next(why, "")}')
    return f"the fastest that fits, in all {len(cases)} cases; in {found.count('')} of them none does"


CHOOSE_STACK = Exercise(
    name="choose_stack",
    chapter=6,
    task="Of measured steps, the fastest that fits a memory limit and loses no more quality than allowed.",
    signature=_SIGNATURE,
    hints=(
        "Which steps may be taken at all? Both limits belong to what is allowed.",
        "Among those that are left, min with a key does it: a tuple decides by its first entry, then by the next. Its "
        'argument default="..." is for an empty list.',
        "fits = [s for s in steps if s.peak_bytes <= memory_limit and s.loss <= max_loss]; the smallest of them by "
        '(-s.tokens_per_second, s.loss, s.peak_bytes); "" if fits is empty.',
    ),
    test=_test,
)
