"""How `kv_cache_lab` draws a result: bytes over length, time of attention over bytes, perplexity over size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.labs._figures import COLOURS, INK, MUTED, TEMPLATE, log_range, named_line
from labkit.labs._kv_cache_forms import heads, setting, share
from labkit.labs._kv_cache_looks import Traces, add_label, colour, decades, label, looks, symbol
from labkit.labs._kv_cache_quality import SMALLER, add_note, draw_perplexity
from labkit.labs._kv_cache_result import BITS, FULL, SEQ_LENS, KVCacheResult
from labkit.labs._result import duration, si

_HOVER = "%{hovertext}<extra></extra>"
_LENGTHS = (180, 130_000)  # the axis, with room for the curves' names at its right


def build_figure(options: Sequence[int]) -> go.Figure:
    """The empty figure for these numbers of KV heads: bytes to the left; time above perplexity to the right."""
    titles = ("Bytes of the whole cache", "One layer's decode attention", "What it costs in quality")
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"rowspan": 2}, {}], [None, {}]],
        column_widths=[0.5, 0.5],
        horizontal_spacing=0.11,
        vertical_spacing=0.2,
        subplot_titles=titles,
    )
    _add_limits(figure)
    for bits in BITS:
        look = {"mode": "lines+text", "textposition": "middle right", "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(name=f"curve {bits}", **look, row=1, col=1)
    for name, row, col in (("bytes", 1, 1), ("time", 1, 2), ("perplexity", 2, 2)):
        where = {"row": row, "col": col, "showlegend": False, "hovertemplate": _HOVER}
        faded = {"size": 11, "opacity": 0.5, "line_width": 1, "line_color": "white"}
        figure.add_scatter(name=f"earlier {name}", mode="markers", marker=faded, **where)
        look = {"mode": "markers+text", "textposition": "top left", "textfont": {"size": 14, "color": INK}}
        figure.add_scatter(name=name, marker={"size": 16, "line": {"width": 2, "color": INK}}, **look, **where)
    look = {"mode": "markers+text", "textposition": "middle left", "textfont": {"size": 12, "color": MUTED}}
    hollow = {"size": 12, "color": MUTED, "line_width": 2}
    figure.add_scatter(name="merged", marker=hollow, hovertemplate=_HOVER, showlegend=False, **look, row=2, col=2)
    _add_legend(figure, options)
    _lay_out(figure)
    add_label(figure, "bytes", "")
    add_label(figure, "time", "2")
    add_note(figure)
    return figure


def _add_limits(figure: go.Figure) -> None:
    """What the points stand under or over: free memory and weights, the measured bandwidth, 16 bits' perplexity."""
    look = {"hoverinfo": "skip", "showlegend": False, **named_line()}
    solid, dashed = {"color": COLOURS["ceiling"], "width": 3}, {"color": MUTED, "width": 2, "dash": "dash"}
    figure.add_scatter(name="free memory", line=solid, **look, row=1, col=1)
    figure.add_scatter(name="weights", line=dashed, textfont_color=MUTED, **look, row=1, col=1)
    figure.add_scatter(name="ceiling", line=solid, **(look | named_line("bottom right")), row=1, col=2)
    figure.add_scatter(name="full precision", x=[*SMALLER], y=[1, 1], line=dashed, **look, row=2, col=2)


def _add_legend(figure: go.Figure, options: Sequence[int]) -> None:
    """Points that are nowhere, so that the legend says what shapes and colours stand for."""
    nowhere = {"x": [None], "y": [None], "row": 1, "col": 1}
    shapes = {heads(count): {"symbol": symbol(count, options), "color": MUTED} for count in options}
    for name, marker in shapes.items():
        figure.add_scatter(name=name, mode="markers", marker={"size": 12, **marker}, **nowhere)
    for name, bits in (("16 bits", FULL), ("quantized", BITS[-1])):
        figure.add_scatter(name=name, mode="lines", line={"width": 4, "color": colour(bits)}, **nowhere)


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(template=TEMPLATE, height=640, margin={"l": 80, "r": 20, "t": 40, "b": 100})
    figure.update_annotations(font_size=16)
    ticks = {"tickvals": list(SEQ_LENS), "ticktext": [f"{n}" if n < 1024 else f"{n // 1024}k" for n in SEQ_LENS]}
    figure.update_xaxes(
        title={"text": "Tokens", "standoff": 4}, type="log", range=log_range(*_LENGTHS), **ticks, row=1, col=1
    )
    figure.update_yaxes(type="log", row=1)
    figure.update_yaxes(title="Time a new token", row=1, col=2)
    figure.update_xaxes(title={"text": "Bytes of one layer's cache", "standoff": 4}, type="log", row=1, col=2)
    small = {"tickvals": [1, 2, 3, 4, 6, 8, 10], "ticktext": ["1x", "2x", "3x", "4x", "6x", "8x", "10x"]}
    title = {"text": "Times smaller than the model's own cache", "standoff": 4}
    figure.update_xaxes(title=title, type="log", range=log_range(*SMALLER), **small, row=2, col=2)
    figure.update_yaxes(title="Perplexity / 16 bits'", type="log", row=2, col=2)


def draw(figure: go.Figure, result: KVCacheResult, earlier: Sequence[KVCacheResult], options: Sequence[int]) -> None:
    """Set the traces' data; `earlier` results stay as faded points, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    past = list({r.params: r for r in earlier}.values())
    _draw_bytes(figure, traces, result, past, options)
    _draw_time(figure, traces, result, past, options)
    draw_perplexity(figure, traces, result, past, options)


def _draw_bytes(figure: go.Figure, traces: Traces, result: KVCacheResult, past: list, options: Sequence[int]) -> None:
    sizes, params = result.sizes, result.params
    for bits, curve in sizes.curves.items():
        chosen = bits == params.bits
        name = f"   {bits} bits" if bits == FULL else f"   {bits}"
        text = [*[""] * (len(curve) - 1), name]
        line = {"width": 4 if chosen else 2, "color": colour(bits)}
        values = {"x": list(curve), "y": list(curve.values()), "text": text}
        traces[f"curve {bits}"].update(**values, opacity=1 if chosen else 0.55, line=line)
    # They end where the curves do: beyond that are the curves' names.
    ends = [_LENGTHS[0], SEQ_LENS[-1]]
    for name, value in (("free memory", sizes.free), ("weights", sizes.weights)):
        traces[name].update(x=ends, y=[value, value], text=[f" {name} {si(value, 'B')}", ""])
    for name, shown in (("earlier bytes", past), ("bytes", [result])):
        traces[name].update(
            x=[r.params.seq_len for r in shown],
            y=[r.sizes.total for r in shown],
            hovertext=[f"<b>{setting(r.params)}</b><br>{si(r.sizes.total, 'B')} allocated" for r in shown],
            **looks(shown, options),
        )
    side = "right" if params.seq_len == SEQ_LENS[0] else "left"
    label(figure, "bytes", params.seq_len, sizes.total, si(sizes.total, "B"), side)
    low, high = _bytes_range(sizes.curves, params.num_key_value_heads)
    low, high = low / 1.5, 2.5 * max(sizes.free, high)
    figure.layout.yaxis.update(range=log_range(low, high), **decades(low, high, "bytes"))


def _bytes_range(curves: Mapping[int, Mapping[int, int]], count: int) -> tuple[float, float]:
    """The least with one KV head, which does not move with their number, and the most with these."""
    every = [value for curve in curves.values() for value in curve.values()]
    return min(every) / count, max(every)


def _draw_time(figure: go.Figure, traces: Traces, result: KVCacheResult, past: list, options: Sequence[int]) -> None:
    past = [r for r in past if r.speed]
    now = [result] if result.speed else []
    if not (past or now):
        return
    shown = [*past, *now]
    bandwidth = shown[-1].speed.bandwidth
    places = [r.speed.read_bytes for r in shown] + [r.speed.full_bytes for r in shown]
    left, right = min(places) / 4, max(places) * 4
    low = left / bandwidth
    high = 5 * max(right / bandwidth, *(r.speed.timing.median for r in shown), *(r.speed.full.median for r in shown))
    name = f"{si(bandwidth, 'B/s')} measured"
    middle = math.sqrt(left * right)
    traces["ceiling"].update(
        x=[left, middle, right], y=[left / bandwidth, middle / bandwidth, right / bandwidth], text=["", f" {name}", ""]
    )
    for trace, points in (("earlier time", past), ("time", now)):
        traces[trace].update(
            x=[r.speed.read_bytes for r in points],
            y=[r.speed.timing.median for r in points],
            hovertext=[_time_hover(r) for r in points],
            **looks(points, options),
        )
    for r in now:
        words = f"{duration(r.speed.timing.median)}: {share(r.speed.fraction)} of ceiling"
        side = "left" if r.speed.read_bytes > middle else "right"
        label(figure, "time", r.speed.read_bytes, r.speed.timing.median, words, side)
    figure.layout.xaxis2.update(range=log_range(left, right), **decades(left, right, "bytes"))
    figure.layout.yaxis2.update(range=log_range(low, high), **decades(low, high, "s"))


def _time_hover(result: KVCacheResult) -> str:
    speed = result.speed
    line = f"<b>{setting(result.params)}</b><br>{duration(speed.timing.median)} for {si(speed.read_bytes, 'B')}"
    return f"{line}; the ceiling allows {duration(speed.floor_s)}<br>16 bits: {duration(speed.full.median)}"
