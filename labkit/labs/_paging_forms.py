"""The forms in which a paging result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._quantization_forms import share
from labkit.labs._result import Number, si
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._paging_result import PagingParams, PagingResult

_ENTRY_BYTES = 4  # a block id is an int32
_SHOWN_TABLES, _SHOWN_BLOCKS, _TEXT_STEP_S = 4, 10, 20.0


def reserved_slots(params: PagingParams) -> str:
    """What a request reserves, as a learner says it."""
    if params.max_new >= params.max_length:
        return f"all {params.max_length:,}"
    return f"prompt + {params.max_new:,}"


def prefix(params: PagingParams) -> str:
    """The system prompt, as a learner says it."""
    return f"system prompt of {params.shared_prefix:,}" if params.shared_prefix else "no system prompt"


def setting(params: PagingParams) -> str:
    """As a learner says it."""
    return f"blocks of {params.block_size}, {prefix(params)}; reserved: {reserved_slots(params)} slots a request"


def numbers(result: PagingResult) -> list[Number]:
    """The figures above the figure, blocks beside reservations; what is not there yet left out."""
    return [*_paged_numbers(result), *_reserved_numbers(result)]


def _paged_numbers(result: PagingResult) -> list[Number]:
    p, paged = result.params, result.paged
    group = f"Paged: blocks of {p.block_size}, {prefix(p)}"
    mean = f"{result.empty_slots:g} of {paged.mean_length:,.0f} tokens; MODELLED"
    again = "stopped, and computed again later"
    shown = [
        Number("waste", "empty", share(paged.waste), paged.waste, group, "of what is allocated; MEASURED"),
        Number("formula_waste", "by the formula", share(result.formula_waste), result.formula_waste, group, mean),
        Number("peak_running", "most at once", f"{paged.peak_running}", paged.peak_running, group, "sequences"),
        Number("preemptions", "preempted", f"{paged.preemptions}", paged.preemptions, group, again),
        Number("finished_s", "all done after", f"{paged.finished_s:.0f} s", paged.finished_s, group, _speed(p)),
    ]
    if result.tables:
        entries, count = result.table_entries, len(result.tables.tables)
        note = f"{si(_ENTRY_BYTES * entries, 'B')}; {count} sequences in {len(result.tables.used):,} blocks"
        shown.append(Number("table_entries", "table entries", f"{entries:,}", entries, group, note))
    return shown


def _speed(params: PagingParams) -> str:
    return f"at {params.tokens_per_second:g} tokens/s a sequence; MODELLED"


def _reserved_numbers(result: PagingResult) -> list[Number]:
    p, reserved, done = result.params, result.reserved, result.reserved.finished_s
    group = f"Reserved: {reserved_slots(p)} slots a request"
    more = result.paged.peak_running / reserved.peak_running if reserved.peak_running else 0.0
    return [
        Number("reserved_waste", "empty", share(reserved.waste), reserved.waste, group, "of that; MEASURED"),
        Number("reserved_peak", "most at once", f"{reserved.peak_running}", reserved.peak_running, group, "sequences"),
        Number("more_at_once", "paging runs", f"{more:.3g}x", more, group, "as many at once, in the same memory"),
        Number("reserved_finished_s", "all done after", f"{done:.0f} s", done, group, _speed(p)),
    ]


def text(result: PagingResult) -> str:
    """The whole result for a reader without widgets: numbers, both replays over time, and some block tables."""
    p = result.params
    lines = [
        f"paging_lab: {setting(p)}",
        f"Real arrivals in memory of {p.slots:,} slots; accounting MEASURED, the server's speed MODELLED",
    ]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<16} {number.text:>8}  {number.note}".rstrip())
    return "\n".join([*lines, *_timeline(result), *_tables(result)])


def _timeline(result: PagingResult) -> list[str]:
    titles = ("time", "paged: empty", "running", "reserved: empty", "running", "waiting")
    lines = ["", "  {:>6} {:>13} {:>8} {:>16} {:>8} {:>8}".format(*titles)]
    at = {sample.time_s: sample for sample in result.reserved.samples}
    for one in result.paged.samples:
        two = at.get(one.time_s)
        if two and one.time_s % _TEXT_STEP_S == 0:
            lines.append(
                f"  {f'{one.time_s:.0f} s':>6} {share(one.waste):>13} {one.running:>8} "
                f"{share(two.waste):>16} {two.running:>8} {two.waiting:>8}"
            )
    return lines


def _tables(result: PagingResult) -> list[str]:
    snapshot = result.tables
    if snapshot is None:
        return []
    lines = ["", f"Block tables of {_SHOWN_TABLES} of {len(snapshot.tables)} sequences (* shared)"]
    for sequence, table in list(snapshot.tables.items())[:_SHOWN_TABLES]:
        ids = " ".join(f"{block}{'*' if block in snapshot.shared else ''}" for block in table[:_SHOWN_BLOCKS])
        more = " ..." if len(table) > _SHOWN_BLOCKS else ""
        fill = f"last one holds {snapshot.last_fill[sequence]} of {snapshot.block_size}"
        lines.append(f"  sequence {sequence}, {len(table)} blocks, {fill}: {ids}{more}")
    return lines


def rows(result: PagingResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label."""
    common, table = asdict(result.params), []
    for m in measurements(result):
        what = {"quantity": m.name.removeprefix("paging_lab."), "value": m.value, "unit": m.unit}
        table.append(common | what | {"label": str(m.label)})
    return table


def measurements(result: PagingResult) -> list[Measurement]:
    """The ledger's lines: accounting MEASURED, the formula and times at a modelled speed MODELLED; with parameters."""
    params, lines = asdict(result.params), []

    def add(name: str, value: float, unit: str, label: Label = Label.MEASURED) -> None:
        lines.append(Measurement.of(f"paging_lab.{name}", value, unit, device="cpu", params=params, label=label))

    add("waste", result.paged.waste, "fraction")
    add("formula_waste", result.formula_waste, "fraction", Label.MODELLED)
    add("mean_length", result.paged.mean_length, "tokens")
    add("peak_running", result.paged.peak_running, "sequences")
    add("preemptions", result.paged.preemptions, "preemptions")
    add("finished_s", result.paged.finished_s, "s", Label.MODELLED)
    if result.tables:
        add("table_entries", result.table_entries, "entries")
    add("reserved_waste", result.reserved.waste, "fraction")
    add("reserved_peak", result.reserved.peak_running, "sequences")
    add("reserved_finished_s", result.reserved.finished_s, "s", Label.MODELLED)
    return lines
