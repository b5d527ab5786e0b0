"""The forms in which a stack's result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from labkit.engine.ladder import RUNGS
from labkit.labs._flash_attention_forms import faster, times
from labkit.labs._quantization_forms import plain, share
from labkit.labs._result import Number, duration, si, threads_text
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._stack_result import StackResult

_SPEED = "Speed, in turn with the baseline; MEASURED"
_BESIDE = "Beside it"
_BYTES = "Bytes: peak and weights MEASURED, the others MODELLED"
_QUALITY = "Quality and drafts; MEASURED"
_LEFT_OUT = "Asked for, and left out"
_PROMPTS = {"chat": "a short chat prompt", "long": "a long prompt"}


def names(rungs: Iterable[str], gamma: int = 0) -> str:
    """The set as a learner says it: "own step + INT4 weights + speculation (γ 2)"."""
    said = [RUNGS[rung].title + (f" (γ {gamma})" if rung == "speculation" and gamma else "") for rung in rungs]
    return " + ".join(said) or "the baseline alone"


def setting(result: StackResult) -> str:
    """The whole of it."""
    return f"{names(result.effective, result.gamma)}; {_PROMPTS[result.params.prompt]}, {result.prompt_tokens} tokens"


def numbers(result: StackResult) -> list[Number]:
    """The figures above the figure, what is not there yet left out."""
    parts = (_speed_numbers, _beside_numbers, _byte_numbers, _quality_numbers, _left_out_numbers)
    return [number for part in parts for number in part(result)]


def _speed_numbers(result: StackResult) -> list[Number]:
    shown, stack, base = [], result.stack, result.baseline
    for key, label, timing in (("tokens_per_second", "this set", stack), ("baseline", "baseline", base)):
        if timing:
            rate, note = 1 / timing.median, f"{duration(timing.median)} a token"
            note += f"; {result.baseline_name}" if key == "baseline" else ""
            shown.append(Number(key, label, f"{rate:.3g} tokens/s", rate, _SPEED, note))
    if result.speedup:
        low, high = result.speedups[0], result.speedups[-1]
        note = f"{times(low)} to {times(high)} over {len(result.turns)} turns"
        note = note if result.turns else "a first look, the turns come"
        shown.append(Number("speedup", "speed-up", faster(result.speedup), result.speedup, _SPEED, note))
    if result.ttft:
        mine, theirs = result.ttft
        note = f"baseline {duration(theirs)}, {result.prompt_tokens} prompt tokens"
        shown.append(Number("ttft", "first token", duration(mine), mine, _SPEED, note))
    return shown


def _beside_numbers(result: StackResult) -> list[Number]:
    """The ceiling, what the popular ladder says, and what was recorded."""
    shown, ceiling = [], result.ceiling
    if ceiling:
        note = f"MODELLED: {si(result.bandwidth, 'B/s')} measured, over {si(result.sizes.step_bytes, 'B')} a step"
        note += f"; reached {share(1 / result.stack.median / ceiling)}" if result.stack else ""
        shown.append(Number("ceiling", "ceiling", f"{ceiling:.3g} tokens/s", ceiling, _BESIDE, note))
    told = result.popular
    if told:
        note = f"a folk claim of {told.title}; its baseline is named nowhere"
        shown.append(Number("popular", "popular ladder", times(told.speed), told.speed, _BESIDE, note))
    kept = result.recorded
    if kept:
        note = f"RECORDED {kept.where}"
        shown.append(Number("recorded", "an earlier run", times(kept.speedup), kept.speedup, _BESIDE, note))
    return shown


def _byte_numbers(result: StackResult) -> list[Number]:
    mine, base = result.sizes, result.base_sizes
    pairs = [("weight_bytes", "weights"), ("step_bytes", "read a step"), ("kv_bytes", "K and V a token")]
    if mine.peak_bytes and base.peak_bytes:
        pairs.insert(0, ("peak_bytes", "at the peak"))
    shown = []
    for key, label in pairs:
        own, theirs = getattr(mine, key), getattr(base, key)
        note = f"{own / theirs:.1%} of the baseline's {si(theirs, 'B')}"
        shown.append(Number(key, label, si(own, "B"), float(own), _BYTES, note))
    return shown


def _quality_numbers(result: StackResult) -> list[Number]:
    shown, quality = [], result.quality
    if quality:
        done = f"{len(quality.stack)} of {quality.of_windows} windows of {quality.context_length} tokens"
        note = f"perplexity {plain(quality.perplexity)}, baseline {plain(quality.base)}; {done}"
        note += "; matrices rounded to nearest" if {"int8", "int4"} & set(result.on) else ""
        shown.append(Number("loss", "loss", f"{quality.loss:+.1%}", quality.loss, _QUALITY, note))
    if result.gamma:
        if result.acceptance is not None:
            note = f"kept {result.stats.n_matches} of {result.stats.n_tested} that were tested; {result.proposer}"
            value = result.acceptance
            shown.append(Number("acceptance_rate", "acceptance α", f"{value:.1%}", value, _QUALITY, note))
        value, note = result.tokens_per_call, "one of them the target's own"
        shown.append(Number("tokens_per_call", "tokens a call", f"{value:.2f}", value, _QUALITY, note))
    return shown


def _left_out_numbers(result: StackResult) -> list[Number]:
    idle = result.idle.items()
    return [Number(f"out_{rung}", RUNGS[rung].title, "–", 0.0, _LEFT_OUT, why) for rung, why in idle]


def text(result: StackResult) -> str:
    """The whole result for a reader without widgets."""
    where = f"{result.device}, {result.dtype}" + threads_text(result.threads)
    lines = [f"stack_lab: {setting(result)}", where]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<17} {number.text:>15}  {number.note}".rstrip())
    return "\n".join(lines)


def rows(result: StackResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label."""
    return [_row(m) for m in measurements(result)]


def _row(m: Measurement) -> dict[str, object]:
    params = {key: " ".join(value) if isinstance(value, list) else value for key, value in m.params.items()}
    return params | {
        "quantity": m.name.removeprefix("stack_lab."),
        "value": m.value,
        "unit": m.unit,
        "label": str(m.label),
    }


def measurements(result: StackResult) -> list[Measurement]:
    """The ledger's lines, with the rungs that were on and those left out."""
    quality, ttft = result.quality, result.ttft
    modelled = {"label": Label.MODELLED}
    found = [
        ("speedup", result.speedup, "ratio", {}),
        ("ttft_s", ttft and ttft[0], "s", {}),
        ("baseline_ttft_s", ttft and ttft[1], "s", {}),
        ("weight_bytes", result.sizes.weight_bytes, "bytes", {}),
        ("kv_bytes", result.sizes.kv_bytes, "bytes", modelled),
        ("step_bytes", result.sizes.step_bytes, "bytes", modelled),
        ("peak_bytes", result.sizes.peak_bytes or None, "bytes", {}),
        ("baseline_peak_bytes", result.base_sizes.peak_bytes or None, "bytes", {}),
        ("ceiling", result.ceiling, "tokens/s", modelled),
        ("perplexity", quality and quality.perplexity, "", {}),
        ("baseline_perplexity", quality and quality.base, "", {}),
        ("acceptance_rate", result.acceptance, "fraction", {}),
        ("tokens_per_call", result.tokens_per_call if result.gamma else None, "tokens", {}),
    ]
    lines = [_line(result, name, value, unit, **more) for name, value, unit, more in found if value is not None]
    for name, timing in (("baseline_s", result.baseline), ("stack_s", result.stack)):
        if timing:
            lines.append(_line(result, name, timing.median, "s", spread=timing))
    return lines


def parameters(result: StackResult) -> dict[str, object]:
    """As the ledger keeps them: γ is 0 where nothing is drafted."""
    p = result.params
    asked = {"rungs": list(result.on), "left_out": list(result.left_out)}
    return asked | {"prompt": p.prompt, "num_assistant_tokens": result.gamma, "model": p.model}


def _line(result: StackResult, name: str, value: float, unit: str, **details: object) -> Measurement:
    shapes = {"input_ids": [1, result.prompt_tokens]}
    common = {"device": result.device, "params": parameters(result), "shapes": shapes, "dtype": result.dtype}
    return Measurement.of(f"stack_lab.{name}", value, unit, **common, **details)
