"""How `tile_walk_lab` draws a result: the matrix; one row's maximum, sum and error by tile; bytes held and moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.kernels.flash_attention.tiles import tiles
from labkit.labs._figures import COLOURS, INK, MUTED, PURPLE, SKY, TEMPLATE, log_range, named_line
from labkit.labs._tile_walk_bytes import add_bytes, draw_bytes
from labkit.labs._tile_walk_forms import off, setting, span
from labkit.labs._tile_walk_matrix import ACCENT, add_matrix, draw_matrix
from labkit.labs._tile_walk_result import TileWalkResult
from labkit.labs._tile_walk_steps import Visit

Traces = Mapping[str, BaseTraceType]
KEPT, ADDED = SKY, PURPLE
# No difference between float32 numbers of this size is smaller but 0, which a logarithmic axis does not have.
FLOOR = 1e-10
ROUNDING = 2.0**-23
# Of each panel: its vertical axis, and how much of the height it takes.
_PLACES = {
    "matrix": ("yaxis", 0.33, 0.98),
    "maximum": ("yaxis2", 0.84, 0.98),
    "sum": ("yaxis3", 0.58, 0.78),
    "error": ("yaxis4", 0.33, 0.52),
    "held": ("yaxis5", 0.0, 0.17),
    "moved": ("yaxis6", 0.0, 0.17),
}
_HOVER = "%{hovertext}<extra></extra>"


def build_figure() -> go.Figure:
    """The empty figure: matrix and row above, bytes below."""
    figure = make_subplots(
        rows=4,
        cols=2,
        specs=[[{"rowspan": 3}, {}], [None, {}], [None, {}], [{}, {}]],
        column_widths=[0.57, 0.43],
        horizontal_spacing=0.13,
        subplot_titles=[" "] * 6,
    )
    names = ("matrix", "maximum", "sum", "error", "held", "moved")
    for note, name in zip(figure.layout.annotations, names, strict=True):
        note.name = name
    add_matrix(figure, row=1, col=1)
    _add_row(figure)
    add_bytes(figure, row=4)
    _lay_out(figure)
    return figure


def _add_row(figure: go.Figure) -> None:
    """The watched row: maxima, sums and errors after each of its tiles."""
    look = {"showlegend": False, "hovertemplate": _HOVER}
    ring = {"size": 10, "symbol": "circle-open", "color": ADDED, "line_width": 2}
    figure.add_scatter(name="tile maximum", mode="markers", marker=ring, **look, row=1, col=2)
    step = {"width": 3, "color": INK, "shape": "hv"}
    figure.add_scatter(name="running maximum", mode="lines+markers", line=step, **look, row=1, col=2)
    figure.add_bar(name="kept", marker_color=KEPT, **look, row=2, col=2)
    figure.add_bar(name="added", marker_color=ADDED, **look, row=2, col=2)
    ghost = {"color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 1.5}}
    figure.add_bar(name="before", marker=ghost, hoverinfo="skip", showlegend=False, row=2, col=2)
    words = {"mode": "text", "textposition": "top center", "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(name="corrections", **words, row=2, col=2)
    dash = {"width": 2, "color": COLOURS["ceiling"], "dash": "dash"}
    words = {"textfont_color": MUTED, "hoverinfo": "skip", **named_line()}
    text = ["float32 rounding", ""]
    figure.add_scatter(name="rounding", line=dash, text=text, **words, showlegend=False, row=3, col=2)
    marks = {"mode": "lines+markers+text", "textposition": "top center", "marker_size": 9}
    figure.add_scatter(name="error", line={"width": 3, "color": ACCENT}, **marks, **look, row=3, col=2)


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(template=TEMPLATE, height=810, margin={"l": 75, "r": 15, "t": 35, "b": 95}, barmode="overlay")
    figure.update_annotations(font_size=15)
    for name, (axis, bottom, top) in _PLACES.items():
        figure.layout[axis].domain = (bottom, top)
        figure.update_annotations(y=top, selector={"name": name})
    figure.update_xaxes(title={"text": "Key", "standoff": 2}, showgrid=False, ticks="", showline=False, row=1, col=1)
    square = {"scaleanchor": "x", "constrain": "domain", "constraintoward": "top", "showline": False, "ticks": ""}
    figure.update_yaxes(title={"text": "Query", "standoff": 2}, showgrid=False, **square, row=1, col=1)
    figure.update_xaxes(constrain="domain", row=1, col=1)
    for row in (1, 2, 3):
        figure.update_xaxes(showticklabels=row == 3, tickangle=0, row=row, col=2)
    figure.update_xaxes(title={"text": "Keys of the tile", "standoff": 2}, row=3, col=2)
    figure.update_yaxes(rangemode="tozero", row=2, col=2)
    shown = {"tickvals": [1e-8, 1e-4, 1], "ticktext": ["1e-8", "1e-4", "1"]}
    figure.update_yaxes(type="log", range=log_range(FLOOR, 1e4), **shown, row=3, col=2)


def draw(figure: go.Figure, result: TileWalkResult, earlier: Sequence[TileWalkResult]) -> None:
    """Set the traces' data; of `earlier` results, the bytes of other settings stay as faded curves."""
    traces = {trace.name: trace for trace in figure.data}
    draw_matrix(figure, traces, result)
    _draw_row(figure, traces, result)
    draw_bytes(figure, traces, result, earlier)
    _draw_titles(figure, result)


def _colour_word(text: str, colour: str) -> str:
    return f'<span style="color:{colour}"><b>{text}</b></span>'


def _draw_titles(figure: go.Figure, result: TileWalkResult) -> None:
    p, visit = result.params, result.present
    row = f"Query {visit.row}" if visit else "A query"
    words = {
        "matrix": f"Weights after {p.step} of {p.tiles} tiles, {setting(p)}",
        "maximum": f"{row} {_colour_word('◀', ACCENT)}: max m, {_colour_word('○', ADDED)} of a tile",
        "sum": f"Sum l: {_colour_word('kept', KEPT)} + {_colour_word('added', ADDED)}, ▯ before",
        "error": "How far its output is off",
        "held": "Held at once (bytes)",
        "moved": "Moved to and from memory (kB)",
    }
    for name, text in words.items():
        figure.update_annotations(text=text, selector={"name": name})


def _draw_row(figure: go.Figure, traces: Traces, result: TileWalkResult) -> None:
    visits = result.row_visits if result.present else ()
    x, tips = list(range(len(visits))), [_hover(visit) for visit in visits]
    traces["tile maximum"].update(x=x, y=[v.tile_most for v in visits], hovertext=tips)
    colours = [ACCENT if v.new_maximum else INK for v in visits]
    traces["running maximum"].update(
        x=x, y=[v.most for v in visits], hovertext=tips, marker={"size": 9, "color": colours}
    )
    kept = [v.total_before * v.correction for v in visits]
    traces["kept"].update(x=x, y=kept, hovertext=tips)
    added = [v.total - k for v, k in zip(visits, kept, strict=True)]
    traces["added"].update(x=x, y=added, base=kept, hovertext=tips)
    traces["before"].update(x=x, y=[v.total_before for v in visits])
    tops = [max(v.total, v.total_before) for v in visits]
    said = ["" if v.first else f"<b>×{v.correction:.2g}</b>" if v.new_maximum else "×1" for v in visits]
    traces["corrections"].update(x=x, y=tops, text=said, textfont_color=[c if c == ACCENT else MUTED for c in colours])
    errors = [max(v.error, FLOOR) for v in visits]
    last = [""] * (len(x) - 1) + [off(v.error) for v in visits[-1:]]
    traces["error"].update(x=x, y=errors, hovertext=tips, text=last)
    # Off the line, which falls where the row is done.
    traces["error"].textposition = "bottom center" if errors and errors[-1] < ROUNDING else "top center"
    _draw_row_axes(figure, traces, result, max(tops, default=1.0))


def _draw_row_axes(figure: go.Figure, traces: Traces, result: TileWalkResult, top: float) -> None:
    """Room for all tiles of the row, also those to come."""
    p = result.params
    path = list(tiles(p.length, p.length, (p.block_size, p.block_size), p.causal))
    at = result.present.tile if result.present else path[0]
    names = [span(t.k_start, t.k_stop) for t in path if t.q_start == at.q_start]
    ends = (-0.6, len(names) - 0.4)
    traces["rounding"].update(x=ends, y=[ROUNDING] * 2)
    for axis in ("xaxis2", "xaxis3", "xaxis4"):
        figure.layout[axis].update(range=ends, tickvals=list(range(len(names))), ticktext=names)
    figure.layout.yaxis3.range = (0, 1.25 * top)
    scores = [v.tile_most for v in result.row_visits] if result.present else [0.0]
    low, high = min(scores), max(scores)
    room = 0.2 * (high - low) + 0.2
    figure.layout.yaxis2.range = (low - room, high + room)


def _hover(visit: Visit) -> str:
    t = visit.tile
    grew = "new maximum" if visit.new_maximum else "the first" if visit.first else "the maximum stays"
    return (
        f"<b>Query {visit.row}, keys {span(t.k_start, t.k_stop)}</b>: {grew}<br>"
        f"m {visit.most:.3f}, this tile's {visit.tile_most:.3f}<br>"
        f"l {visit.total_before:.3f} × {visit.correction:.3g} + "
        f"{visit.total - visit.total_before * visit.correction:.3f} = {visit.total:.3f}<br>"
        f"output off by {off(visit.error)}; MEASURED"
    )
