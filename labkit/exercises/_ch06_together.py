"""Exercise `goes_together`: which rungs of a list go on, one after another, by the rules of the chapter.

`labkit.engine.ladder.refusals` decides the same for the ladder.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from labkit.exercises._ch06_reference import own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect

_SIGNATURE = "goes_together(rungs, on_gpu, bits, has_draft) -> list of the rungs that go on"
_RUNGS = ("step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation")
_RANDOM_CASES = 600


@dataclass(frozen=True)
class _Case:
    """bits: of the weights as they were loaded. has_draft: whether something drafts."""

    rungs: tuple[str, ...]
    on_gpu: bool
    bits: int
    has_draft: bool

    def __str__(self) -> str:
        where, draft = "a GPU" if self.on_gpu else "a CPU", "a draft" if self.has_draft else "no draft"
        return f"{list(self.rungs)} on {where}, weights of {self.bits} bits, {draft}"


# Whether a rung is refused, from the case and what is on already.
Rule = Callable[[_Case, list[str]], bool]
_RULES: dict[str, Rule] = {
    "bfloat16": lambda case, on: case.bits <= 16,
    "int8": lambda case, on: "int4" in on,
    "step": lambda case, on: case.on_gpu and "quantized_kv" in on,
    "quantized_kv": lambda case, on: case.on_gpu and "step" in on,
    "speculation": lambda case, on: "step" not in on or not case.has_draft,
}


@dataclass(frozen=True)
class _Way:
    """How to decide; `changed`: rules that are other ones. `of_all`: by what is in the list, not by what is on."""

    changed: dict[str, Rule] = field(default_factory=dict)
    of_all: bool = False
    stops: bool = False

    def __call__(self, case: _Case) -> list[str]:
        rules, on = _RULES | self.changed, []
        for rung in case.rungs:
            others = [r for r in case.rungs if r != rung] if self.of_all else on
            if not rules.get(rung, lambda *_: False)(case, others):
                on.append(rung)
            elif self.stops:
                break
        return on


def _never(case: _Case, on: list[str]) -> bool:
    return False


def _rungs_before(case: _Case, rung: str) -> tuple[str, ...]:
    return case.rungs[: case.rungs.index(rung)]


_right = _Way()
_MISTAKES: dict[str, Callable[[_Case], list[str]]] = {
    "these are the rungs that do not go on": lambda c: [r for r in c.rungs if r not in _right(c)],
    "keep the order in which they are put on": lambda c: sorted(_right(c), key=_RUNGS.index),
    "a rung that is refused is left out, and the next ones are still tried": _Way(stops=True),
    "a rung is put on what is on already, not on what comes after it": _Way(of_all=True),
    "a rung that was refused is not on, and forbids nothing": lambda c: [
        r for r in c.rungs if not _RULES.get(r, _never)(c, list(_rungs_before(c, r)))
    ],
    "weights of 16 bits cannot go to 16 bits again": _Way({"bfloat16": _never}),
    "weights of 8 bits have no more than 16 either": _Way({"bfloat16": lambda c, on: c.bits == 16}),
    "INT8 does not go on INT4": _Way({"int8": _never}),
    "INT4 goes on INT8 and takes its place": _Way({"int4": lambda c, on: "int8" in on}),
    "the step forbids the quantized cache on a GPU alone": _Way(
        {"quantized_kv": lambda c, on: "step" in on, "step": lambda c, on: "quantized_kv" in on}
    ),
    "on a GPU the quantized cache does not go on the step": _Way({"quantized_kv": _never}),
    "on a GPU the step does not go on the quantized cache either": _Way({"step": _never}),
    "on a GPU it is the step that moves nothing; without it a quantized cache goes on": _Way(
        {"quantized_kv": lambda c, on: c.on_gpu}
    ),
    "speculation needs the own step": _Way({"speculation": lambda c, on: not c.has_draft}),
    "speculation needs something that drafts": _Way({"speculation": lambda c, on: "step" not in on}),
}


def _cases() -> list[_Case]:
    cpu = _Case(_RUNGS, False, 32, True)
    chosen = [cpu, replace(cpu, on_gpu=True), replace(cpu, bits=16), replace(cpu, has_draft=False),
              replace(cpu, rungs=_RUNGS[::-1]), replace(cpu, rungs=("int4", "int8", "int8_head")),
              replace(cpu, rungs=("quantized_kv", "step", "speculation"), on_gpu=True),
              replace(cpu, rungs=("bfloat16", "step"), bits=8), replace(cpu, rungs=())]  # fmt: skip
    choose = torch.Generator().manual_seed(66)
    for _ in range(_RANDOM_CASES):
        order = torch.randperm(len(_RUNGS), generator=choose)[: int(torch.randint(9, (), generator=choose))]
        gpu, bits, draft = (int(torch.randint(n, (), generator=choose)) for n in (2, 3, 2))
        rungs = tuple(_RUNGS[i] for i in order.tolist())
        chosen.append(_Case(rungs, bool(gpu), (32, 16, 8)[bits], bool(draft)))
    return chosen


def _run(answer: Answer, case: _Case) -> list[str]:
    rungs = list(case.rungs)
    value = own(lambda: answer(rungs, case.on_gpu, case.bits, case.has_draft))
    expect(rungs == list(case.rungs), "the list that you were given should stay as it is")
    if not isinstance(value, list | tuple):
        raise Failed(f"return a list of rungs; got {type(value).__name__}")
    return list(value)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    found = [_run(answer, case) for case in cases]
    wrong = [i for i, case in enumerate(cases) if found[i] != _right(case)]
    if wrong:
        case = cases[wrong[0]]
        why = (f": {text}" for text, way in _MISTAKES.items() if found == [way(c) for c in cases])
        expect(False, f"{case}: {_right(case)} go on; yours says {found[wrong[0]]}{next(why, '')}")
    return f"the rungs that go on, in their order, in all {len(cases)} cases"


GOES_TOGETHER = Exercise(
    name="goes_together",
    chapter=6,
    task="Which rungs of a list go on, one after another, by the rules of the chapter.",
    signature=_SIGNATURE,
    hints=(
        "Walk through the list with a second list of what is on so far. What may a rule look at?",
        "A rule looks at what is on, and not at what was asked for: a rung that was refused forbids nothing. In which "
        "order the step and the quantized cache come does not matter on a GPU: the second of them is refused.",
        "for rung in rungs: refused = (rung == 'int8' and 'int4' in on) or ...; append it to `on` if it is not "
        "refused; return on. On a GPU: rung == 'step' and 'quantized_kv' in on, and the other way round.",
    ),
    test=_test,
)
