"""Exercise `fixed_ladder`: the report of a ladder, right where time falls as memory does and all prompts are alike.

The form with the faults, as the notebook shows it:

    def ladder_report(runs):
        rows, first = [], runs[0]
        for run in runs:
            memory = sum(run.peak_bytes) / sum(first.peak_bytes)
            rows.append((run.name, 1 / memory, memory))
        return rows

A ratio of memory is printed as a speed-up, and what must fit, the largest peak over the prompts, is averaged away.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labkit.exercises._ch06_reference import all_near, as_numbers, own
from labkit.exercises._exercise import Answer, Exercise, expect

_SIGNATURE = "fixed_ladder(runs) -> [(name, speed_up, memory), ...]"


@dataclass(frozen=True)
class Run:
    """One rung, with a figure for each prompt: tokens that were made, seconds that they took, bytes at the peak."""

    name: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    peak_bytes: tuple[float, ...]

    @property
    def rate(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def peak(self) -> float:
        return max(self.peak_bytes)

    def mean_rate(self) -> float:
        return sum(n / s for n, s in zip(self.tokens, self.seconds, strict=True)) / len(self.tokens)


Column = Callable[[list[Run], int], float]


def _speed_up(runs: list[Run], i: int) -> float:
    return runs[i].rate / runs[0].rate


def _memory(runs: list[Run], i: int) -> float:
    return runs[i].peak / runs[0].peak


_SPEED_MISTAKES: dict[str, Column] = {
    "this is a ratio of memory, and no speed": lambda runs, i: sum(runs[0].peak_bytes) / sum(runs[i].peak_bytes),
    "this is a ratio of peaks, and no speed": lambda runs, i: 1 / _memory(runs, i),
    "a run that stops early makes fewer tokens, and is not faster for it": lambda runs, i: (
        sum(runs[0].seconds) / sum(runs[i].seconds)
    ),
    "all tokens over all seconds, not the mean of the prompts' rates": lambda runs, i: (
        runs[i].mean_rate() / runs[0].mean_rate()
    ),
    "the baseline is the first run, not the one before": lambda runs, i: runs[i].rate / runs[max(0, i - 1)].rate,
    "this is the time that is left; a speed-up is the rate over the baseline's": lambda runs, i: (
        1 / _speed_up(runs, i)
    ),
}  # fmt: skip
_MEMORY_MISTAKES: dict[str, Column] = {
    "the largest of the prompts' peaks must fit, and their mean says nothing of it": lambda runs, i: (
        sum(runs[i].peak_bytes) / sum(runs[0].peak_bytes)
    ),
    "the largest peak, not the least": lambda runs, i: min(runs[i].peak_bytes) / min(runs[0].peak_bytes),
    "the baseline is the first run, not the one before": lambda runs, i: runs[i].peak / runs[max(0, i - 1)].peak,
    "memory is what is left of the baseline's, not how many times it was": lambda runs, i: 1 / _memory(runs, i),
    "each peak over the first run's on the same prompt is another question": lambda runs, i: max(
        a / b for a, b in zip(runs[i].peak_bytes, runs[0].peak_bytes, strict=True)
    ),
}  # fmt: skip


def _cases() -> list[tuple[str, list[Run]]]:
    alike = [Run("baseline", (64, 64), (4.0, 4.0), (8e8, 8e8)), Run("INT8", (64, 64), (2.0, 2.0), (4e8, 4e8))]
    slower = Run("bfloat16", (64, 64), (5.0, 5.0), (4e8, 4e8))
    faster = Run("own step", (64, 64), (1.0, 1.0), (8e8, 8e8))
    prompts = [
        Run("baseline", (64, 64, 64), (4.0, 4.5, 9.0), (6e8, 6e8, 9e8)),
        Run("INT4", (64, 64, 64), (1.5, 1.6, 6.0), (2e8, 2e8, 5e8)),
        Run("attention", (64, 64, 64), (1.5, 1.6, 3.0), (2e8, 2e8, 3e8)),
    ]
    early = [
        Run("baseline", (64, 64, 64), (4.0, 4.0, 4.0), (6e8, 7e8, 6e8)),
        Run("INT4", (64, 16, 8), (2.0, 0.5, 0.75), (2e8, 2e8, 1e8)),
        Run("speculation", (64, 20, 64), (1.0, 0.5, 1.25), (3e8, 1e8, 2e8)),
    ]
    return [
        ("time falls as memory does", alike),
        ("half the memory, and slower", [alike[0], slower]),
        ("the same memory, and faster", [alike[0], faster, alike[1]]),
        ("one long prompt", prompts),
        ("runs that stop early", early),
    ]


def _rows(answer: Answer, runs: list[Run], what: str) -> list[tuple[float, ...]]:
    given = list(runs)
    value = own(lambda: answer(given))
    expect(given == runs, "the list that you were given should stay as it is")
    expect(isinstance(value, list | tuple), f"return a list of rows; got {type(value).__name__}")
    names, found = [run.name for run in runs], list(value)
    triples = all(isinstance(row, list | tuple) and len(row) == 3 for row in found)
    expect(triples, f"{what}: each row should be (name, speed_up, memory); got {value!r:.80}")
    expect([row[0] for row in found] == names, f"{what}: a row for each of {names}, in their order")
    return [as_numbers(row[1:], 2, f"speed_up and memory of {row[0]}") for row in found]


def _compare(found: list[list[float]], name: str, right: Column, mistakes: dict[str, Column]) -> None:
    """Fail at the first figure that is off, naming the mistake that gives all of them; `found`: a list a case."""
    cases = _cases()

    def column(rule: Column) -> list[list[float]]:
        return [[rule(runs, i) for i in range(len(runs))] for _, runs in cases]

    for (what, runs), got, wanted in zip(cases, found, column(right), strict=True):
        for run, a, b in zip(runs, got, wanted, strict=True):
            if not all_near([a], [b]):
                told = f"{what}: the {name} of {run.name} is {b:.4g}; yours says {a:.4g}"
                why = (
                    f": {text}" for text, rule in mistakes.items() if all_near(sum(found, []), sum(column(rule), []))
                )
                expect(False, told + next(why, ""))


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    rows = [_rows(answer, runs, what) for what, runs in cases]
    _compare([[row[0] for row in case] for case in rows], "speed-up", _speed_up, _SPEED_MISTAKES)
    _compare([[row[1] for row in case] for case in rows], "memory", _memory, _MEMORY_MISTAKES)
    return f"speeds are made of tokens and seconds, memory of the largest peak, in {len(cases)} ladders"


FIXED_LADDER = Exercise(
    name="fixed_ladder",
    chapter=6,
    task="Find the bugs: two faults in the report of a ladder, neither of which shows where time falls as memory does "
    "and all prompts are alike. Mend it.",
    signature=_SIGNATURE,
    hints=(
        "Which of a run's figures does the report never read? And what must the machine hold: the memory of the mean "
        "prompt, or of the largest?",
        "A rate is all tokens over all seconds of a run; runs may stop early, so that seconds alone do not do.",
        "rate = sum(run.tokens) / sum(run.seconds), over the first run's; max(run.peak_bytes) / max(first.peak_bytes).",
    ),
    test=_test,
)
