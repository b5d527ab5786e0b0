"""What a set of rungs would do that was not measured as a whole, and at another length: MODELLED from a ladder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from labkit import _check
from labkit.engine.ladder.result import Ladder, LadderStep
from labkit.engine.ladder.rungs import check_rungs
from labkit.measure import Label


@dataclass(frozen=True)
class Estimate:
    """Seconds to the first token and a token after it, bytes at the peak, perplexity over the baseline's less 1 (0
    where it was not measured), bytes that a step reads and that a token's keys and values take. label: the ladder's own
    where the very set was measured at this length."""

    ttft_s: float
    tpot_s: float
    peak_bytes: float
    loss: float
    step_bytes: float
    kv_bytes: float
    label: Label


_RATIOS = ("ttft_s", "tpot_s", "peak_bytes", "step_bytes", "kv_bytes")


def estimate(ladder: Ladder, rungs: Iterable[str], *, prompt_tokens: int | None = None) -> Estimate:
    """Of `rungs`, each of which the ladder measured, after a prompt of `prompt_tokens` (None: the ladder's).

    Where the set itself was not measured, each rung's ratio to the step below it is taken to hold on any other: that
    rungs multiply is an assumption, and the measured ladder shows how far it holds. Another length changes the first
    token's time in proportion, and adds its keys and values to the bytes held and read.
    Errors: ValueError for a rung that the ladder did not measure.
    """
    on = check_rungs("rungs", rungs)
    steps = {step.rungs[-1]: step for step in ladder.measured() if step.rungs}
    for rung in on:
        _check.choice("rungs", rung, list(steps))
    wanted = _effective(on)
    same = next((step for step in ladder.measured() if _effective(step.rungs) == wanted), None)
    found = _of(ladder, same, ladder.label) if same else _product(ladder, steps, on)
    more = 0 if prompt_tokens is None else _check.integer("prompt_tokens", prompt_tokens, 1) - ladder.prompt_tokens
    return _longer(found, ladder.prompt_tokens, more) if more else found


def _effective(rungs: Iterable[str]) -> frozenset[str]:
    """INT4 takes INT8's place."""
    on = frozenset(rungs)
    return on - {"int8"} if "int4" in on else on


def _of(ladder: Ladder, step: LadderStep, label: Label) -> Estimate:
    times, loss = (step.ttft.median, step.tpot.median), ladder.loss(step) or 0.0
    return Estimate(*times, step.peak_bytes, loss, step.step_bytes, step.kv_bytes, label)


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


def _longer(found: Estimate, measured: int, more: int) -> Estimate:
    return replace(
        found,
        ttft_s=found.ttft_s * (measured + more) / measured,
        tpot_s=found.tpot_s * (1 + more * found.kv_bytes / found.step_bytes),
        peak_bytes=found.peak_bytes + more * found.kv_bytes,
        label=Label.MODELLED,
    )
