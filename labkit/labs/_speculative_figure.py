"""How `speculative_lab` draws a result: speed-up over the draft's length, and where the time of one call goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.labs._figures import COLOURS, INK, TEMPLATE, named_line
from labkit.labs._speculative_call import add_call, draw_call
from labkit.labs._speculative_forms import faster, folk_text, setting, times
from labkit.labs._speculative_result import EAGLE, ITSELF, LOOKUP, MOST_DRAFTED, SpeculativeResult

Traces = Mapping[str, BaseTraceType]
SYMBOLS = {EAGLE: "circle", LOOKUP: "diamond", ITSELF: "square"}
_HOVER = "%{hovertext}<extra></extra>"
_LINES = {
    "time model": {"color": INK, "width": 3, "dash": "dash"},
    "free drafts": {"color": COLOURS["free drafts"], "width": 2, "dash": "dot"},
    "folk claim": {"color": COLOURS["folk claim"], "width": 2, "dash": "dashdot"},
}
_MEANING = {
    "time model": "time model E/(γc + v)",
    "free drafts": "E: drafts and verifying for free",
    "folk claim": "folk claim 1/(1 − α): endless, for free",
}
_LEFT, _RIGHT = -0.55, MOST_DRAFTED + 0.6
# Where the line of 1x is named if neither side of its left end is free; what is named there reaches as far as _MIDDLE.
_FROM, _MIDDLE, _EVEN = 1.5, 4, "plain decoding, 1x"
# The axis reaches at least so high, and at most: with a draft that is always right E alone comes to 9.
_LOWEST_TOP, _HIGHEST_TOP = 2.4, 4.5


def build_figure() -> go.Figure:
    """The empty figure: speed-up over draft length, and one call."""
    titles = ("Speed-up over plain decoding", "Time of one call")
    figure = make_subplots(cols=2, column_widths=[0.58, 0.42], horizontal_spacing=0.13, subplot_titles=titles)
    where = {"row": 1, "col": 1, "showlegend": False}
    even = {"line": {"color": COLOURS["ceiling"], "width": 2}, "hoverinfo": "skip", "textfont": {"size": 14}}
    words = {"x": [_LEFT, _FROM, _RIGHT], "y": [1, 1, 1], "text": [_EVEN, "", ""]}
    figure.add_scatter(name="even", **even, **words, **named_line("bottom right"), **where)
    for name, line in _LINES.items():
        look = named_line() if name == "folk claim" else {"mode": "lines"}
        figure.add_scatter(name=name, line=line, textfont={"size": 14, "color": line["color"]}, **look, **where)
    figure.add_scatter(name="earlier", mode="markers", hovertemplate=_HOVER, **where)
    spread = {"type": "data", "symmetric": False, "thickness": 2, "width": 6, "color": INK}
    now = {"marker": {"size": 18, "line": {"width": 2, "color": INK}}, "error_y": spread, "textfont": {"size": 16}}
    figure.add_scatter(
        name="speed-up", mode="markers+text", hovertemplate=_HOVER, textposition="top right", **now, **where
    )
    add_call(figure, col=2)
    _add_legend(figure)
    figure.update_layout(template=TEMPLATE, height=500, barmode="stack", margin={"l": 65, "r": 15, "t": 40, "b": 125})
    figure.update_annotations(font_size=16)
    ticks = {"tickvals": list(range(MOST_DRAFTED + 1)), "range": (-0.6, _RIGHT)}
    figure.update_xaxes(title={"text": "Draft length γ", "standoff": 4}, **ticks, row=1, col=1)
    figure.update_yaxes(ticksuffix="x", range=(0, _LOWEST_TOP), row=1, col=1)
    return figure


def _add_legend(figure: go.Figure) -> None:
    """Points and lines that are nowhere, so that the legend says what they stand for."""
    nowhere = {"x": [None], "y": [None], "row": 1, "col": 1}
    for proposer, symbol in SYMBOLS.items():
        look = {"size": 12, "symbol": symbol, "color": COLOURS[proposer]}
        figure.add_scatter(name=f"measured, {proposer}", mode="markers", marker=look, **nowhere)
    for name, meaning in _MEANING.items():
        figure.add_scatter(name=meaning, mode="lines", line=_LINES[name], **nowhere)


def draw(figure: go.Figure, result: SpeculativeResult, earlier: Sequence[SpeculativeResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded points, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    past = [r for r in {r.params: r for r in earlier if r.params != result.params}.values() if r.speedup]
    _draw_points(traces, result, past)
    top = _draw_lines(traces, result, [r.speedup for r in (*past, result) if r.speedup])
    figure.layout.yaxis.range = (0, top)
    draw_call(figure, traces, result)


def _draw_points(traces: Traces, result: SpeculativeResult, past: Sequence[SpeculativeResult]) -> None:
    # Those that the present curve is of stand out from those of other settings.
    near = [r.params.same_but_length == result.params.same_but_length for r in past]
    traces["earlier"].update(
        x=[r.params.num_assistant_tokens for r in past],
        y=[r.speedup for r in past],
        hovertext=[_hover(r) for r in past],
        marker={
            "size": 11,
            "opacity": [0.6 if one else 0.25 for one in near],
            "color": [COLOURS[r.params.proposer] for r in past],
            "symbol": [SYMBOLS[r.params.proposer] for r in past],
        },
    )
    p, now = result.params, result.speedup
    look = {"color": COLOURS[p.proposer], "symbol": SYMBOLS[p.proposer]}
    shown = traces["speed-up"]
    shown.update(x=[p.num_assistant_tokens] if now else [], y=[now] if now else [], marker=look)
    shown.update(text=[f"<b> {times(now)}</b>"] if now else [], hovertext=[_hover(result)] if now else [])
    low, high = (result.speedups[0], result.speedups[-1]) if now else (0, 0)
    shown.error_y.update(array=[high - now] if now else [], arrayminus=[now - low] if now else [])


def _hover(result: SpeculativeResult) -> str:
    alpha = f", α {result.alpha:.2f}" if result.alpha is not None else ""
    made = f"{result.tokens_a_call:.2f} tokens a call"
    return f"<b>{faster(result.speedup)}</b>; MEASURED<br>{setting(result.params)}<br>{made}{alpha}"


def _draw_lines(traces: Traces, result: SpeculativeResult, measured: Sequence[float]) -> float:
    """The curves of this setting's α, c and v, and the folk claim; returns the axis' upper end."""
    lengths = list(range(MOST_DRAFTED + 1))
    curves = {"time model": [result.model(n) for n in lengths], "free drafts": [result.formula(n) for n in lengths]}
    for name, values in curves.items():
        known = [(n, value) for n, value in zip(lengths, values, strict=True) if value is not None]
        known = known if len(known) > 1 else []
        traces[name].update(x=[n for n, _ in known], y=[value for _, value in known])
    _name_even(traces["even"], result)
    reach = [value for values in curves.values() for value in values if value is not None]
    top = min(max(_LOWEST_TOP, 1.12 * max(reach, default=0)), _HIGHEST_TOP)
    top = max([top, *(1.15 * value for value in measured)])
    _draw_folk(traces["folk claim"], result, top)
    return top


def _name_even(trace: BaseTraceType, result: SpeculativeResult) -> None:
    """Under its left end, unless the time model falls through there, as E rises above it; then over the line, on the
    half where the setting at hand is not."""
    if (result.model(1) or 1) >= 1:
        trace.update(text=[_EVEN, "", ""], textposition="bottom right")
    elif result.params.num_assistant_tokens <= _MIDDLE:
        trace.update(text=["", "", f"{_EVEN} "], textposition="top left")
    else:
        trace.update(text=["", _EVEN, ""], textposition="top right")


def _draw_folk(trace: BaseTraceType, result: SpeculativeResult, top: float) -> None:
    """Where it would lie, or at the top edge where that is beyond the axis."""
    folk = result.folk
    if folk is None or result.params.num_assistant_tokens == 0:
        trace.update(x=[], y=[], text=[])
        return
    beyond = folk > 0.93 * top
    word = f" folk claim: {folk_text(folk)}" + (" (beyond the axis)" if math.isinf(folk) or folk > top else "")
    at = 0.93 * top if beyond else folk
    trace.update(x=[-0.6, _RIGHT], y=[at, at], text=[word, ""])
