"""The forms in which a KV cache's result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._quantization_forms import plain, share
from labkit.labs._result import Number, duration, si
from labkit.measure import Label, Measurement, Timing

if TYPE_CHECKING:
    from labkit.labs._kv_cache_result import KVCacheParams, KVCacheResult, Speed

_SPEED = "One layer's decode attention, MEASURED"


def heads(count: int) -> str:
    """As a learner says it: "3 KV heads"."""
    return f"{count} KV head{'' if count == 1 else 's'}"


def setting(params: KVCacheParams) -> str:
    """As a learner says it."""
    groups = f" in groups of {params.q_group_size}" if params.quantized else ""
    return f"{params.seq_len:,} tokens, {heads(params.num_key_value_heads)}, {params.bits} bits{groups}"


def times(value: float) -> str:
    """A factor: "9.48x", "3x"."""
    return f"{value:.3g}x"


def numbers(result: KVCacheResult) -> list[Number]:
    """The figures above the figure, what is not there yet left out."""
    return [*_size_numbers(result), *_speed_numbers(result), *_quality_numbers(result)]


def _size_numbers(result: KVCacheResult) -> list[Number]:
    s, p, group = result.sizes, result.params, "Bytes of the cache"
    every = s.layers_allocated == s.num_layers
    counted = "in its tensors; MEASURED" if every else f"{s.num_layers} x the one layer MEASURED"
    agrees = "the same to the byte" if s.predicted == s.total else f"off by {s.predicted - s.total:,} B"
    per_token = s.total / p.seq_len
    recent = f"{s.recent_tokens} recent tokens in 16 bits" if p.quantized else f"in {result.dtype}"
    if p.seq_len > result.positions:
        recent += f"; the model knows {result.positions:,} positions"
    own = f"than {heads(result.own_heads)} in 16 bits: {si(s.own, 'B')}"
    free = f"of {si(s.weights, 'B')}; {si(s.free, 'B')} are free"
    return [
        Number("cache_bytes", "allocated", si(s.total, "B"), s.total, group, counted),
        Number("predicted_bytes", "predicted", si(s.predicted, "B"), s.predicted, group, f"{agrees}; MODELLED"),
        Number("token_bytes", "a token", si(per_token, "B"), per_token, group, recent),
        Number("smaller", *_factor(s.smaller), s.smaller, group, own),
        Number("weights_share", "of the weights", share(s.total / s.weights), s.total / s.weights, group, free),
    ]


def _factor(smaller: float) -> tuple[str, str]:
    """Label and text."""
    return ("smaller", times(smaller)) if smaller >= 1 else ("larger", times(1 / smaller))


def _spread(timing: Timing) -> str:
    return f"{duration(timing.p10)} to {duration(timing.p90)} (n={timing.n})"


def _speed_numbers(result: KVCacheResult) -> list[Number]:
    speed, group = result.speed, _SPEED
    if speed is None:
        return []
    now, full = speed.timing.median, speed.full.median
    floor = f"{si(speed.read_bytes, 'B')} at {si(speed.bandwidth, 'B/s')}; MODELLED"
    shown = [
        Number("attention_s", "time", duration(now), now, group, _spread(speed.timing)),
        Number("floor_s", "least", duration(speed.floor_s), speed.floor_s, group, floor),
        Number("floor_share", "of the ceiling", share(speed.fraction), speed.fraction, group, "bytes / time"),
    ]
    if result.params.quantized:
        faster = f"{si(speed.full_bytes, 'B')}; in turn with it"
        shown += [Number("full_s", "16 bits", duration(full), full, group, faster), _compared(speed)]
    why = _why(speed.backend, result.params.quantized)
    return [*shown, Number("backend", "backend", speed.backend, float(speed.backend == "triton"), group, why)]


def _why(backend: str, quantized: bool) -> str:
    """What the backend does, in a few words."""
    if backend == "triton":
        return "reads codes where they lie" if quantized else "split-KV flash decoding"
    return "PyTorch unpacks codes first" if quantized else "PyTorch's own attention"


def _compared(speed: Speed) -> Number:
    """What fewer bytes did to the time."""
    gain = speed.speedup
    words = f"{times(gain)} faster" if gain >= 1 else f"{times(1 / gain)} slower"
    note = f"for {times(speed.full_bytes / speed.read_bytes)} fewer bytes"
    return Number("speedup", "than 16 bits", words, gain, _SPEED, note)


def _quality_numbers(result: KVCacheResult) -> list[Number]:
    quality, group = result.quality, "Quality on pydoc"
    if quality:
        over = f"{quality.scored} of {quality.of} tokens; MEASURED"
        found = Number("perplexity", "perplexity", plain(quality.perplexity), quality.perplexity, group, over)
        if not result.params.quantized:
            return [found]
        lost = quality.ratio - 1
        return [
            found,
            Number("full_perplexity", "16 bits", plain(quality.baseline), quality.baseline, group, "the same tokens"),
            Number("lost", "lost", f"{lost:+.2%}", lost, group, "by rounding keys and values"),
        ]
    if result.merged:
        return _merged_numbers(result, group)
    if result.not_recorded:
        note = f"merging {result.own_heads} heads to {result.params.num_key_value_heads}: {result.not_recorded}"
        if result.params.num_key_value_heads > result.own_heads:
            note = f"no model has {heads(result.params.num_key_value_heads)} here: this one was trained with fewer"
        return [Number("perplexity", "perplexity", "not recorded", math.nan, group, note)]
    return []


def _merged_numbers(result: KVCacheResult, group: str) -> list[Number]:
    """A row a way of merging both keys and values, at 16 bits."""
    study, shown = result.merged, []
    when = study.provenance.get("date", "")
    for found in (r for r in study.results if r.merge == "both"):
        note = f"from {plain(study.baseline)}; RECORDED {when}".rstrip()
        key = f"merged_{found.method.replace(', ', '_')}"
        shown.append(Number(key, f"merged, {found.method}", plain(found.perplexity), found.perplexity, group, note))
    return shown


def text(result: KVCacheResult) -> str:
    """The whole result for a reader without widgets: numbers, then the bytes of every length at these heads."""
    lines = [f"kv_cache_lab: {result.params.model}, {setting(result.params)} (16 bits: {result.dtype})"]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<20} {number.text:>16}  {number.note}".rstrip())
    lines += ["", f"Bytes of the cache with {heads(result.params.num_key_value_heads)} (MODELLED)"]
    curves = result.sizes.curves
    lines.append(f"  {'tokens':>8} " + " ".join(f"{f'{bits} bits':>10}" for bits in curves))
    for length in next(iter(curves.values())):
        lines.append(f"  {length:>8,} " + " ".join(f"{si(curve[length], 'B'):>10}" for curve in curves.values()))
    return "\n".join(lines)


def rows(result: KVCacheResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, the method of a merge, value, unit, label."""
    common, table = asdict(result.params), []
    for m in measurements(result):
        what = {"quantity": m.name.removeprefix("kv_cache_lab."), "method": m.params.get("method", "")}
        table.append(common | what | {"value": m.value, "unit": m.unit, "label": str(m.label)})
    return table


def measurements(result: KVCacheResult) -> list[Measurement]:
    """The ledger's lines, each with the lab's parameters."""
    params, s = asdict(result.params), result.sizes
    lines = []

    def add(name: str, value: float, unit: str, **details: object) -> None:
        if math.isfinite(value):
            common = {"device": result.device, "params": params, "dtype": result.dtype}
            lines.append(Measurement.of(f"kv_cache_lab.{name}", value, unit, **(common | details)))

    whole = Label.MEASURED if s.layers_allocated == s.num_layers else Label.MODELLED
    add("cache_bytes", s.total, "bytes", label=whole)
    add("layer_bytes", s.layer, "bytes")
    add("predicted_bytes", s.predicted, "bytes", label=Label.MODELLED)
    add("smaller", s.smaller, "ratio", label=whole)
    if speed := result.speed:
        add("attention_s", speed.timing.median, "s", spread=speed.timing, backend=speed.backend)
        add("floor_s", speed.floor_s, "s", label=Label.MODELLED)
        add("floor_share", speed.fraction, "fraction", backend=speed.backend)
        if result.params.quantized:
            add("full_s", speed.full.median, "s", spread=speed.full)
            add("speedup", speed.speedup, "ratio", backend=speed.backend)
    if quality := result.quality:
        scored = {"shapes": {"tokens": [quality.scored, quality.of]}, "dtype": result.model_dtype}
        add("perplexity", quality.perplexity, "", **scored)
        add("full_perplexity", quality.baseline, "", **scored)
    if study := result.merged:
        kept = {key: value for key, value in study.provenance.items() if key != "machine"}
        recorded = {"label": Label.RECORDED, "device": study.provenance.get("machine", "")}
        for found in (r for r in study.results if r.merge == "both"):
            recorded["params"] = params | kept | {"method": found.method}
            lines.append(Measurement("kv_cache_lab.merged_perplexity", found.perplexity, "", **recorded))
    return lines
