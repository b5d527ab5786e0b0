"""How `sampling_lab` draws a result: the next token's distribution, and acceptance over temperature."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.labs._figures import BLUE, COLOURS, INK, MUTED, SILVER, TEMPLATE
from labkit.labs._sampling_forms import drafting, setting
from labkit.labs._sampling_result import FILTERS, HOTTEST, Likely, SamplingResult
from labkit.labs._sampling_steps import SHOWN
from labkit.labs._speculative_figure import SYMBOLS
from labkit.labs._speculative_forms import percent
from labkit.labs._speculative_tokens import visible

Traces = Mapping[str, BaseTraceType]
_HOVER = "%{hovertext}<extra></extra>"
_OWN = SILVER
_LONGEST = 16
# The axis of acceptance reaches at least so high.
_LOWEST_TOP = 0.6
# What the words beside a point take of the axis of temperature, with half of an earlier point's mark.
_ROOM = 0.5
_BARS = {
    "own": ({"color": _OWN}, -0.4, "the model's own (temperature 1)"),
    "drawn": ({"color": BLUE}, 0.0, "as drawn at this setting"),
    "cut": (
        {
            "color": "white",
            "line": {"color": MUTED, "width": 1},
            "pattern": {"shape": "/", "fgcolor": MUTED, "size": 5},
        },
        0.0,
        "cut: had at this temperature",
    ),
}
_THEORY = {"symbol": "line-ew", "size": 34, "line": {"width": 4, "color": INK}}
_OLD_THEORY = {"symbol": "line-ew", "size": 16, "line": {"width": 2, "color": INK}}


def build_figure() -> go.Figure:
    """The empty figure."""
    titles = ("The token after the prompt", "Acceptance over temperature")
    figure = make_subplots(cols=2, column_widths=[0.54, 0.46], horizontal_spacing=0.11, subplot_titles=titles)
    where = {"row": 1, "col": 1}
    for name, (marker, offset, _) in _BARS.items():
        bars = {"orientation": "h", "width": 0.4, "offset": offset, "showlegend": False, "hovertemplate": _HOVER}
        figure.add_bar(name=name, marker=marker, **bars, **where)
    words = {"mode": "text", "textposition": "middle right", "textfont": {"size": 13}, "cliponaxis": False}
    figure.add_scatter(name="words", showlegend=False, hoverinfo="skip", **words, **where)
    _add_acceptance(figure)
    _add_legend(figure)
    figure.update_layout(
        template=TEMPLATE, height=580, barmode="overlay", margin={"l": 135, "r": 15, "t": 40, "b": 150}
    )
    figure.update_annotations(font_size=16)
    figure.update_xaxes(title={"text": "Probability", "standoff": 4}, tickformat=".0%", row=1, col=1)
    figure.update_yaxes(showgrid=False, ticks="", range=(SHOWN + 0.6, -0.6), **where)
    figure.update_xaxes(title={"text": "Temperature", "standoff": 4}, range=(-0.08, HOTTEST + 0.08), row=1, col=2)
    figure.update_yaxes(title={"text": "Drafted tokens accepted", "standoff": 2}, row=1, col=2)
    figure.update_yaxes(tickformat=".0%", range=(0, _LOWEST_TOP), row=1, col=2)
    return figure


def _add_acceptance(figure: go.Figure) -> None:
    where = {"row": 1, "col": 2, "showlegend": False}
    figure.add_scatter(name="curve", mode="lines", line={"width": 2, "dash": "dot"}, hoverinfo="skip", **where)
    figure.add_scatter(name="earlier", mode="markers", hovertemplate=_HOVER, **where)
    figure.add_scatter(name="earlier theory", mode="markers", marker=_OLD_THEORY, hoverinfo="skip", **where)
    error = {"type": "data", "thickness": 2, "width": 6, "color": INK}
    now = {"marker": {"size": 17, "line": {"width": 2, "color": INK}}, "error_y": error, "textfont": {"size": 16}}
    figure.add_scatter(name="theory", mode="markers", marker=_THEORY, hovertemplate=_HOVER, **where)
    figure.add_scatter(name="now", mode="markers+text", hovertemplate=_HOVER, **now, **where)


def _add_legend(figure: go.Figure) -> None:
    """Bars and points that are nowhere, so that the legend says what they stand for."""
    for name, (marker, _, meaning) in _BARS.items():
        figure.add_bar(x=[None], y=[None], name=meaning, legendgroup=name, marker=marker, row=1, col=1)
    nowhere = {"x": [None], "y": [None], "mode": "markers", "row": 1, "col": 2}
    for symbol, meaning in (("circle", "accepted, nothing cut"), ("circle-open", "accepted, with top_k or top_p")):
        figure.add_scatter(name=meaning, marker={"size": 12, "color": MUTED, "symbol": symbol}, **nowhere)
    figure.add_scatter(name="Σ min(p, q), MODELLED", marker=_OLD_THEORY, **nowhere)


def draw(figure: go.Figure, result: SamplingResult, earlier: Sequence[SamplingResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded points, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    _draw_bars(figure, traces, result)
    past = [r for r in {r.params: r for r in earlier if r.params != result.params}.values() if r.alpha is not None]
    _draw_points(traces, result, past)
    highest = max((r.alpha + r.alpha_error for r in (*past, result) if r.alpha is not None), default=0)
    figure.layout.yaxis2.range = (0, min(1.03, max(_LOWEST_TOP, 1.15 * highest)))


def _draw_bars(figure: go.Figure, traces: Traces, result: SamplingResult) -> None:
    said = result.next_token
    shown = [*said.likeliest, said.others]
    places = list(range(len(shown)))
    lengths = {
        "own": [one.own for one in shown],
        "drawn": [one.drawn for one in shown],
        "cut": [one.uncut if one.cut else 0.0 for one in shown],
    }
    for name, values in lengths.items():
        traces[name].update(x=values, y=places, hovertext=[_bar_hover(one) for one in shown])
    longest = max(max(values) for values in lengths.values())
    ends = [max(one.drawn, lengths["cut"][place]) for place, one in zip(places, shown, strict=True)]
    traces["words"].update(x=ends, y=[place + 0.2 for place in places], text=[f" {_word(one)}" for one in shown])
    more = f"{said.vocab_size - len(said.likeliest):,} others"
    names = [*(_name(one.text) for one in said.likeliest), f"<i>{more}</i>"]
    figure.layout.yaxis.update(tickvals=places, ticktext=names)
    figure.layout.xaxis.range = (0, 1.22 * longest)


def _word(one: Likely) -> str:
    if one.cut in FILTERS:
        return f'<span style="color:{MUTED}">cut by {one.cut}</span>'
    return percent(one.drawn)


def _name(text: str) -> str:
    """As it stands on the axis: escaped, with blanks that can be seen."""
    seen = visible(text)
    return html.escape(seen if len(seen) <= _LONGEST else f"{seen[: _LONGEST - 1]}…", quote=False)


def _bar_hover(one: Likely) -> str:
    name = f"<b>{html.escape(visible(one.text), quote=False) or 'all others'}</b>"
    cut = f", cut by {one.cut}" if one.cut in FILTERS else ""
    own, uncut = f"the model's own: {one.own:.2%}", f"at this temperature, nothing cut: {one.uncut:.2%}"
    return f"{name}; MEASURED<br>{own}<br>{uncut}<br>as drawn: {one.drawn:.2%}{cut}"


def _symbol(result: SamplingResult) -> str:
    return SYMBOLS[result.params.proposer] + ("-open" if result.params.cuts else "")


def _draw_points(traces: Traces, result: SamplingResult, past: Sequence[SamplingResult]) -> None:
    # Those of the same top_k and top_p stand out, and are joined.
    near = [r.params.same_but_temperature == result.params.same_but_temperature for r in past]
    opacity = [0.8 if one else 0.4 for one in near]
    at = {"x": [r.params.temperature for r in past]}
    looks = {"color": [COLOURS[r.params.proposer] for r in past], "symbol": [_symbol(r) for r in past], "size": 11}
    traces["earlier"].update(y=[r.alpha for r in past], hovertext=[_hover(r) for r in past], **at)
    traces["earlier"].marker.update(opacity=opacity, line={"width": 2}, **looks)
    traces["earlier theory"].update(y=[r.expected_alpha for r in past], **at)
    traces["earlier theory"].marker.opacity = opacity
    now = [result] if result.alpha is not None else []
    curve = sorted([*(r for r, one in zip(past, near, strict=True) if one), *now], key=lambda r: r.params.temperature)
    colour = COLOURS[result.params.proposer]
    traces["curve"].update(x=[r.params.temperature for r in curve], y=[r.alpha for r in curve], line={"color": colour})
    here, hover = {"x": [r.params.temperature for r in now]}, [_hover(r) for r in now]
    traces["theory"].update(y=[r.expected_alpha for r in now], hovertext=hover, **here)
    traces["now"].update(
        y=[r.alpha for r in now], text=[f"<b>  {r.alpha:.0%}  </b>" for r in now], hovertext=hover, **here
    )
    traces["now"].update(marker={"color": colour, "symbol": _symbol(result)})
    traces["now"].error_y.array = [r.alpha_error for r in now]
    traces["now"].textposition = _free_side(result.params.temperature, at["x"])


def _free_side(temperature: float, past: Sequence[float]) -> str:
    """Beside the point and its own bar, where neither the axis ends nor an earlier point stands."""
    inner, outer = ("right", 1), ("left", -1)
    if temperature > HOTTEST / 2:
        inner, outer = outer, inner
    for side, sign in (inner, outer):
        inside = 0 <= temperature + sign * _ROOM <= HOTTEST
        if inside and not any(0 < sign * (other - temperature) < _ROOM for other in past):
            return f"middle {side}"
    return f"middle {inner[0]}"


def _hover(result: SamplingResult) -> str:
    theory = f"Σ min(p, q) {percent(result.expected_alpha)}; MODELLED"
    measured = f"<b>{percent(result.alpha)} accepted</b>; MEASURED"
    return f"{measured}<br>{setting(result.params)}<br>{drafting(result.params)}<br>{theory}"
