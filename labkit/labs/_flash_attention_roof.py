"""The right panel of `flash_attention_lab`: useful FLOP/s over FLOPs a byte, under this machine's measured roof."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit.labs._figures import COLOURS, INK, log_range, named_line
from labkit.labs._flash_attention_costs import ROLES, moved_bytes
from labkit.labs._flash_attention_forms import setting, share
from labkit.labs._flash_attention_result import FlashAttentionResult
from labkit.labs._result import si
from labkit.roofline import attainable_flops, ridge

Traces = Mapping[str, BaseTraceType]
# Of a role in every panel.
SYMBOLS = {"standard": "circle", "native": "diamond", "own": "square"}
_HOVER = "%{hovertext}<extra></extra>"


def add_roof(figure: go.Figure, col: int) -> None:
    """Empty traces: the roof, each role's point, earlier ones."""
    where = {"row": 1, "col": col, "showlegend": False}
    line = {"color": COLOURS["ceiling"], "width": 3}
    figure.add_scatter(name="roof", line=line, hoverinfo="skip", **named_line("top left"), **where)
    for role in ROLES:
        marker = {"symbol": SYMBOLS[role], "color": COLOURS[f"{role} attention"]}
        faded = {"size": 9, "opacity": 0.35, "line_width": 0, **marker}
        figure.add_scatter(name=f"earlier {role} rate", mode="markers", marker=faded, hovertemplate=_HOVER, **where)
        now = {"size": 16, "line": {"width": 2, "color": INK}, **marker}
        figure.add_scatter(name=f"{role} rate", mode="markers", marker=now, hovertemplate=_HOVER, **where)
    title = {"text": "FLOP a byte moved", "standoff": 4}
    figure.update_xaxes(title=title, type="log", dtick=1, row=1, col=col)
    figure.update_yaxes(type="log", row=1, col=col)


def intensity(result: FlashAttentionResult, role: str) -> float:
    """FLOPs of the pairs that are seen over the bytes that this role moves: MODELLED."""
    return result.needed_flops / moved_bytes(result.params, role)


def draw_roof(
    figure: go.Figure, traces: Traces, result: FlashAttentionResult, past: Sequence[FlashAttentionResult]
) -> None:
    """Points stand where they are as soon as there is a time; the roof once it is measured."""
    shown, every = [*past, result], []
    for role in ROLES:
        for name, results in ((f"earlier {role} rate", past), (f"{role} rate", [result])):
            timed = [r for r in results if r.rate(role)]
            points = [(intensity(r, role), r.rate(role)) for r in timed]
            hover = [_hover(r, role) for r in timed]
            traces[name].update(x=[x for x, _ in points], y=[y for _, y in points], hovertext=hover)
            every += points
    roofs = [r.ceilings for r in shown if r.ceilings]
    if not every or not roofs:
        return
    _draw_lines(figure, traces, result.params.dtype, roofs[-1], every)


def _draw_lines(figure: go.Figure, traces: Traces, dtype: str, ceilings: object, points: list) -> None:
    at = ridge(ceilings, dtype)
    left, right = min(at, *(x for x, _ in points)) / 5, max(at, *(x for x, _ in points)) * 6
    peak = attainable_flops(right, ceilings, dtype)
    low, high = min(y for _, y in points) / 3, max(peak, *(y for _, y in points)) * 3
    ends = [left, at, right]
    # Of both parts over the flat one: no point comes there, while beside the slope there may be any.
    name = f"slope: {si(ceilings.read_bandwidth, 'B/s')} <br>flat: {si(peak, 'FLOP/s')} "
    traces["roof"].update(x=ends, y=[attainable_flops(x, ceilings, dtype) for x in ends], text=["", "", name])
    figure.layout.xaxis3.range = log_range(left, right)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = {"tickvals": [10.0**p for p in powers], "ticktext": [si(10.0**p, "", 1) for p in powers]}
    figure.layout.yaxis3.update(range=log_range(low, high), **ticks)


def _hover(result: FlashAttentionResult, role: str) -> str:
    p, rate, roof = result.params, result.rate(role), result.attainable(role)
    blocks = f", blocks of {p.block_size}" if role == "own" else ""
    of = f", {share(rate / roof)} of what the roof allows" if roof else ""
    line = f"<b>{p.implementation(role)}{blocks}: {si(rate, 'FLOP/s')}</b>{of}<br>{setting(p)}"
    return f"{line}<br>{intensity(result, role):.3g} FLOP a byte moved; MODELLED"
