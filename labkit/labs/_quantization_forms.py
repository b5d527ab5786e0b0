"""The forms in which a quantization result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._result import Number, duration, si
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._quantization_result import QuantizationParams, QuantizationResult, Speed


def setting(params: QuantizationParams) -> str:
    """As a learner says it."""
    group = "one group a row" if params.group_size == -1 else f"groups of {params.group_size}"
    return f"{params.method}, {params.bits} bits, {group}"


def percent(value: float) -> str:
    """A share with three digits: "0.00312%", "1.20%", "48.1%"."""
    return f"{100 * value:#.3g}".rstrip(".") + "%"


def share(value: float) -> str:
    """A share of a ceiling: "105%", "22%", "0.33%"."""
    return f"{value:.0%}" if value >= 0.0995 else f"{100 * value:.2g}%"


def plain(value: float) -> str:
    """A perplexity: "14.6", "2,130", and past a million "3.1e+07"."""
    if not math.isfinite(value) or value >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def numbers(result: QuantizationResult) -> list[Number]:
    """The figures above the figure, what is not there yet left out."""
    return [*_size_numbers(result), *_quality_numbers(result), *_speed_numbers(result)]


def _size_numbers(result: QuantizationResult) -> list[Number]:
    s, group = result.sizes, "Bytes, MEASURED after packing"
    beside = "scales, zeros, order" if result.params.method == "GPTQ" else "scales, zeros"
    rest = f"codes {s.code_bits:.3g} + {beside} {s.bits_per_weight - s.code_bits:.3g}"
    codes, stays = f"of {s.weights / 1e6:.4g} M weights", f"{si(s.other_bytes, 'B')} of it in bfloat16"
    return [
        Number("bits_per_weight", "bits a weight", f"{s.bits_per_weight:.4g}", s.bits_per_weight, group, rest),
        Number("code_bytes", "codes", si(s.code_bytes, "B"), s.code_bytes, group, codes),
        Number("model_bytes", "whole model", si(s.model_bytes, "B"), s.model_bytes, group, stays),
        Number("size_ratio", "of bfloat16", f"{s.ratio:.1%}", s.ratio, group, f"which takes {si(s.float_bytes, 'B')}"),
    ]


def _quality_numbers(result: QuantizationResult) -> list[Number]:
    group = f"Quality on {result.corpus}"
    return [*_perplexity(result, group), *_errors(result, group)]


def _perplexity(result: QuantizationResult, group: str) -> list[Number]:
    """Measured, recorded, or why it is neither."""
    quality, run = result.quality, result.recorded
    if quality:
        note = f"float {plain(quality.baseline)}; {quality.windows} of {quality.of_windows} windows; MEASURED"
        return [Number("perplexity", "perplexity", plain(quality.perplexity), quality.perplexity, group, note)]
    if run:
        note = f"float {plain(run.baseline)}; RECORDED {run.date}"
        return [Number("perplexity", "perplexity", plain(run.perplexity), run.perplexity, group, note)]
    if result.not_recorded:
        return [Number("perplexity", "perplexity", "not recorded", math.nan, group, result.not_recorded)]
    return []


def _errors(result: QuantizationResult, group: str) -> list[Number]:
    """One layer by the method, then all of them by round-to-nearest."""
    shown, errors, block = [], result.layers, result.block
    if block:
        name, took = f"{block.method}'s error", f"on {block.calibration_tokens:,} tokens; MEASURED"
        note = f"of RTN's in layer {block.layer}; MEASURED"
        shown.append(Number("block_ratio", name, f"{block.ratio:.2f}x", block.ratio, group, note))
        shown.append(Number("block_seconds", "one layer", duration(block.seconds), block.seconds, group, took))
    if errors:
        note = f"of {len(errors.all)} matrices under RTN; MEASURED"
        kind, layer, worst = errors.worst
        shown.append(Number("error_median", "median error", percent(errors.median), errors.median, group, note))
        shown.append(
            Number("error_worst", "worst error", percent(worst), worst, group, f"{kind}, layer {layer}; MEASURED")
        )
    return shown


def _spread(speed: Speed) -> str:
    return f"{duration(speed.step.p10)} to {duration(speed.step.p90)} (n={speed.step.n})"


def _speed_numbers(result: QuantizationResult) -> list[Number]:
    speed, whole, group = result.speed, result.float_speed, "Decode, batch 1, bfloat16"
    if speed is None or whole is None:
        return []
    fast, slow = speed.tokens_per_second, whole.tokens_per_second
    ceiling = f"{si(speed.bandwidth, 'B/s')} allow {speed.ceiling:.3g} tokens/s (MODELLED)"
    backend = "packed matmul" if speed.packed_matmul else "dequantize, then matmul"
    own = f"{share(whole.fraction)} of its ceiling; MEASURED once"
    return [
        Number("tokens_per_second", "speed", f"{fast:.3g} tokens/s", fast, group, f"{_spread(speed)}; MEASURED"),
        Number("float_tokens_per_second", "bfloat16 model", f"{slow:.3g} tokens/s", slow, group, own),
        Number(
            "read_bytes", "read a token", si(speed.read_bytes, "B"), speed.read_bytes, group, "as laid out to decode"
        ),
        Number("ceiling_share", "of the ceiling", share(speed.fraction), speed.fraction, group, ceiling),
        Number("backend", "backend", backend, float(speed.packed_matmul), group, _why(speed.reason)),
    ]


def _why(reason: str) -> str:
    """The backend's reason without what the value says already."""
    return reason.removeprefix("dequantize, then the library's matmul; ")


def text(result: QuantizationResult) -> str:
    """The whole result for a reader without widgets: numbers, then the error of each kind of matrix over the layers."""
    lines = [f"quantization_lab: {result.params.model} ({result.dtype}), {setting(result.params)}"]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<20} {number.text:>16}  {number.note}".rstrip())
    if result.layers:
        lines += ["", f"Output error under round-to-nearest over {result.num_layers} layers (MEASURED)"]
        lines.append(f"  {'matrix':<12} {'least':>10} {'median':>10} {'most':>10} {'by ' + _method_of(result):>10}")
        lines += [_error_line(result, kind, sorted(errors)) for kind, errors in result.layers.by_kind.items()]
    return "\n".join(lines)


def _method_of(result: QuantizationResult) -> str:
    return f"{result.block.method}*" if result.block else "-"


def _error_line(result: QuantizationResult, kind: str, errors: list[float]) -> str:
    columns = [percent(value) for value in (errors[0], errors[len(errors) // 2], errors[-1])]
    columns.append(percent(result.block.errors[kind]) if result.block and kind in result.block.errors else "")
    return f"  {kind:<12} " + " ".join(f"{column:>10}" for column in columns).rstrip()


def rows(result: QuantizationResult) -> list[dict[str, object]]:
    """One row a figure, then one a matrix: setting, quantity, matrix, value, unit, label."""
    common = asdict(result.params) | {"corpus": result.corpus}
    table = []
    for m in measurements(result):
        name = m.name.removeprefix("quantization_lab.")
        figure = {"quantity": name, "layer": "", "matrix": "", "value": m.value, "unit": m.unit, "label": str(m.label)}
        table.append(common | figure)

    def add(quantity: str, layer: int, kind: str, value: float) -> None:
        place = {"quantity": quantity, "layer": layer, "matrix": kind}
        table.append(common | place | {"value": value, "unit": "fraction", "label": str(Label.MEASURED)})

    for kind, errors in result.layers.by_kind.items() if result.layers else ():
        for layer, error in enumerate(errors):
            add("output_error_RTN", layer, kind, error)
    for kind, error in result.block.errors.items() if result.block else ():
        add(f"output_error_{result.block.method}", result.block.layer, kind, error)
    return table


def measurements(result: QuantizationResult) -> list[Measurement]:
    """The ledger's lines, each with the lab's parameters; a perplexity that has no finite value is left out."""
    params = asdict(result.params) | {"corpus": result.corpus}
    lines = []

    def add(name: str, value: float, unit: str, **details: object) -> None:
        if math.isfinite(value):
            common = {"device": result.device, "params": params, "dtype": result.dtype}
            lines.append(Measurement.of(f"quantization_lab.{name}", value, unit, **(common | details)))

    sizes = result.sizes
    add("bits_per_weight", sizes.bits_per_weight, "bits")
    add("code_bytes", sizes.code_bytes, "bytes")
    add("model_bytes", sizes.model_bytes, "bytes")
    add("size_ratio", sizes.ratio, "fraction")
    if result.layers:
        add("output_error_median", result.layers.median, "fraction")
    if result.block:
        layer = {"layer": result.block.layer, "calibration_tokens": result.block.calibration_tokens}
        add("block_error_ratio", result.block.ratio, "ratio", params=params | layer)
    if speed := result.speed:
        details = {"backend": speed.backend, "dtype": "bfloat16"}
        add("tpot", speed.step.median, "s", spread=speed.step, **details)
        add("tokens_per_second", speed.tokens_per_second, "tokens/s", **details)
        add("ceiling_share", speed.fraction, "fraction", **details)
    if quality := result.quality:
        windows = {"windows": [quality.windows, quality.context_length]}
        add("perplexity", quality.perplexity, "", shapes=windows)
        add("float_perplexity", quality.baseline, "", shapes=windows)
    elif run := result.recorded:
        recorded = {"label": Label.RECORDED, "device": run.machine}
        recorded["params"] = params | {"date": run.date, "commit": run.commit}
        lines.append(Measurement("quantization_lab.perplexity", run.perplexity, "", **recorded))
    return lines
