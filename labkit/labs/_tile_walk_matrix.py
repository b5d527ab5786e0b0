"""How `tile_walk_lab` draws the score matrix: weights as they stand, tiles to come, skipped ones, the one at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit.kernels.flash_attention.tiles import Tile, tiles
from labkit.labs._figures import BLUE, FAINT, GREEN, INK, MUTED, ORANGE, PALE, SHARES, SILVER, VERMILLION
from labkit.labs._tile_walk_result import TileWalkParams, TileWalkResult

Traces = Mapping[str, BaseTraceType]
Q_COLOUR, K_COLOUR, V_COLOUR, ACCENT = BLUE, GREEN, ORANGE, VERMILLION
_HIDDEN, _TO_COME = SILVER, FAINT


def add_matrix(figure: go.Figure, *, row: int, col: int) -> None:
    """The traces and the axes of the matrix."""
    where = {"row": row, "col": col}
    hover = "query %{y}, key %{x}: weight %{z:.3f}<extra></extra>"
    bar = {"len": 0.3, "thickness": 12, "tickfont_size": 12, "tickvals": [0, 0.5, 1], "x": 0.485, "y": 0.83}
    bar["title"] = {"text": "weight", "font_size": 13}
    figure.add_heatmap(name="weights", hovertemplate=hover, colorscale=SHARES, zmin=0, zmax=1, colorbar=bar, **where)
    grey, hover = [[0, _HIDDEN], [1, _HIDDEN]], "query %{y} does not see key %{x}<extra></extra>"
    figure.add_heatmap(name="masked", hovertemplate=hover, colorscale=grey, showscale=False, **where)
    hatch = {"color": "white", "pattern": {"shape": "/", "fgcolor": PALE, "size": 7}, "line": {"width": 0}}
    figure.add_bar(name="skipped", marker=hatch, hoverinfo="skip", showlegend=False, **where)
    lines = {"to come": {"color": SILVER, "width": 1}, "visited": {"color": MUTED, "width": 1.5}}
    lines["present"] = {"color": ACCENT, "width": 4}
    for name, colour in (("Q rows", Q_COLOUR), ("K columns", K_COLOUR), ("V columns", V_COLOUR)):
        lines[name] = {"color": colour, "width": 8}
    for name, line in lines.items():
        look = {"mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}
        figure.add_scatter(name=name, **look, **where)
    figure.update_traces(fill="toself", fillcolor=_TO_COME, selector={"name": "to come"})
    words = {"mode": "text", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}
    label = {"showarrow": False, "bgcolor": "white", "borderpad": 4, "font": {"size": 15, "color": INK}}
    figure.add_annotation(name="skipped", text="", visible=False, **label, **where)
    watched = {"textfont": {"size": 16, "color": ACCENT}, "textposition": "middle right"}
    figure.add_scatter(name="watched", **watched, **words, **where)


def draw_matrix(figure: go.Figure, traces: Traces, result: TileWalkResult) -> None:
    """The pass after this step."""
    p, walk = result.params, result.walk
    places = list(range(p.length))
    traces["weights"].update(x=places, y=places, z=[list(row) for row in walk.weights])
    hidden = [[1 if (row, key) in walk.masked else None for key in places] for row in places]
    traces["masked"].update(x=places, y=places, z=hidden)
    path = list(tiles(p.length, p.length, (p.block_size, p.block_size), p.causal))
    for name, shown in (("to come", path[p.step :]), ("visited", path[: p.step])):
        traces[name].update(**_frames(shown))
    _draw_skipped(figure, traces, p, path)
    _draw_present(traces, result)
    margin = p.length / 11
    figure.layout.xaxis.range = (-margin, p.length - 0.5 + margin)
    figure.layout.yaxis.range = (p.length - 0.3, -margin)


def _frames(shown: Iterable[Tile]) -> dict[str, list]:
    x, y = [], []
    for t in shown:
        left, right, top, bottom = t.k_start - 0.5, t.k_stop - 0.5, t.q_start - 0.5, t.q_stop - 0.5
        x += [left, right, right, left, left, None]
        y += [top, top, bottom, bottom, top, None]
    return {"x": x, "y": y}


def _draw_skipped(figure: go.Figure, traces: Traces, params: TileWalkParams, path: list[Tile]) -> None:
    """Bars over the tiles that the pass leaves out, and how many those are."""
    kept = {(t.q_start, t.k_start) for t in path}
    everything = tiles(params.length, params.length, (params.block_size, params.block_size), False)
    left_out = [t for t in everything if (t.q_start, t.k_start) not in kept]
    traces["skipped"].update(
        x=[(t.k_start + t.k_stop - 1) / 2 for t in left_out],
        width=[t.k_stop - t.k_start for t in left_out],
        base=[t.q_start - 0.5 for t in left_out],
        y=[t.q_stop - t.q_start for t in left_out],
    )
    count = len(left_out)
    words = {"text": f"{count} {'tile' if count == 1 else 'tiles'} skipped", "visible": count > 0}
    middle = {"x": 0.755 * params.length, "y": 0.22 * params.length}
    figure.update_annotations(**words, **middle, selector={"name": "skipped"})


def _draw_present(traces: Traces, result: TileWalkResult) -> None:
    """The tile at hand, the blocks that it is made of at the matrix's edges, and the row that is watched."""
    t = result.present.tile if result.present else None
    edge = result.params.length / 32
    traces["present"].update(**_frames([t] if t else []))
    rows = [t.q_start - 0.5, t.q_stop - 0.5] if t else []
    keys = [t.k_start - 0.5, t.k_stop - 0.5] if t else []
    traces["Q rows"].update(x=[-1.2 * edge] * len(rows), y=rows)
    traces["K columns"].update(x=keys, y=[-1.2 * edge] * len(keys))
    traces["V columns"].update(x=keys, y=[-2.1 * edge] * len(keys))
    last = result.params.length - 0.5
    traces["watched"].update(x=[last] if t else [], y=[result.present.row] if t else [], text=["◀"] if t else [])
