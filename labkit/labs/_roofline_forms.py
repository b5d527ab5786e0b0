"""The forms in which a roofline result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._result import Number, duration, si
from labkit.measure import Label, Measurement, Timing
from labkit.roofline import time_floor

if TYPE_CHECKING:
    from labkit.labs._roofline_result import PhaseResult, RooflineResult


def numbers(result: RooflineResult) -> list[Number]:
    """The figures above the figure, decode beside prefill."""
    return [*_decode_numbers(result), *(_prefill_numbers(result, result.prefill) if result.prefill else [])]


def _spread(timing: Timing) -> str:
    if timing.n < 3:
        return f"measured {'once' if timing.n == 1 else 'twice'}"
    return f"{duration(timing.p10)} to {duration(timing.p90)} (n={timing.n})"


def _roof_numbers(result: RooflineResult, phase: PhaseResult, group: str) -> list[Number]:
    """How the whole step stands to the roof."""
    bound = "memory" if phase.intensity < result.ridge else "compute"
    ridge = f"ridge {result.ridge:.3g}: {bound} roof"
    floor = f"the roof allows {duration(phase.floor_s)}"
    key, intensity, fraction = phase.name, phase.intensity, phase.fraction
    return [
        Number(f"{key}_intensity", "FLOP/byte", f"{intensity:.3g}", intensity, group, ridge),
        Number(f"{key}_fraction", "of the roof", f"{fraction:.0%}", fraction, group, floor),
    ]


def _decode_numbers(result: RooflineResult) -> list[Number]:
    p, d, read = result.params, result.decode, result.ceilings.read_bandwidth
    group = f"Decode step: batch {p.batch}, context {p.seq_len}, {p.dtype}"
    weights, kv, tokens = d.total("weight_bytes"), d.op("attention").cost.kv_bytes, p.batch * p.seq_len
    speed, step = d.tokens_per_second, d.step.median
    share = f"{d.bandwidth / read:.0%} of {si(read, 'B/s')}"
    each = f"{tokens:,} tokens × {si(kv / tokens, 'B')}"
    once = "once a step" if p.batch == 1 else f"once a step, for all {p.batch}"
    every = "a token a step" if p.batch == 1 else f"{p.batch} tokens a step"
    return [
        Number("tokens_per_second", "speed", f"{speed:.3g} tokens/s", speed, group, every),
        Number("tpot", "time a step", duration(step), step, group, _spread(d.step)),
        Number("weight_bytes", "weights read", si(weights, "B"), weights, group, once),
        Number("kv_bytes", "KV cache read", si(kv, "B"), kv, group, each),
        Number("bandwidth", "bytes / time", si(d.bandwidth, "B/s"), d.bandwidth, group, share),
        *_roof_numbers(result, d, group),
    ]


def _prefill_numbers(result: RooflineResult, p: PhaseResult) -> list[Number]:
    asked = result.params.seq_len
    group = f"Prefill: one prompt of {p.q_len} tokens, {result.params.dtype}"
    flops, rate, speed, ttft = p.total("flops"), p.achieved_flops, p.tokens_per_second, p.step.median
    share = f"{rate / result.peak:.0%} of {si(result.peak, 'FLOP/s')}"
    each = f"{si(flops / p.q_len, 'FLOP')} a token"
    shown = [
        Number("prefill_tokens_per_second", "speed", f"{speed:.3g} tokens/s", speed, group, "of the prompt"),
        Number("ttft", "first token after", duration(ttft), ttft, group, _spread(p.step)),
        Number("prefill_flops", "work", si(flops, "FLOP"), flops, group, each),
        Number("prefill_rate", "work / time", si(rate, "FLOP/s"), rate, group, share),
        *_roof_numbers(result, p, group),
    ]
    if p.uncut:
        floor = time_floor(p.uncut, result.ceilings, result.params.dtype)
        note = f"at least {duration(floor)} (MODELLED)"
        shown.append(Number("uncut_floor", f"all {asked} tokens", "not run", floor, group, note))
    return shown


def text(result: RooflineResult) -> str:
    """The whole result for a reader without widgets: numbers, then every op beside its ceiling."""
    c, dtype = result.ceilings, result.params.dtype
    lines = [
        f"roofline_lab: {result.params.model} on {c.device_name}",
        f"Ceilings (MEASURED): read {si(c.read_bandwidth, 'B/s')}, {dtype} matmul {si(result.peak, 'FLOP/s')}, "
        f"ridge {result.ridge:.3g} FLOP/byte",
    ]
    for phase in result.phases:
        lines.append("")
        mine = [n for n in numbers(result) if n.group.lower().startswith(phase.name)]
        lines.append(f"{mine[0].group} (times MEASURED, bytes and FLOPs MODELLED)")
        lines += [f"  {n.label:<20} {n.text:>16}  {n.note}".rstrip() for n in mine]
        lines.append(f"  {'op':<14} {'time':>9} {'share':>6} {'FLOP/byte':>9} {'achieved':>13} {'of roof':>7}")
        clocked = sum(op.seconds.median for op in phase.ops)
        for op in phase.ops:
            lines.append(
                f"  {op.cost.name:<14} {duration(op.seconds.median):>9} {op.seconds.median / clocked:>6.1%} "
                f"{op.cost.intensity:>9.3g} {si(op.achieved_flops, 'FLOP/s'):>13} {op.fraction:>7.0%}"
            )
    return "\n".join(lines)


def _row(op: str, phase: PhaseResult, seconds: Timing, flops: int, moved: dict[str, int], floor_s: float) -> dict:
    total = sum(moved.values())
    return {
        "phase": phase.name,
        "sequences": phase.batch,
        "q_len": phase.q_len,
        "kv_len": phase.kv_len,
        "op": op,
        "seconds": seconds.median,
        "p10": seconds.p10,
        "p90": seconds.p90,
        "n": seconds.n,
        "flops": flops,
        **moved,
        "flop_per_byte": flops / total,
        "flop_per_s": flops / seconds.median,
        "bytes_per_s": total / seconds.median,
        "floor_s": floor_s,
        "fraction_of_roof": floor_s / seconds.median,
    }


def rows(result: RooflineResult) -> list[dict[str, object]]:
    """One row an op of each phase, and one for the whole step; seconds, bytes, FLOPs."""
    kinds = ("weight_bytes", "kv_bytes", "activation_bytes")
    table = []
    for phase in result.phases:
        setting = asdict(result.params) | {"device": result.ceilings.device_name}
        for op in phase.ops:
            moved = {kind: getattr(op.cost, kind) for kind in kinds}
            table.append(setting | _row(op.cost.name, phase, op.seconds, op.cost.flops, moved, op.floor_s))
        moved = {kind: phase.total(kind) for kind in kinds}
        table.append(setting | _row("step", phase, phase.step, phase.total("flops"), moved, phase.floor_s))
    return table


def measurements(result: RooflineResult) -> list[Measurement]:
    """The ledger's lines: times and speeds MEASURED, bytes MODELLED; each with the lab's parameters."""
    params = asdict(result.params)
    lines = []

    def add(name: str, value: float, unit: str, phase: PhaseResult, **details: object) -> None:
        shapes = {"tokens": [phase.batch, phase.q_len], "kv_len": [phase.kv_len]}
        common = {"device": result.device, "params": params, "dtype": params["dtype"], "shapes": shapes}
        lines.append(Measurement.of(f"roofline_lab.{name}", value, unit, **common, **details))

    d, p = result.decode, result.prefill
    add("tpot", d.step.median, "s", d, spread=d.step)
    add("decode_tokens_per_second", d.tokens_per_second, "tokens/s", d)
    add("decode_bandwidth", d.bandwidth, "bytes/s", d)
    add("decode_fraction_of_roof", d.fraction, "fraction", d)
    add("decode_weight_bytes", d.total("weight_bytes"), "bytes", d, label=Label.MODELLED)
    add("decode_kv_bytes", d.op("attention").cost.kv_bytes, "bytes", d, label=Label.MODELLED)
    if p is not None:
        add("ttft", p.step.median, "s", p, spread=p.step)
        add("prefill_flops_per_second", p.achieved_flops, "FLOP/s", p)
        add("prefill_fraction_of_roof", p.fraction, "fraction", p)
    return lines
