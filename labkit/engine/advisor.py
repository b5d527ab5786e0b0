"""The advisor: what must hold, and a measured ladder, give a stack, with the reason for each rung."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from labkit import _check
from labkit._table import Table, readable
from labkit.engine.ladder.estimate import Estimate, estimate
from labkit.engine.ladder.result import Ladder
from labkit.engine.ladder.rungs import RUNGS, effective

TASKS = ("chat", "code", "mathematics")
# Perplexity is measured on prose. What is known of the others stands beside the advice; it decides nothing.
_ON_OTHER_TASKS = {
    "code": "The loss is that on prose; chapter 02 found no more on code. Evaluate on yours.",
    "mathematics": "The loss is that on prose; mathematics was not measured here. Evaluate before you rely on it.",
}
# A ladder speaks for prompts of half to twice its length.
_REACH = 2.0
# A gain below this is within the noise of a measurement.
_LEAST_GAIN = 1.03
# Of perplexity; below this two models are the same.
_LEAST_LOSS = 5e-4
_PACKED = ("int8", "int4", "int8_head")


@dataclass(frozen=True)
class Constraint:
    """What must hold. memory_bytes: at the peak, ttft_s: to the first token, tpot_s: a token; None: as good as can be.

    max_loss: of perplexity, as a share; loss_factor: a margin of your own, by which each measured loss is multiplied
    first. prompt_tokens: None for whatever was measured. has_draft: whether something drafts. task: what for.
    """

    memory_bytes: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    max_loss: float = 0.12
    loss_factor: float = 1.0
    prompt_tokens: int | None = None
    has_draft: bool = True
    task: str = "chat"

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "ttft_s", "tpot_s", "prompt_tokens"):
            value = getattr(self, name)
            _check.require(value is None or _check.number(name, value) > 0, name, value, "a number above 0, or None")
        _check.number("max_loss", self.max_loss, 0.0)
        _check.number("loss_factor", self.loss_factor, 0.0)
        _check.require(isinstance(self.has_draft, bool), "has_draft", self.has_draft, "True or False")
        _check.choice("task", self.task, TASKS)

    @property
    def limits(self) -> dict[str, float]:
        """What was asked for, by the field of an Estimate."""
        found = {"peak_bytes": self.memory_bytes, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Branch:
    """A branch of the decision tree: the complaint, the field of an Estimate that shows it, and the rungs that help,
    cheapest in quality first."""

    complaint: str
    field: str
    rungs: tuple[str, ...]


# A branch's rungs come by what they cost, then by what they bring. Where nothing is asked for, all branches are walked,
# speed first.
TREE = (
    Branch("it does not fit", "peak_bytes", ("bfloat16", "attention", "int8", "int4", "int8_head", "quantized_kv")),
    Branch("the first token comes late", "ttft_s", ("step", "bfloat16", "attention")),
    Branch(
        "tokens come slowly",
        "tpot_s",
        ("step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation"),
    ),
)
# What a field is called, and its unit.
_FIELDS = {"peak_bytes": ("memory", "bytes"), "ttft_s": ("first token", "s"), "tpot_s": ("a token", "s")}


@dataclass(frozen=True)
class Advised:
    """One rung: on or not, and why."""

    rung: str
    on: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Advice:
    """The stack, the reasons in the order in which the tree was walked, and what is to be expected of it; `missed`:
    what was asked for and is not reached, in words; `notes`: what else to know."""

    rungs: tuple[str, ...]
    steps: tuple[Advised, ...]
    expected: Estimate
    missed: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.table().text()}\n{self.summary()}"

    def _repr_html_(self) -> str:
        return self.table().html() + f"<p>{self.summary()}</p>"

    def table(self) -> Table:
        """A line for each rung that was looked at."""
        rows = tuple((RUNGS[step.rung].title, "on" if step.on else "off", step.reason) for step in self.steps)
        return Table(("rung", "", "because"), rows)

    def summary(self) -> str:
        """What to expect, and what is missed."""
        e = self.expected
        text = f"Expected: {readable(e.tpot_s, 's')} a token, first after {readable(e.ttft_s, 's')}, "
        text += f"{readable(e.peak_bytes, 'bytes')}, loss {e.loss:+.1%} ({e.label})."
        return " ".join([text, *self.missed, *self.notes])


def advise(constraint: Constraint, ladder: Ladder | Iterable[Ladder]) -> Advice:
    """Walk the tree: for each limit that the baseline misses, put on the rungs of its branch until it is met; without
    limits, every rung that pays. Each decision is taken from what the ladder measured; of several, from that whose
    prompts are nearest in length. Errors: ValueError where none was measured at half to twice the length."""
    _check.require(isinstance(constraint, Constraint), "constraint", type(constraint).__name__, "a Constraint")
    walk = _Walk(constraint, _for_length(ladder, constraint.prompt_tokens))
    for branch in TREE if constraint.limits else reversed(TREE):
        walk.along(branch)
    found = walk.expected()
    over = {name: limit for name, limit in constraint.limits.items() if getattr(found, name) > limit}
    missed = tuple(f"Missed: {_said(name, found)}, asked {readable(over[name], _FIELDS[name][1])}." for name in over)
    notes = (_ON_OTHER_TASKS[constraint.task],) if constraint.task in _ON_OTHER_TASKS else ()
    return Advice(tuple(walk.on), tuple(walk.steps.values()), found, missed, notes)


def _for_length(given: object, prompt_tokens: int | None) -> Ladder:
    """The ladder that speaks for prompts of so many tokens."""
    ladders = [given] if isinstance(given, Ladder) else list(given) if isinstance(given, Iterable) else []
    takes = "a Ladder, as measure_ladder returns, or several"
    known = bool(ladders) and all(isinstance(ladder, Ladder) for ladder in ladders)
    _check.require(known, "ladder", type(given).__name__, takes)
    if prompt_tokens is None:
        return ladders[0]
    nearest = min(ladders, key=lambda ladder: abs(math.log(ladder.prompt_tokens / prompt_tokens)))
    near = 1 / _REACH <= nearest.prompt_tokens / prompt_tokens <= _REACH
    lengths = ", ".join(str(ladder.prompt_tokens) for ladder in ladders)
    takes = f"about as many as a ladder was measured with ({lengths}); or measure one at that length"
    _check.require(near, "prompt_tokens", prompt_tokens, takes)
    return nearest


def _said(field: str, *found: Estimate) -> str:
    """A field's name, and its value in each of `found`."""
    name, unit = _FIELDS[field]
    return f"{name} " + " to ".join(readable(getattr(e, field), unit) for e in found)


class _Walk:
    """The rungs that are on so far, and what was said of each."""

    def __init__(self, constraint: Constraint, ladder: Ladder) -> None:
        self.constraint, self.ladder = constraint, ladder
        self.on: list[str] = []
        self.steps: dict[str, Advised] = {}
        self.refused = {step.rungs[-1]: step.refused for step in ladder.steps if step.refused}
        self.measured = {step.rungs[-1] for step in ladder.measured() if step.rungs}

    def expected(self, *more: str) -> Estimate:
        return estimate(self.ladder, effective((*self.on, *more)))

    def along(self, branch: Branch) -> None:
        """Put on what the branch offers, until its limit is met."""
        limits = self.constraint.limits
        if limits and branch.field not in limits:
            return
        for rung in branch.rungs:
            if limits and getattr(self.expected(), branch.field) <= limits[branch.field]:
                return
            if rung in effective((*self.on, rung)) and rung not in self.on:
                self.decide(rung, branch)

    def with_it(self, rung: str) -> tuple[str, ...]:
        """The rung, with 16 bits first where it is packed weights: their products compute in bfloat16, and on float32
        they are slower than no packing (chapter 02)."""
        alone = rung not in _PACKED or "bfloat16" not in self.measured or "bfloat16" in self.on
        return (rung,) if alone else ("bfloat16", rung)

    def decide(self, rung: str, branch: Branch) -> None:
        """Put a rung on or leave it off, and say why."""
        reason = next(self._against(rung), "")
        if reason:
            self.steps[rung] = Advised(rung, False, reason)
            return
        now, then = self.expected(), self.expected(*self.with_it(rung))
        if getattr(now, branch.field) / getattr(then, branch.field) < _LEAST_GAIN:
            reason = f"does not pay: {_said(branch.field, now, then)}"
        else:
            reason = self._worse(branch, now, then)
        if reason:
            self.steps[rung] = Advised(rung, False, reason)
            return
        loss = f", loss {now.loss:+.1%} to {then.loss:+.1%}" if then.loss - now.loss > _LEAST_LOSS else ""
        if rung == "int4" and "int8" in self.on:
            self.on.remove("int8")
            self.steps["int8"] = Advised("int8", False, "INT4 takes its place")
        if "bfloat16" in (more := self.with_it(rung)) and rung != "bfloat16":
            self.steps["bfloat16"] = Advised("bfloat16", True, f"{RUNGS[rung].title} compute in it")
        self.on += more
        self.steps[rung] = Advised(rung, True, f"{branch.complaint}: {_said(branch.field, now, then)}{loss}")

    def _worse(self, branch: Branch, now: Estimate, then: Estimate) -> str:
        """What another branch would lose by it: a limit that is met and would not be; of one that is not met, or of
        speed where nothing is asked for, more than this branch gains."""
        limits = self.constraint.limits
        gain = getattr(now, branch.field) / getattr(then, branch.field) if limits else 1.0
        for name in limits or ("tpot_s",):
            before, after = getattr(now, name), getattr(then, name)
            met = before <= limits.get(name, 0.0)
            breaks = after > limits.get(name, 0.0) if met else after > before * max(gain, _LEAST_GAIN)
            if name != branch.field and breaks:
                return f"costs more than it brings: {_said(name, now, then)}"
        return ""

    def _against(self, rung: str) -> Iterator[str]:
        """What forbids a rung, whatever it brings."""
        if rung in self.refused:
            yield self.refused[rung]
        if rung not in self.measured:
            yield "not measured on this machine"
        if rung == "speculation" and not self.constraint.has_draft:
            yield "no draft at hand"
        if rung == "speculation" and "step" not in self.on:
            yield "it needs the own step, which is off"
        now, then = self.expected().loss, self.expected(*self.with_it(rung)).loss
        factor = self.constraint.loss_factor
        if then > now + _LEAST_LOSS and then * factor > self.constraint.max_loss:
            more = f", counted {factor:g} times" if factor != 1 else ""
            yield f"loss {then:+.1%}{more}; at most {self.constraint.max_loss:.0%} is allowed"
