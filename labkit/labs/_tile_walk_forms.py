"""The forms in which a tile walk leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._result import Number, si
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._tile_walk_result import TileWalkParams, TileWalkResult
    from labkit.labs._tile_walk_steps import Visit


def setting(params: TileWalkParams) -> str:
    """As a learner says it, without the step."""
    return f"blocks of {params.block_size}, {'causal' if params.causal else 'no mask'}"


def span(start: int, stop: int) -> str:
    """A block's tokens, first and last."""
    return f"{start}-{stop - 1}" if stop - start > 1 else f"{start}"


def times(visit: Visit) -> str:
    """What the tile did to the watched row's sum and output."""
    return "first tile" if visit.first else f"×{visit.correction:.3g}"


def off(error: float) -> str:
    """A difference from the exact output, short."""
    return f"{error:.1e}" if error < 1e-3 else f"{error:.2g}"


def numbers(result: TileWalkResult) -> list[Number]:
    """The figures above the figure: this step, then memory; what is not there yet left out."""
    return [*_step_numbers(result), *_memory_numbers(result)]


def _step_numbers(result: TileWalkResult) -> list[Number]:
    p, visit = result.params, result.present
    group = f"Step {p.step} of {p.tiles}; {setting(p)}"
    shown = []
    if visit:
        t = visit.tile
        where = f"({t.q_start // p.block_size}, {t.k_start // p.block_size})"
        note = f"queries {span(t.q_start, t.q_stop)} against keys {span(t.k_start, t.k_stop)}"
        of = f"of {t.q_stop - t.q_start}{'; none had one before' if visit.first else ''}"
        shown += [
            Number("tile", "tile", where, t.k_start // p.block_size, group, note),
            Number(
                "rescaled",
                "new maximum in",
                f"{visit.rescaled} row{'' if visit.rescaled == 1 else 's'}",
                visit.rescaled,
                group,
                of,
            ),
            Number("correction", "correction", times(visit), visit.correction, group, _correction_note(visit)),
            Number("row_error", "output off by", off(visit.error), visit.error, group, _row_note(visit)),
        ]
    done, error = result.rows_done, result.largest_error
    shown.append(Number("rows_done", "rows done", f"{done} of {p.length}", done, group))
    if error is not None:
        note = "of them to softmax(QKᵀ)V; MEASURED"
        shown.append(Number("largest_error", "largest difference", off(error), error, group, note))
    return shown


def _correction_note(visit: Visit) -> str:
    if visit.first:
        return f"query {visit.row} has no maximum yet"
    grew = "exp(old - new maximum)" if visit.new_maximum else "the maximum stays"
    return f"on sum and output of query {visit.row}: {grew}"


def _row_note(visit: Visit) -> str:
    state = "it has seen all its keys" if visit.ends_block else "it has keys to come"
    return f"query {visit.row}; {state}"


def _memory_numbers(result: TileWalkResult) -> list[Number]:
    p, traffic, held = result.params, result.traffic, result.held
    group, skipped = "Memory, in float32; MODELLED by counting", p.grid - p.tiles
    matrix = si(result.standard_extra, "B")
    reads = f"Q {si(traffic.q, 'B')}, K {si(traffic.k, 'B')}, V {si(traffic.v, 'B')}"
    against = f"standard attention in all: {si(result.standard_bytes, 'B')}"
    missed = f"of {p.grid}; {skipped} skipped" if skipped else f"of {p.grid}"
    held_note = f"blocks, tile, rows' state; standard: {matrix} for scores and weights"
    return [
        Number("tiles", "tiles to visit", f"{p.tiles}", p.tiles, group, missed),
        Number("held_bytes", "held on the chip", si(held.total, "B"), held.total, group, held_note),
        Number("read_bytes", "read so far", si(traffic.read, "B"), traffic.read, group, reads),
        Number("moved_bytes", "moved so far", si(traffic.moved, "B"), traffic.moved, group, against),
    ]


def text(result: TileWalkResult) -> str:
    """The whole result for a reader without widgets: numbers, and the walk tile by tile."""
    p = result.params
    lines = [
        f"tile_walk_lab: {setting(p)}, {p.step} of {p.tiles} tiles",
        f"{p.length} queries and keys of head size {p.head_dim}, drawn with seed {p.seed}; bytes MODELLED, the rest",
        "MEASURED on the algorithm's own state",
    ]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<18} {number.text:>10}  {number.note}".rstrip())
    return "\n".join([*lines, *_table(result)])


def _table(result: TileWalkResult) -> list[str]:
    if not result.walk.visits:
        return []
    titles = ("step", "queries", "keys", "row", "maximum", "correction", "sum", "off by", "moved")
    layout = "  {:>4} {:>8} {:>8} {:>4} {:>8} {:>11} {:>7} {:>8} {:>8}"
    lines = ["", "The last row of each query block", layout.format(*titles)]
    for step, v in enumerate(result.walk.visits, 1):
        t = v.tile
        cells = (step, span(t.q_start, t.q_stop), span(t.k_start, t.k_stop), v.row, f"{v.most:.3f}", times(v))
        lines.append(layout.format(*cells, f"{v.total:.3f}", off(v.error), si(v.traffic.moved, "B")))
    return lines


def rows(result: TileWalkResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label."""
    common, table = asdict(result.params), []
    for m in measurements(result):
        what = {"quantity": m.name.removeprefix("tile_walk_lab."), "value": m.value, "unit": m.unit}
        table.append(common | what | {"label": str(m.label)})
    return table


def measurements(result: TileWalkResult) -> list[Measurement]:
    """The ledger's lines: the algorithm's state MEASURED, bytes MODELLED; with parameters."""
    params, lines, visit = asdict(result.params), [], result.present

    def add(name: str, value: float, unit: str, label: Label = Label.MEASURED) -> None:
        details = {"device": "cpu", "params": params, "dtype": "float32", "backend": "tiled", "label": label}
        lines.append(Measurement.of(f"tile_walk_lab.{name}", value, unit, **details))

    if visit:
        add("row_maximum", visit.most, "score")
        add("row_sum", visit.total, "weight")
        add("correction", visit.correction, "factor")
        add("row_error", visit.error, "difference")
        add("rescaled", visit.rescaled, "rows")
    if result.largest_error is not None:
        add("largest_error", result.largest_error, "difference")
    add("held_bytes", result.held.total, "bytes", Label.MODELLED)
    add("read_bytes", result.traffic.read, "bytes", Label.MODELLED)
    add("moved_bytes", result.traffic.moved, "bytes", Label.MODELLED)
    add("standard_bytes", result.standard_bytes, "bytes", Label.MODELLED)
    add("tiles_visited", result.params.step, "tiles")
    return lines
