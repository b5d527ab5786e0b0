"""How `tile_walk_lab` draws bytes: what a step holds, and what the walk has moved, beside standard attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit.labs._figures import COLOURS, INK, MUTED, PURPLE, SKY, spread
from labkit.labs._result import si
from labkit.labs._tile_walk_forms import setting
from labkit.labs._tile_walk_matrix import K_COLOUR, Q_COLOUR, V_COLOUR
from labkit.labs._tile_walk_result import TileWalkResult

Traces = Mapping[str, BaseTraceType]
FLASH, STANDARD = "tiled", "standard"
_PARTS = {
    "Q block": ("q", Q_COLOUR),
    "K block": ("k", K_COLOUR),
    "V block": ("v", V_COLOUR),
    "tile of scores": ("scores", PURPLE),
    "rows' m, l and output": ("state", SKY),
}
_HOVER = "%{hovertext}<extra></extra>"
# Names at the ends of curves stand at least so far apart, as a share of the panel's height.
_APART = 0.13


def add_bytes(figure: go.Figure, *, row: int) -> None:
    """What is held on the left, what is moved on the right."""
    for name, (_, colour) in _PARTS.items():
        look = {"orientation": "h", "marker_color": colour, "hovertemplate": _HOVER}
        figure.add_bar(name=name, y=[FLASH], **look, row=row, col=1)
    look = {"orientation": "h", "marker_color": MUTED, "hovertemplate": _HOVER}
    figure.add_bar(name="all scores and weights", y=[STANDARD], **look, row=row, col=1)
    words = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(name="held words", y=[FLASH, STANDARD], **words, row=row, col=1)
    figure.update_yaxes(autorange="reversed", showgrid=False, row=row, col=1)
    _add_moved(figure, row)


def _add_moved(figure: go.Figure, row: int) -> None:
    where, colour = {"row": row, "col": 2, "showlegend": False}, COLOURS["attention"]
    dash = {"width": 2, "color": COLOURS["ceiling"], "dash": "dash"}
    figure.add_scatter(name="standard moved", mode="lines", line=dash, hoverinfo="skip", **where)
    line = {"width": 2, "color": colour}
    figure.add_scatter(name="earlier moved", mode="lines", line=line, opacity=0.5, hovertemplate=_HOVER, **where)
    words = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False}
    figure.add_scatter(name="moved words", textfont_size=12, **words, **where)
    marker = {"size": 12, "color": colour, "line": {"width": 2, "color": INK}}
    look = {"mode": "lines+markers", "line": {"width": 3, "color": colour}, "hovertemplate": _HOVER}
    figure.add_scatter(name="moved", marker=marker, **look, **where)
    title = {"text": "Tiles that are done (%)", "standoff": 2}
    figure.update_xaxes(title=title, range=(-2, 210), tickvals=[0, 50, 100], tickangle=0, row=row, col=2)


def draw_bytes(figure: go.Figure, traces: Traces, result: TileWalkResult, earlier: Sequence[TileWalkResult]) -> None:
    """This step's bytes, and the walks of other settings as far as they came."""
    _draw_held(figure, traces, result)
    # The furthest step of every other setting.
    walks: dict[tuple[int, bool], TileWalkResult] = {}
    for r in sorted(earlier, key=lambda r: r.params.step):
        walks[r.params.block_size, r.params.causal] = r
    walks.pop((result.params.block_size, result.params.causal), None)
    others = sorted(walks.values(), key=lambda r: r.traffic.moved)
    curves = [_curve(r) for r in others]
    traces["earlier moved"].update(
        x=[x for c in curves for x in (*c["x"], None)],
        y=[y for c in curves for y in (*c["y"], None)],
        hovertext=[t for c in curves for t in (*c["hovertext"], "")],
    )
    now = _curve(result)
    shown = [0] * (len(now["x"]) - 1) + [1]
    traces["moved"].update(**now, marker={"size": [13 * s for s in shown], "line": {"width": [2 * s for s in shown]}})
    standard = result.standard_bytes / 1e3
    traces["standard moved"].update(x=[0, 100], y=[standard] * 2)
    top = 1.25 * max([standard, *now["y"], *(y for c in curves for y in c["y"])])
    figure.layout.yaxis6.range = (0, top)
    ends = {f"standard: {si(result.standard_bytes, 'B')}": (100, standard)}
    ends |= {setting(r.params): (c["x"][-1], c["y"][-1]) for r, c in zip(others, curves, strict=True)}
    traces["moved words"].update(
        x=[x for x, _ in ends.values()],
        y=spread([y for _, y in ends.values()], _APART * top),
        text=[f" {name}" for name in ends],
        textfont_color=[INK, *[MUTED] * len(others)],
    )


def _curve(result: TileWalkResult) -> dict[str, list]:
    """kB moved after each tile, from none."""
    p, moved = result.params, [0, *(v.traffic.moved for v in result.walk.visits)]
    return {
        "x": [100 * step / p.tiles for step in range(len(moved))],
        "y": [count / 1e3 for count in moved],
        "hovertext": [
            f"<b>{setting(p)}</b>, {step} of {p.tiles} tiles<br>{si(count, 'B')} moved; MODELLED"
            for step, count in enumerate(moved)
        ],
    }


def _draw_held(figure: go.Figure, traces: Traces, result: TileWalkResult) -> None:
    base, whole = 0, result.standard_extra
    for name, (field, _) in _PARTS.items():
        size = getattr(result.held, field)
        traces[name].update(x=[size], base=[base], hovertext=[f"{name}: {si(size, 'B')}; MODELLED"])
        base += size
    traces["all scores and weights"].update(x=[whole], hovertext=[f"{si(whole, 'B')}; MODELLED"])
    traces["held words"].update(x=[base, whole], text=[f" {si(base, 'B')}", f" {si(whole, 'B')}"])
    figure.layout.xaxis5.range = (0, 1.3 * max(base, whole))
