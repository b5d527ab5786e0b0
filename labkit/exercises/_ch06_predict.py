"""Exercise `predict_rung`: what a rung brings, from the bytes that a step reads before and after it.

Amdahl's law with bytes: what a rung leaves as it is, and what takes time without reading anything, sets the limit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from labkit.exercises._ch06_reference import all_near, own
from labkit.exercises._exercise import Answer, Exercise, expect, near

_SIGNATURE = "predict_rung(before, after, fixed_s, bandwidth) -> speed-up"


@dataclass(frozen=True)
class _Case:
    """A step's bytes by part, its time that no rung touches in seconds, and bytes/s."""

    what: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    fixed_s: float
    bandwidth: float

    def seconds(self, parts: Mapping[str, float]) -> float:
        return sum(parts.values()) / self.bandwidth


def _right(case: _Case) -> float:
    return (case.fixed_s + case.seconds(case.before)) / (case.fixed_s + case.seconds(case.after))


def _common(case: _Case, changed_only: bool = False) -> list[tuple[float, float]]:
    """Bytes before and after of the parts that both steps have."""
    pairs = [(case.before[part], case.after[part]) for part in case.before if part in case.after]
    return [(a, b) for a, b in pairs if a != b] or [(1.0, 1.0)] if changed_only else pairs


def _over(pairs: list[tuple[float, float]], fixed: float, bandwidth: float) -> float:
    before, after = (sum(side) / bandwidth for side in zip(*pairs, strict=True))
    return (fixed + before) / (fixed + after)


_MISTAKES: dict[str, Callable[[_Case], float]] = {
    "this is the ratio of the bytes: a step also takes fixed_s, in seconds, before and after": lambda c: (
        c.seconds(c.before) / c.seconds(c.after)
    ),
    "fixed_s is in the step before the rung, too": lambda c: c.seconds(c.before) / (c.fixed_s + c.seconds(c.after)),
    "no rung touches fixed_s: it is in the step after it, too": lambda c: (
        (c.fixed_s + c.seconds(c.before)) / c.seconds(c.after)
    ),
    "this is the time that is left; a speed-up is before over after": lambda c: 1 / _right(c),
    "what the rung leaves as it was is read as well": lambda c: _over(_common(c, True), c.fixed_s, c.bandwidth),
    "a part may be there before the rung only, or after it only": lambda c: _over(_common(c), c.fixed_s, c.bandwidth),
    "the parts' speed-ups do not multiply: add up the times": lambda c: prod(a / b for a, b in _common(c)),
    "a mean of the parts' speed-ups gives a small part as much weight as a large one: add up the times": lambda c: (
        sum(a / b for a, b in _common(c)) / len(_common(c))
    ),
}  # fmt: skip


def _cases() -> list[_Case]:
    bf16 = {"body": 13.96e9, "head": 1.05e9, "kv": 67.1e6}
    small = {"body": 425e6, "head": 113e6, "kv": 23.6e6}
    far = bf16 | {"kv": 17.2e9}
    return [
        _Case("an 8B at 4 bits on an H200", bf16, bf16 | {"body": 3.6e9}, 0.8e-3, 4.8e12),
        _Case("an 8B at 8 bits, and no fixed time", bf16, bf16 | {"body": 7.2e9}, 0.0, 4.8e12),
        _Case("a quantized cache at 512 tokens", bf16, bf16 | {"kv": 35.7e6}, 0.8e-3, 4.8e12),
        _Case("a quantized cache at 131,072 tokens", far, far | {"kv": 9.1e9}, 0.8e-3, 4.8e12),
        _Case("a small model at 8 bits on two CPU cores", small, small | {"body": 113e6, "head": 30e6}, 9e-3, 9e9),
        _Case("a small model that waits most of the time", small, small | {"body": 57e6}, 0.4, 9e9),
        _Case("a drafter's weights on top", bf16, bf16 | {"drafter": 0.5e9}, 0.8e-3, 4.8e12),
        _Case("scores that are no longer written", bf16 | {"scores": 2e9}, bf16, 0.8e-3, 4.8e12),
        _Case("a rung that changes nothing", small, dict(small), 9e-3, 9e9),
    ]


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    found = []
    for case in cases:
        before, after = dict(case.before), dict(case.after)
        found.append(own(lambda a=(before, after, case.fixed_s, case.bandwidth): answer.number(*a)))
        expect((before, after) == (case.before, case.after), "what you were given should stay as it is")
    wrong = [i for i, case in enumerate(cases) if not near(found[i], _right(case))]
    if wrong:
        case, value = cases[wrong[0]], found[wrong[0]]
        why = (f": {text}" for text, rule in _MISTAKES.items() if all_near(found, [rule(c) for c in cases]))
        expect(False, f"{case.what}: {_right(case):.4g}x; yours says {value:.4g}x{next(why, '')}")
    return f"right for all {len(cases)} rungs; the quantized cache brings {found[2]:.3f}x at 512 tokens, and " + (
        f"{found[3]:.2f}x at 131,072"
    )


PREDICT_RUNG = Exercise(
    name="predict_rung",
    chapter=6,
    task="The speed-up of a rung, from the bytes that each part of a step reads before and after it, and the time that "
    "no rung touches.",
    signature=_SIGNATURE,
    hints=(
        "How long does a step take before the rung? All its bytes go through the same memory.",
        "A step takes fixed_s and the sum of its bytes over the bandwidth. The speed-up is the time before over the "
        "time after, and each of the two has its own parts.",
        "seconds = lambda parts: fixed_s + sum(parts.values()) / bandwidth; return seconds(before) / seconds(after).",
    ),
    test=_test,
)
