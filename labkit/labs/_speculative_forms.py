"""The forms in which a speculative result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

from labkit.labs._flash_attention_forms import faster, times
from labkit.labs._result import Number, duration, threads_text
from labkit.labs._speculative_tokens import visible
from labkit.measure import Label, Measurement, Timing

if TYPE_CHECKING:
    from labkit.labs._speculative_result import SpeculativeParams, SpeculativeResult

_DRAFTS = "The draft; MEASURED"
_SPEED = "Speed, in turn with plain decoding; MEASURED"
_COSTS = "What a call costs; MEASURED"
_PROMPTS = {"chat": "a chat prompt", "copy_heavy": "a prompt to copy from", "no_repeats": "a prompt without repeats"}


def setting(params: SpeculativeParams) -> str:
    """As a learner says it."""
    how = "greedy" if params.temperature == 0 else f"temperature {params.temperature:g}"
    shape = "" if params.shape == "chain" else ", a tree"
    drafted = f"{params.num_assistant_tokens} drafted by {params.proposer}{shape}"
    return f"{drafted}, {how}, {params.weights} weights, {_PROMPTS[params.prompt]}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def folk_text(value: float) -> str:
    """What the folk claim comes to."""
    return "endless" if math.isinf(value) else times(value)


def numbers(result: SpeculativeResult) -> list[Number]:
    """The figures above the text, what is not there yet left out."""
    return [*_draft_numbers(result), *_speed_numbers(result), *_cost_numbers(result)]


def _draft_numbers(result: SpeculativeResult) -> list[Number]:
    shown, p = [], result.params
    if result.drafted is not None:
        note = f"{percent(result.share)} of the calls had a draft" if 0 < result.share < 1 else ""
        shown.append(
            Number("drafted_per_call", "drafted a call", f"{result.drafted:.3g}", result.drafted, _DRAFTS, note)
        )
    if result.alpha is not None:
        note = f"kept {result.stats.n_matches} of {result.stats.n_tested} that were tested"
        shown.append(Number("acceptance_rate", "acceptance α", percent(result.alpha), result.alpha, _DRAFTS, note))
    made = result.tokens_a_call
    if made is not None:
        expected = result.formula()
        note = "the target's own included"
        if expected is not None and p.num_assistant_tokens:
            note = f"formula with this α: {expected:.2f}; MODELLED"
        shown.append(Number("tokens_per_target_call", "tokens a call", f"{made:.2f}", made, _DRAFTS, note))
    return shown


def _speed_numbers(result: SpeculativeResult) -> list[Number]:
    if not result.rounds:
        return []
    shown = []
    for key, label, timing in (("plain", "plain", result.plain), ("speculative", "with the draft", result.speculative)):
        rate = 1 / timing.median
        text = f"{rate:.3g} tokens/s"
        shown.append(Number(f"{key}_tokens_per_second", label, text, rate, _SPEED, _spread(timing)))
    low, high = result.speedups[0], result.speedups[-1]
    note = f"{times(low)} to {times(high)} over {len(result.rounds)} rounds"
    shown.append(Number("speedup", "speed-up", faster(result.speedup), result.speedup, _SPEED, note))
    modelled = result.model()
    if modelled is not None and result.params.num_assistant_tokens:
        off = result.speedup / modelled - 1
        note = f"E/(γc + v), MODELLED; measured is {abs(off):.0%} {'above' if off >= 0 else 'below'}"
        shown.append(Number("modelled_speedup", "time model", times(modelled), modelled, _SPEED, note))
    if result.folk is not None:
        note = "1/(1 − α): an endless draft that costs nothing"
        shown.append(Number("folk_speedup", "folk claim", folk_text(result.folk), result.folk, _SPEED, note))
    return shown


def _spread(timing: Timing) -> str:
    return f"{duration(timing.median)} a token"


def _cost_numbers(result: SpeculativeResult) -> list[Number]:
    gamma = result.params.num_assistant_tokens
    costs = result.costs.get(gamma)
    if costs is None:
        return []
    fed = "the whole tree" if result.params.tree else f"{gamma + 1} tokens"
    both = f"{fed} at once: {duration(costs.verify_s)}, and the loop {duration(costs.rest_s)}"
    drafting = f"of a step, for each drafted token; {duration(costs.draft_s)} for {gamma}"
    pairs = [
        ("step", "a plain step", duration(costs.step_s), costs.step_s, "one token"),
        ("draft_cost", "drafting, c", f"{costs.draft_cost:.3g}", costs.draft_cost, drafting),
        ("verify_cost", "verifying, v", f"{costs.verify_cost:.3g}", costs.verify_cost, both),
    ]
    return [Number(key, label, text, exact, _COSTS, note) for key, label, text, exact, note in pairs]


def text(result: SpeculativeResult) -> str:
    """The whole result for a reader without widgets: numbers, the curve, every call with its tokens."""
    where = f"{result.device}, {result.dtype}" + threads_text(result.threads)
    lines = [f"speculative_lab: {setting(result.params)}", where]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<18} {number.text:>16}  {number.note}".rstrip())
    if len(result.costs) > 1:
        lines += ["", "Speed-up by the time model, with this α; MODELLED", _by_length(result)]
    if result.calls:
        lines += ["", f"Call by call (-refused-, +the target's own+), after {result.prompt_tokens} prompt tokens"]
        lines += _call_lines(result)
    return "\n".join(lines)


def _by_length(result: SpeculativeResult) -> str:
    shown = [(gamma, result.model(gamma)) for gamma in result.costs]
    return "  " + "   ".join(f"γ {gamma}: {times(value)}" for gamma, value in shown if value is not None)


def _call_lines(result: SpeculativeResult) -> list[str]:
    marks = {"accepted": "{}", "rejected": "-{}-", "untested": "-{}-"}
    lines = []
    for index, tokens in groupby(result.tokens, lambda token: token.call):
        call = result.calls[index]
        said = " ".join(marks.get(token.kind, "+{}+").format(visible(token.text)) for token in tokens)
        kept = "the prompt" if call.kind == "prompt" else f"{call.n_accepted} of {len(call.drafted)} kept"
        lines.append(f"  {index:>3}  {kept}  {said}")
    return lines


def rows(result: SpeculativeResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label; then what a call costs at each draft length."""
    table = [_row(result, m) for m in measurements(result)]
    for gamma, costs in result.costs.items():
        if gamma != result.params.num_assistant_tokens:
            table += [_row(result, m) for m in _cost_lines(result, gamma, costs)]
    return table


def _row(result: SpeculativeResult, m: Measurement) -> dict[str, object]:
    what = {"quantity": m.name.removeprefix("speculative_lab."), "value": m.value, "unit": m.unit}
    return m.params | what | {"label": str(m.label)}


def _line(result: SpeculativeResult, name: str, value: float, unit: str, **details: object) -> Measurement:
    params = asdict(result.params) | details.pop("at", {})
    shapes = {"input_ids": [1, result.prompt_tokens]}
    common = {"device": result.device, "params": params, "shapes": shapes, "dtype": result.dtype}
    return Measurement.of(f"speculative_lab.{name}", value, unit, **common, **details)


def measurements(result: SpeculativeResult) -> list[Measurement]:
    """The ledger's lines: counts and speeds MEASURED, formulas MODELLED; with parameters."""
    lines, modelled = [], {"label": Label.MODELLED}
    pairs = [
        ("drafted_per_call", result.drafted, "tokens", {}),
        ("acceptance_rate", result.alpha, "fraction", {}),
        ("tokens_per_target_call", result.tokens_a_call, "tokens", {}),
        ("speedup", result.speedup, "ratio", {}),
        ("expected_tokens", result.formula(), "tokens", modelled),
        ("modelled_speedup", result.model(), "ratio", modelled),
        ("folk_speedup", result.folk, "ratio", modelled),
    ]
    for name, value, unit, details in pairs:
        if value is not None and math.isfinite(value):
            lines.append(_line(result, name, value, unit, **details))
    for name, timing in (("plain_s", result.plain), ("speculative_s", result.speculative)):
        if timing:
            lines.append(_line(result, name, timing.median, "s", spread=timing))
    gamma = result.params.num_assistant_tokens
    if gamma in result.costs:
        lines += _cost_lines(result, gamma, result.costs[gamma])
    return lines


def _cost_lines(result: SpeculativeResult, gamma: int, costs: object) -> list[Measurement]:
    at = {"at": {"num_assistant_tokens": gamma}}
    named = [("step_s", "s"), ("verify_s", "s"), ("draft_s", "s"), ("rest_s", "s")]
    lines = [_line(result, name, getattr(costs, name), unit, **at) for name, unit in named]
    ratios = ("draft_cost", "verify_cost")
    return lines + [_line(result, name, getattr(costs, name), "ratio", **at) for name in ratios]
