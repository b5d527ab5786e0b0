"""What a set of rungs would do that was not measured as a whole: MODELLED from a ladder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from labkit import _check
from labkit.engine.ladder.result import Ladder, LadderStep
from labkit.engine.ladder.rungs import check_rungs, effective
from labkit.measure import Label


@dataclass(frozen=True)
class Estimate:
    """Seconds to the first token and a token after it, bytes at the peak, perplexity over the baseline's less 1 (0
    where it was not measured). label: the ladder's own where the very set was measured."""

    ttft_s: float
    tpot_s: float
    peak_bytes: float
    loss: float
    label: Label


_RATIOS = ("ttft_s", "tpot_s", "peak_bytes")


def estimate(ladder: Ladder, rungs: Iterable[str]) -> Estimate:
    """Of `rungs`, each of which the ladder measured, at the ladder's length.

    Where the set itself was not measured, each rung's ratio to the step below it is taken to hold on any other: that
    rungs multiply is an assumption, and the measured ladder shows how far it holds. Nothing is said of another length:
    what a prompt of another length costs must be measured.
    Errors: ValueError for a rung that the ladder did not measure.
    """
    on = check_rungs("rungs", rungs)
    steps = {step.rungs[-1]: step for step in ladder.measured() if step.rungs}
    for rung in on:
        _check.choice("rungs", rung, list(steps))
    wanted = set(effective(on))
    measured = (*ladder.measured(), *ladder.also)
    same = next((step for step in measured if set(effective(step.rungs)) == wanted), None)
    return _of(ladder, same, ladder.label) if same else _product(ladder, steps, on)


def _of(ladder: Ladder, step: LadderStep, label: Label) -> Estimate:
    return Estimate(step.ttft.median, step.tpot.median, step.peak_bytes, ladder.loss(step) or 0.0, label)


def _product(ladder: Ladder, steps: dict[str, LadderStep], on: tuple[str, ...]) -> Estimate:
    """The baseline, times each rung's ratio to the step that it was put on."""
    found = _of(ladder, ladder.baseline, Label.MODELLED)
    # What INT4 was put on had INT8: both ratios together are its own.
    through = [*on, "int8"] if "int4" in on and "int8" in steps and "int8" not in on else list(on)
    before = dict(zip(list(steps.values()), list(ladder.measured()), strict=False))
    for rung in sorted(through, key=list(steps).index):
        after, base = _of(ladder, steps[rung], ladder.label), _of(ladder, before[steps[rung]], ladder.label)
        grown = {name: getattr(found, name) * getattr(after, name) / getattr(base, name) for name in _RATIOS}
        found = replace(found, **grown, loss=(1 + found.loss) * (1 + after.loss) / (1 + base.loss) - 1)
    return found
