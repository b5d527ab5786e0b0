"""The forms in which an attention result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._flash_attention_costs import ROLES, moved_bytes, predicted_peak, product_flops
from labkit.labs._quantization_forms import share
from labkit.labs._result import Number, duration, si
from labkit.measure import Label, Measurement, Timing

if TYPE_CHECKING:
    from labkit.labs._flash_attention_result import FlashAttentionParams, FlashAttentionResult, Found


_MORE = "Short and long; what else runs here"


def title(params: FlashAttentionParams, role: str) -> str:
    """As a learner says it."""
    names = {"standard": "Standard: the matrix in memory", "native": "PyTorch's kernel: no matrix"}
    return names.get(role, f"{params.implementation('own')}, this course's: blocks of {params.block_size}")


def setting(params: FlashAttentionParams) -> str:
    """As a learner says it."""
    heads = f"{params.num_attention_heads} heads of {params.head_dim}, {params.num_key_value_heads} KV"
    causal = "causal" if params.causal else "not causal"
    return f"{params.seq_len:,} tokens, {heads}, {causal}, {params.dtype}"


def times(value: float) -> str:
    """A factor: "6.5x", "3x"."""
    return f"{value:.3g}x"


def faster(value: float) -> str:
    """A speed-up, or what it is where it is none."""
    return f"{times(value)} faster" if value >= 1 else f"{times(1 / value)} slower"


def numbers(result: FlashAttentionResult) -> list[Number]:
    """The figures above the figure, what is not there yet left out."""
    shown = [number for role in ROLES for number in _role_numbers(result, role)]
    return [*shown, *_length_numbers(result), *_other_numbers(result)]


def _role_numbers(result: FlashAttentionResult, role: str) -> list[Number]:
    found, p, group = result.of(role), result.params, title(result.params, role)
    shown = []

    def add(key: str, label: str, text: str, exact: float, note: str) -> None:
        shown.append(Number(f"{role}_{key}", label, text, float(exact), group, note))

    if found.why_not:
        add("s", "time", "not run", math.nan, found.why_not)
    if found.timing:
        add("s", "time", duration(found.timing.median), found.timing.median, f"{_spread(found.timing)}; MEASURED")
    if gain := (result.speedup(role) if role != "standard" else None):
        add("speedup", "than standard", faster(gain), gain, "in turn with it")
    formula = predicted_peak(p, role)
    if found.peak_bytes is not None:
        add("peak", "memory", si(found.peak_bytes, "B"), found.peak_bytes, f"MEASURED; formula {si(formula, 'B')}")
    else:
        add("formula", "memory", si(formula, "B"), formula, f"MODELLED; {found.not_recorded or 'not measured'}")
    shown += _modelled_numbers(result, role, group)
    if rate := result.rate(role):
        roof = result.attainable(role)
        note = f"{share(rate / roof)} of {si(roof, 'FLOP/s')} attainable" if roof else ""
        add("rate", "useful FLOP/s", si(rate, "FLOP/s"), rate, note)
    if role == "own" and result.difference is not None:
        add("difference", "differs by", f"{result.difference:.2g}", result.difference, "from PyTorch's output, at most")
    return shown


def _spread(timing: Timing) -> str:
    if timing.n == 1:
        return "one call so far"
    return f"{duration(timing.p10)} to {duration(timing.p90)}"


def _modelled_numbers(result: FlashAttentionResult, role: str, group: str) -> list[Number]:
    """Bytes and FLOPs by the formulas."""
    p = result.params
    moved, products = moved_bytes(p, role), product_flops(p, role)
    reads = {
        "standard": "the matrix, 4x",
        "native": "at least: each once",
        "own": f"K, V up to {-(-p.seq_len // p.block_size):,}x",
    }[role]
    more = products / result.needed_flops
    needed = "as needed" if more < 1.0005 else f"{more:.3g}x needed"
    return [
        Number(f"{role}_moved", "bytes moved", si(moved, "B"), moved, group, f"{reads}; MODELLED"),
        Number(f"{role}_flops", "FLOPs", si(products, "FLOP"), products, group, f"{needed}; MODELLED"),
    ]


def _length_numbers(result: FlashAttentionResult) -> list[Number]:
    """The crossover between short and long, as far as it was measured."""
    shown = []
    for role, name in {"native": "PyTorch", "own": result.params.implementation("own")}.items():
        lengths = result.compared(role)
        if len(lengths) < 2:
            continue
        start = result.faster_from(role)
        text = f"from {start:,} tokens" if start else "nowhere yet"
        ends = [f"{n:,}: {faster(result.speedup(role, n))}" for n in (lengths[0], lengths[-1])]
        exact = float(start) if start else math.nan
        shown.append(Number(f"{role}_from", f"{name} faster", text, exact, _MORE, "; ".join(ends)))
    return shown


def _other_numbers(result: FlashAttentionResult) -> list[Number]:
    shown = []
    for name, found in result.others.items():
        seconds = found.timing.median if found.timing else math.nan
        text = duration(seconds) if found.timing else "not run"
        note = f"{si(found.peak_bytes, 'B')}; MEASURED" if found.timing else found.why_not
        shown.append(Number(f"other_{name}", name, text, seconds, _MORE, note))
    return shown


def text(result: FlashAttentionResult) -> str:
    """The whole result for a reader without widgets: numbers, every length, and what is not installed."""
    lines = [f"flash_attention_lab: {setting(result.params)}"]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<24} {number.text:>16}  {number.note}".rstrip())
    lines += ["", "By length (time and memory, MEASURED)", "  {:>7}".format("tokens") + _heads(result)]
    for n in result.lengths:
        found = result.curve.get(n) or result.found
        lines.append(f"  {n:>7,}" + "".join(f" {_cell(found.get(role)):>23}" for role in ROLES))
    if result.absent:
        lines += ["", "Not here", *(f"  {name}: {why}" for name, why in result.absent.items())]
    return "\n".join(lines)


def _heads(result: FlashAttentionResult) -> str:
    return "".join(f" {result.params.implementation(role):>23}" for role in ROLES)


def _cell(found: Found | None) -> str:
    if found is None or found.timing is None:
        return "not run"
    memory = si(found.peak_bytes, "B") if found.peak_bytes is not None else "-"
    return f"{duration(found.timing.median)}, {memory}"


def rows(result: FlashAttentionResult) -> list[dict[str, object]]:
    """One row a figure, the chosen length's first: setting, implementation, quantity, value, unit, label."""
    table = []
    for m in [*measurements(result), *_curve(result)]:
        what = {"quantity": m.name.removeprefix("flash_attention_lab."), "implementation": m.backend or ""}
        table.append(m.params | what | {"value": m.value, "unit": m.unit, "label": str(m.label)})
    return table


def _line(result: FlashAttentionResult, name: str, value: float, unit: str, **details: object) -> Measurement:
    p = details.pop("at", result.params)
    shapes = {
        "q": [1, p.num_attention_heads, p.seq_len, p.head_dim],
        "k": [1, p.num_key_value_heads, p.seq_len, p.head_dim],
    }
    common = {"device": result.device, "params": asdict(p), "shapes": shapes, "dtype": p.dtype}
    return Measurement.of(f"flash_attention_lab.{name}", value, unit, **common, **details)


def _measured(result: FlashAttentionResult, role: str, found: Found, **at: object) -> list[Measurement]:
    """Time and memory of one role."""
    backend = {"backend": result.params.implementation(role), **at}
    lines = []
    if found.timing:
        lines.append(_line(result, f"{role}_s", found.timing.median, "s", spread=found.timing, **backend))
    if found.peak_bytes is not None:
        lines.append(_line(result, f"{role}_peak", found.peak_bytes, "bytes", **backend))
    return lines


def _curve(result: FlashAttentionResult) -> list[Measurement]:
    """The shorter lengths."""
    shorter = {n: found for n, found in result.curve.items() if n != result.params.seq_len}
    lines = []
    for n, found in shorter.items():
        for role, one in found.items():
            lines += _measured(result, role, one, at=result.params.at(n))
    return lines


def measurements(result: FlashAttentionResult) -> list[Measurement]:
    """The ledger's lines of the chosen length, each with the lab's parameters and the backend that ran."""
    p, lines = result.params, []
    for role in ROLES:
        how = {"backend": p.implementation(role), "label": Label.MODELLED}
        lines += _measured(result, role, result.of(role))
        lines.append(_line(result, f"{role}_formula", predicted_peak(p, role), "bytes", **how))
        lines.append(_line(result, f"{role}_moved", moved_bytes(p, role), "bytes", **how))
        lines.append(_line(result, f"{role}_flops", product_flops(p, role), "FLOP", **how))
        if floor := result.floor_s(role):
            lines.append(_line(result, f"{role}_floor_s", floor, "s", **how))
        if role != "standard" and (gain := result.speedup(role)):
            lines.append(_line(result, f"{role}_speedup", gain, "ratio", backend=p.implementation(role)))
        if role != "standard" and (start := result.faster_from(role)):
            lines.append(_line(result, f"{role}_faster_from", start, "tokens", backend=p.implementation(role)))
    for name, found in result.others.items():
        if found.timing:
            lines.append(_line(result, "other_s", found.timing.median, "s", spread=found.timing, backend=name))
    if result.difference is not None:
        lines.append(_line(result, "difference", result.difference, "", backend=p.implementation("own")))
    return lines
