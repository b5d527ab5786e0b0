"""How `flash_attention_lab` draws a result: time and memory over length, and the roof with each implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit._table import readable
from labkit.labs._figures import COLOURS, INK, MUTED, TEMPLATE, log_range, named_line, spread
from labkit.labs._flash_attention_costs import ROLES, costs, predicted_peak
from labkit.labs._flash_attention_forms import setting
from labkit.labs._flash_attention_result import FlashAttentionResult
from labkit.labs._flash_attention_roof import SYMBOLS, add_roof, draw_roof
from labkit.labs._result import duration, si
from labkit.roofline import time_floor

Traces = Mapping[str, BaseTraceType]
PANELS = ("time", "memory")
_HOVER = "%{hovertext}<extra></extra>"
# Labels of one length stand at least so far apart, as a share of a panel's height.
_APART = 0.06


def colour(role: str) -> str:
    """Of this role in every panel."""
    return COLOURS[f"{role} attention"]


def build_figure(lengths: Sequence[int], kernel: str) -> go.Figure:
    """The empty figure over these lengths: time, memory, roof, side by side; `kernel` is the course's own."""
    titles = ("Time of one call", "Memory of one call", "Useful FLOP/s")
    figure = make_subplots(cols=3, column_widths=[0.36, 0.36, 0.28], horizontal_spacing=0.085, subplot_titles=titles)
    for col, panel in enumerate(PANELS, start=1):
        _add_limits(figure, panel, col)
        for role in ROLES:
            where = {"row": 1, "col": col, "showlegend": False, "hovertemplate": _HOVER}
            look = {"symbol": SYMBOLS[role], "color": colour(role)}
            faded = {"size": 9, "opacity": 0.35, "line_width": 0, **look}
            figure.add_scatter(name=f"earlier {role} {panel}", mode="markers", marker=faded, **where)
            curve = {"line": {"width": 2.5, "color": colour(role)}, "marker": {"size": 8, **look}}
            figure.add_scatter(name=f"{role} curve {panel}", mode="lines+markers", **curve, **where)
            now = {"size": 16, "line": {"width": 2, "color": INK}, **look}
            figure.add_scatter(name=f"{role} {panel}", mode="markers", marker=now, **where)
        words = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(name=f"labels {panel}", textfont_size=14, **words, row=1, col=col)
    add_roof(figure, col=3)
    _add_legend(figure, kernel)
    _lay_out(figure, lengths)
    return figure


def _add_limits(figure: go.Figure, panel: str, col: int) -> None:
    """What the points stand over or under: the roof's least time; the formulas, and the memory that is free."""
    dashed, dotted = {"color": INK, "width": 2, "dash": "dash"}, {"color": MUTED, "width": 2, "dash": "dot"}
    where = {"showlegend": False, "hoverinfo": "skip", "row": 1, "col": col}
    if panel == "time":
        figure.add_scatter(name="floor", mode="lines", line=dashed, **where)
        return
    words = {"textfont": {"size": 15, "color": MUTED}, **named_line("bottom right")}
    for role in ("standard", "native"):
        figure.add_scatter(name=f"{role} formula", line=dotted, **words, **where)
    line = {"color": COLOURS["ceiling"], "width": 3}
    figure.add_scatter(name="free memory", line=line, **named_line(), **where)


def _add_legend(figure: go.Figure, kernel: str) -> None:
    """Points that are nowhere, so that the legend says what shapes and lines stand for."""
    nowhere = {"x": [None], "y": [None], "row": 1, "col": 1}
    names = {"standard": "standard", "native": "PyTorch's kernel", "own": f"the course's own (labkit {kernel})"}
    for role, name in names.items():
        look = {"line": {"width": 2.5, "color": colour(role)}, "marker": {"size": 11, "symbol": SYMBOLS[role]}}
        figure.add_scatter(name=name, mode="lines+markers", **look, **nowhere)
    lines = {
        "least time that the roof allows": {"color": INK, "width": 2, "dash": "dash"},
        "memory by the formula": {"color": MUTED, "width": 2, "dash": "dot"},
    }
    for name, line in lines.items():
        figure.add_scatter(name=name, mode="lines", line=line, **nowhere)


def short(length: int) -> str:
    """A length on an axis: "512", "8k"."""
    return f"{length}" if length < 1024 else f"{length // 1024}k"


def _lay_out(figure: go.Figure, lengths: Sequence[int]) -> None:
    figure.update_layout(template=TEMPLATE, height=470, margin={"l": 75, "r": 15, "t": 40, "b": 100})
    figure.update_annotations(font_size=16)
    ticks = {"tickvals": list(lengths), "ticktext": [short(n) for n in lengths], "tickangle": 0}
    title = {"text": "Tokens", "standoff": 4}
    for col in (1, 2):
        # With room at the right for the labels of the longest.
        reach = log_range(lengths[0] / 1.3, lengths[-1] * 4.5)
        figure.update_xaxes(title=title, type="log", range=reach, **ticks, row=1, col=col)
        figure.update_yaxes(type="log", row=1, col=col)


def draw(figure: go.Figure, result: FlashAttentionResult, earlier: Sequence[FlashAttentionResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded points, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    past = list({r.params: r for r in earlier if r.params != result.params}.values())
    low, high = _draw_panel(figure, traces, result, past, "time")
    _draw_floor(figure, traces, result)
    if low:
        _set_range(figure, traces, result, "time", low / 4, high * 2.5)
    low, high = _draw_panel(figure, traces, result, past, "memory")
    free = _draw_memory_limits(figure, traces, result)
    _set_range(figure, traces, result, "memory", (low or free / 1e6) / 3, max(free, high) * 3)
    draw_roof(figure, traces, result, past)


def _value(result: FlashAttentionResult, role: str, panel: str, n: int) -> float | None:
    return result.seconds(role, n) if panel == "time" else result.peak(role, n)


def _draw_panel(
    figure: go.Figure, traces: Traces, result: FlashAttentionResult, past: list[FlashAttentionResult], panel: str
) -> tuple[float, float]:
    """Curves, chosen and earlier points of one panel; the least and the most of all, 0 where there are none."""
    n, every = result.params.seq_len, []
    for role in ROLES:
        curve = [(at, value) for at in result.lengths if (value := _value(result, role, panel, at))]
        now = [(at, value) for at, value in curve if at == n]
        old = [(r, value) for r in past if (value := _value(r, role, panel, r.params.seq_len))]
        for name, points in ((f"{role} curve {panel}", curve), (f"{role} {panel}", now)):
            hover = [_hover(result, role, panel, at) for at, _ in points]
            traces[name].update(x=[at for at, _ in points], y=[value for _, value in points], hovertext=hover)
        traces[f"earlier {role} {panel}"].update(
            x=[r.params.seq_len for r, _ in old],
            y=[value for _, value in old],
            hovertext=[_hover(r, role, panel, r.params.seq_len) for r, _ in old],
        )
        every += [value for _, value in (*curve, *old)]
    return (min(every), max(every)) if every else (0, 0)


def _hover(result: FlashAttentionResult, role: str, panel: str, n: int) -> str:
    p, value = result.params.at(n), _value(result, role, panel, n)
    blocks = f", blocks of {p.block_size}" if role == "own" else ""
    shown = duration(value) if panel == "time" else si(value, "B")
    return f"<b>{p.implementation(role)}{blocks}: {shown}</b><br>{setting(p)}; MEASURED"


def _draw_floor(figure: go.Figure, traces: Traces, result: FlashAttentionResult) -> None:
    """The least time that the roof allows for exact attention: each byte once, and the pairs that are seen."""
    if result.ceilings:
        lengths, p = list(figure.layout.xaxis.tickvals), result.params
        floors = [time_floor(costs(p.at(n), "native"), result.ceilings, p.dtype) for n in lengths]
        traces["floor"].update(x=lengths, y=floors)


def _draw_memory_limits(figure: go.Figure, traces: Traces, result: FlashAttentionResult) -> float:
    lengths = list(figure.layout.xaxis.tickvals)
    for role, name in (("standard", "n²"), ("native", "n")):
        values = [predicted_peak(result.params.at(n), role) for n in lengths]
        traces[f"{role} formula"].update(x=lengths, y=values, text=[name if n == lengths[2] else "" for n in lengths])
    free = result.free_bytes
    ends = [lengths[0] / 1.3, lengths[-1] * 4.5]
    traces["free memory"].update(x=ends, y=[free, free], text=[f" free memory {si(free, 'B')}", ""])
    return free


def _set_range(
    figure: go.Figure, traces: Traces, result: FlashAttentionResult, panel: str, low: float, high: float
) -> None:
    """The axis from `low` to `high`, and beside the chosen points what they are, apart from one another."""
    axis, unit = ("yaxis", "s") if panel == "time" else ("yaxis2", "bytes")
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = {"tickvals": [10.0**p for p in powers], "ticktext": [readable(10.0**p, unit) for p in powers]}
    figure.layout[axis].update(range=log_range(low, high), **ticks)
    n = result.params.seq_len
    shown = {role: value for role in ROLES if (value := _value(result, role, panel, n))}
    say = duration if panel == "time" else lambda value: si(value, "B")
    places = spread([math.log10(value) for value in shown.values()], _APART * math.log10(high / low))
    traces[f"labels {panel}"].update(
        x=[n * 1.35] * len(shown),
        y=[10.0**place for place in places],
        text=[f"<b>{say(value)}</b>" for value in shown.values()],
        textfont={"color": [colour(role) for role in shown]},
    )
