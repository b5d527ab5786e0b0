"""How `quantization_lab` draws a result: error by layer and matrix, perplexity over bits, speed over bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.labs._figures import COLOURS, DECADES, INK, MUTED, TEMPLATE, log_range, named_line
from labkit.labs._quantization_forms import percent, plain, setting, share
from labkit.labs._quantization_result import METHODS, QuantizationResult, Speed
from labkit.labs._result import si

SYMBOLS = {"RTN": "circle", "AWQ": "square", "GPTQ": "diamond"}
BEYOND = "triangle-up"
# Errors from 8 bits with small groups to 2 bits with one group a row.
_DECADES = {-5: "0.001%", -4: "0.01%", -3: "0.1%", -2: "1%", -1: "10%", 0: "100%"}
# What the axis of perplexity holds, as multiples of the float model's; a point beyond stands at its edge, named.
_AXIS = (0.85, 8.0)
_EDGE = 6.2
# Group sizes whose points are named above; the others, which lie between, below.
_ABOVE = (32, 96)
_BITS_RANGE = (1.7, 9.9)
_FIRST_COLUMN = 0.075
Traces = Mapping[str, BaseTraceType]
_HOVER = "%{hovertext}<extra></extra>"


def build_figure() -> go.Figure:
    """The empty figure: two heat maps above, perplexity and speed below."""
    titles = (
        "Output error of each matrix under RTN",
        "In numbers",
        "Perplexity (labels: bits/group): lower is better",
        "Decoding under the memory's ceiling",
    )
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"type": "heatmap"}, {"type": "heatmap"}], [{}, {}]],
        column_widths=[0.58, 0.42],
        row_heights=[0.43, 0.57],
        horizontal_spacing=0.1,
        vertical_spacing=0.17,
        subplot_titles=titles,
    )
    for column, name in ((1, "error by layer"), (2, "error in detail")):
        look = {"coloraxis": "coloraxis", "hovertemplate": _HOVER, "xgap": 1, "ygap": 1}
        figure.add_heatmap(name=name, texttemplate="%{text}" if column == 2 else None, **look, row=1, col=column)
    for panel in (1, 2):
        _add_points(figure, panel)
    _lay_out(figure)
    return figure


def _add_points(figure: go.Figure, panel: int) -> None:
    """The line of what float does or memory allows, earlier points, and the setting at hand."""
    where = {"row": 2, "col": panel, "showlegend": False}
    if panel == 1:
        dashed = {"color": COLOURS["float"], "width": 2, "dash": "dash"}
        look = {"line": dashed, "textfont_color": MUTED, **named_line()}
        figure.add_scatter(name="float", hoverinfo="skip", **look, **where)
        _add_legend(figure)
    else:
        look = {"line": {"color": COLOURS["ceiling"], "width": 3}, **named_line()}
        figure.add_scatter(name="ceiling", hoverinfo="skip", **look, **where)
        marker = {"size": 13, "color": COLOURS["bfloat16"], "symbol": "x"}
        look = {"mode": "markers+text", "textposition": "bottom center", "hovertemplate": _HOVER, "marker": marker}
        figure.add_scatter(name="bfloat16", textfont_color=MUTED, **look, **where)
    what = ("perplexity", "speed")[panel - 1]
    look = {"mode": "markers+text", "textposition": "middle right", "textfont": {"size": 12, "color": MUTED}}
    faded = {"size": 11, "opacity": 0.5, "line_width": 2}
    figure.add_scatter(name=f"earlier {what}", marker=faded, hovertemplate=_HOVER, **look, **where)
    look |= {"textposition": "top center", "textfont": {"size": 14, "color": INK}}
    figure.add_scatter(name=what, marker={"size": 15, "line_width": 2}, hovertemplate=_HOVER, **look, **where)


def _add_legend(figure: go.Figure) -> None:
    """Points that are nowhere, so that the legend says what colours and shapes stand for."""
    looks = {method: {"color": COLOURS[method], "symbol": SYMBOLS[method]} for method in METHODS}
    looks["hollow: recorded earlier"] = {"color": MUTED, "symbol": "circle-open"}
    looks[f"{BEYOND}: beyond the axis"] = {"color": MUTED, "symbol": BEYOND}
    for name, look in looks.items():
        marker = {"size": 13, "line_width": 2, **look}
        name = name.removeprefix(f"{BEYOND}: ")
        figure.add_scatter(name=name, x=[None], y=[None], mode="markers", marker=marker, row=2, col=1)


def _lay_out(figure: go.Figure) -> None:
    bar = {"len": 0.43, "y": 1.01, "yanchor": "top", "thickness": 14}
    bar |= {"tickvals": list(_DECADES), "ticktext": list(_DECADES.values())}
    axis = {"colorscale": DECADES, "cmin": min(_DECADES), "cmax": max(_DECADES), "colorbar": bar}
    figure.update_layout(template=TEMPLATE, height=720, coloraxis=axis, margin={"l": 75, "r": 15, "t": 40, "b": 95})
    figure.update_annotations(font_size=16)
    figure.update_yaxes(showgrid=False, autorange="reversed", ticks="", ticksuffix=" ", row=1)
    figure.update_xaxes(showgrid=False, ticks="", row=1)
    figure.update_xaxes(title={"text": "Layer", "standoff": 4}, row=1, col=1)
    figure.update_yaxes(showticklabels=False, row=1, col=2)
    figure.update_xaxes(title={"text": "Stored bits a weight", "standoff": 6}, range=_BITS_RANGE, dtick=1, row=2, col=1)
    figure.update_yaxes(title="Perplexity", type="log", row=2, col=1)
    figure.update_xaxes(title={"text": "Weights read a token (MB)", "standoff": 6}, row=2, col=2)
    figure.update_yaxes(title="Tokens per second", type="log", row=2, col=2)


def draw(figure: go.Figure, result: QuantizationResult, earlier: Sequence[QuantizationResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded points in the lower two panels."""
    traces = {trace.name: trace for trace in figure.data}
    _draw_errors(figure, traces, result)
    _draw_perplexity(figure, traces, result, earlier)
    _draw_speed(figure, traces, result, earlier)


def _log(error: float | None) -> float | None:
    return None if error is None else math.log10(max(error, 1e-12))


def _draw_errors(figure: go.Figure, traces: Traces, result: QuantizationResult) -> None:
    """All matrices to the left; to the right the median over layers and, for AWQ and GPTQ, one layer by both."""
    whole, detail = traces["error by layer"], traces["error in detail"]
    found, block = result.layers, result.block
    by_kind = {} if found is None else found.by_kind
    kinds = [kind.removesuffix("_proj") for kind in by_kind]
    whole.update(
        x=list(range(result.num_layers)),
        y=kinds,
        z=[[_log(e) for e in (*errors, *[None] * (result.num_layers - len(errors)))] for errors in by_kind.values()],
        hovertext=[
            [f"<b>{kind}, layer {i}</b><br>{percent(e)} under RTN" for i, e in enumerate(errors)]
            for kind, errors in by_kind.items()
        ],
    )
    columns = {"RTN, median<br>of all layers": [statistics.median(errors) for errors in by_kind.values()]}
    if block:
        columns[f"RTN,<br>layer {block.layer}"] = [block.rtn[kind] for kind in by_kind]
        columns[f"{block.method},<br>layer {block.layer}"] = [block.errors[kind] for kind in by_kind]
    cells = list(zip(*columns.values(), strict=True))
    shown = [[percent(error) for error in row] for row in cells]
    detail.update(x=list(columns), y=kinds, z=[[_log(e) for e in row] for row in cells], text=shown, hovertext=shown)
    lines = {"color": INK, "width": 3}
    edges = {"type": "rect", "xref": "x", "yref": "y domain", "y0": 0, "y1": 1, "line": lines}
    figure.layout.shapes = [edges | {"x0": block.layer - 0.5, "x1": block.layer + 0.5}] if block else []


def _draw_perplexity(
    figure: go.Figure, traces: Traces, result: QuantizationResult, earlier: Sequence[QuantizationResult]
) -> None:
    known = [r for r in (*earlier, result) if r.baseline is not None]
    if not known:
        return
    base = known[-1].baseline
    low, high = _AXIS[0] * base, _AXIS[1] * base
    figure.layout.yaxis3.update(range=log_range(low, high), **_ticks(low, high, (1, 1.5, 2, 3, 4, 6, 8)))
    traces["float"].update(x=[*_BITS_RANGE], y=[base, base], text=[f"float: {plain(base)}", ""])
    # A setting measured again stands once, as it came out last.
    past = list({r.params: r for r in earlier if r.perplexity is not None}.values())
    names = [f"{r.params.bits}/{'row' if r.params.group_size < 0 else r.params.group_size}" for r in past]
    at = [_beside(r, base) for r in past]
    traces["earlier perplexity"].update(_points(past, base), text=names, textposition=at)
    now = traces["perplexity"]
    if result.perplexity is not None:
        at = "bottom center" if result.perplexity > _EDGE * base else "top center"
        now.update(_points([result], base), text=[plain(result.perplexity)], textposition=at, mode="markers+text")
    else:
        # Words without a point, in the corner where no model stands: there is no value to draw.
        words = [f"{setting(result.params)}: not recorded "] if result.not_recorded else []
        now.update(x=_BITS_RANGE[1:], y=[_EDGE * base], text=words, textposition="middle left", mode="text")


def _beside(result: QuantizationResult, base: float) -> str:
    """Where an earlier point's name stands: those of neighbours on different sides."""
    if result.recorded:
        return "middle left"
    above = result.perplexity > _EDGE * base or result.params.group_size in _ABOVE
    return "top center" if above else "bottom center"


def _points(results: Sequence[QuantizationResult], base: float) -> dict[str, list]:
    """Where each perplexity stands; past the axis at its edge, as a triangle."""
    symbols = []
    for r in results:
        symbol = BEYOND if r.perplexity > _EDGE * base else SYMBOLS[r.params.method]
        symbols.append(symbol if r.quality else f"{symbol}-open")
    return {
        "x": [r.sizes.bits_per_weight for r in results],
        "y": [min(r.perplexity, _EDGE * base) for r in results],
        "marker_symbol": symbols,
        "marker_color": [COLOURS[r.params.method] for r in results],
        "hovertext": [
            f"<b>{setting(r.params)}</b><br>perplexity {plain(r.perplexity)}, float {plain(r.baseline)}<br>"
            f"{r.sizes.bits_per_weight:.4g} bits a weight; "
            + ("MEASURED" if r.quality else f"RECORDED {r.recorded.date}:<br>{r.recorded.machine}")
            for r in results
        ],
    }


def _ticks(low: float, high: float, steps: Sequence[float]) -> dict[str, list]:
    """Round numbers from low to high, `steps` of them a decade, written out."""
    every = [step * 10.0**decade for decade in range(-4, 9) for step in steps]
    shown = [value for value in every if low <= value <= high]
    return {"tickvals": shown, "ticktext": [f"{value:,g}" for value in shown]}


def _draw_speed(
    figure: go.Figure, traces: Traces, result: QuantizationResult, earlier: Sequence[QuantizationResult]
) -> None:
    past = [r for r in earlier if r.speed]
    latest = result if result.speed else (past[-1] if past else None)
    if latest is None:
        return
    now, whole = latest.speed, latest.float_speed
    right = 1.2 * whole.read_bytes / 1e6
    left = 0.1 * right
    xs = [left + (right - left) * i / 60 for i in range(61)]
    ys = [now.bandwidth / 1e6 / x for x in xs]
    name = f" {si(now.bandwidth, 'B/s')} measured"
    traces["ceiling"].update(x=xs, y=ys, text=[*[""] * 12, name, *[""] * 48])
    traces["bfloat16"].update(_speeds([whole]), text=[f"bfloat16: {whole.tokens_per_second:.3g} "])
    traces["bfloat16"].hovertext = [_speed_hover("bfloat16", whole)]
    mine = [result] if result.speed else []
    for trace, shown in ((traces["earlier speed"], past), (traces["speed"], mine)):
        trace.update(
            _speeds([r.speed for r in shown]),
            hovertext=[_speed_hover(setting(r.params), r.speed) for r in shown],
            marker_color=[COLOURS[r.params.method] for r in shown],
            marker_symbol=[SYMBOLS[r.params.method] for r in shown],
        )
    # Slow ones stand at the bottom of the panel, fast ones under the ceiling.
    traces["speed"].textposition = "bottom center" if now.fraction > 0.05 else "top center"
    traces["speed"].text = [f"{now.tokens_per_second:.3g} tokens/s:<br>{share(now.fraction)} of ceiling"] * len(mine)
    slowest = min(s.tokens_per_second for s in (whole, *(r.speed for r in (*past, latest))))
    figure.layout.xaxis4.range = (left, right)
    low, high = slowest / 2, 1.3 * max(ys)
    figure.layout.yaxis4.update(range=log_range(low, high), **_ticks(low, high, (1, 2, 5)))


def _speeds(speeds: Sequence[Speed]) -> dict[str, list]:
    return {"x": [s.read_bytes / 1e6 for s in speeds], "y": [s.tokens_per_second for s in speeds]}


def _speed_hover(name: str, speed: Speed) -> str:
    return f"<b>{name}</b><br>{speed.tokens_per_second:.3g} tokens/s, {share(speed.fraction)} of the ceiling"
