"""How `eviction_lab` draws a result: which tokens are held, needles found over budget, perplexity over budget."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.labs._eviction_forms import NAMES, SINKS, budget_text, plain, setting
from labkit.labs._eviction_result import BUDGETS, FULL, METHODS, EvictionResult, Kept, Span
from labkit.labs._figures import COLOURS, FAINT, INK, MUTED, TEMPLATE, log_range, named_line

Traces = Mapping[str, BaseTraceType]
SYMBOLS = {"full": "cross", "window": "square", "sinks": "diamond", "heavy_hitters": "circle", "snapkv": "triangle-up"}
FORGETFUL = tuple(method for method in METHODS if method != FULL)
_HOVER = "%{hovertext}<extra></extra>"
_BUDGET_AXIS = (0.052, 1.2)
# Methods that found as many stand beside each other and not on each other: by this much on the logarithmic axis.
_APART = 0.045
# The name of the line of all tokens, at the axis' left end, reaches about so far.
_LEFT = 0.15
# Perplexity over all tokens': the axis, which grows with its points, and the most that it holds.
_BOTTOM, _LEAST_TOP, _MOST_TOP = 0.88, 2.0, 40.0
_TICKS = (1, 1.2, 1.5, 2, 3, 5, 10, 20, 30)


def build_figure() -> go.Figure:
    """The empty figure: the prompt above; below it needles and perplexity, each over the budget."""
    titles = ("Which tokens of one prompt the cache holds", "Needles found", "Perplexity, times that of all tokens")
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        row_heights=[0.46, 0.54],
        horizontal_spacing=0.09,
        vertical_spacing=0.2,
        subplot_titles=titles,
    )
    for note in figure.layout.annotations:
        note.name = "title"
    figure.layout.annotations[0].yshift = 22  # above the names of what is marked
    bar = {"len": 0.46, "y": 1.02, "yanchor": "top", "thickness": 14, "tickfont_size": 13}
    bar["title"] = {"text": "KV heads<br>that hold it", "font_size": 13}
    hover = "token %{x}, layer %{y}: <b>%{customdata}</b><br>held by %{z} KV heads<extra></extra>"
    figure.add_heatmap(name="kept", hovertemplate=hover, colorbar=bar, zmin=0, row=1, col=1)
    for column, name in ((1, "needles"), (2, "perplexity")):
        _add_points(figure, name, {"row": 2, "col": column, "showlegend": False})
    for method in METHODS:
        marker = {"size": 12, "color": colour(method), "symbol": SYMBOLS[method]}
        figure.add_scatter(name=NAMES[method], x=[None], y=[None], mode="markers", marker=marker, row=2, col=1)
    _lay_out(figure)
    return figure


def _add_points(figure: go.Figure, name: str, where: dict[str, object]) -> None:
    """The line of all tokens, a faded curve a method, and the setting at hand."""
    look = {"textfont": {"color": MUTED, "size": 13}, "hoverinfo": "skip", **named_line()}
    dashed = {"color": COLOURS["float"], "width": 2, "dash": "dash"}
    figure.add_scatter(name=f"all tokens' {name}", line=dashed, **look, **where)
    for method in FORGETFUL:
        marker = {"size": 10, "symbol": SYMBOLS[method]}
        look = {"mode": "lines+markers", "marker": marker, "line": {"color": colour(method), "width": 2}}
        figure.add_scatter(name=f"{method}'s {name}", opacity=0.5, hovertemplate=_HOVER, **look, **where)
    look = {"mode": "markers+text", "textposition": "top center", "textfont": {"size": 14, "color": INK}}
    figure.add_scatter(name=name, marker={"size": 16, "line": {"width": 2, "color": INK}}, **look, **where)
    figure.data[-1].hovertemplate = _HOVER


def colour(method: str) -> str:
    """Each method's own; that of what loses nothing for all tokens."""
    return COLOURS["float" if method == FULL else NAMES[method]]


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(template=TEMPLATE, height=720, margin={"l": 70, "r": 15, "t": 62, "b": 95})
    figure.update_annotations(font_size=16)
    title = {"text": "Position in the text (tokens)", "standoff": 4}
    figure.update_xaxes(title=title, showgrid=False, row=1, col=1)
    figure.update_yaxes(title="Layer", showgrid=False, autorange="reversed", row=1, col=1)
    ticks = {"tickvals": list(BUDGETS), "ticktext": [budget_text(budget) for budget in BUDGETS]}
    title = {"text": "Budget: share of the tokens that is held", "standoff": 4}
    figure.update_xaxes(title=title, type="log", range=log_range(*_BUDGET_AXIS), **ticks, row=2)
    figure.update_yaxes(title="Prompts", row=2, col=1)
    shown = {"tickvals": list(_TICKS), "ticktext": [f"{tick:g}x" for tick in _TICKS]}
    figure.update_yaxes(type="log", range=log_range(_BOTTOM, _LEAST_TOP), **shown, row=2, col=2)


def draw(figure: go.Figure, result: EvictionResult, earlier: Sequence[EvictionResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded curves, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    past = list({(r.params.method, r.params.held): r for r in earlier}.values())
    _draw_kept(figure, traces["kept"], result)
    _draw_needles(figure, traces, result, past)
    _draw_perplexity(figure, traces, result, past)


def _draw_kept(figure: go.Figure, trace: BaseTraceType, result: EvictionResult) -> None:
    kept = result.kept
    layers, seen, most = len(kept.heads), len(kept.tokens), kept.num_key_value_heads
    # Plotly reads tags and entities in what a text or a model says.
    words = [html.escape(repr(token)[1:-1].strip()) or "space" for token in kept.tokens]
    trace.update(
        x=list(range(seen)),
        y=list(range(layers)),
        z=[list(layer) for layer in kept.heads],
        customdata=[words] * layers,
        zmax=most,
        colorscale=[[0, FAINT], [1, colour(result.params.method)]],
    )
    trace.colorbar.tickvals = sorted({0, *range(0, most + 1, max(1, most // 4)), most})
    figure.layout.xaxis.range = (-1.5, seen + 0.5)
    figure.layout.shapes = [_outline(span, width, shade) for span, width, shade, _, _ in _marks(kept)]
    notes = [note for note in figure.layout.annotations if note.name == "title"]
    figure.layout.annotations = notes + [_name(*mark) for mark in _marks(kept) if mark[3]]


def _marks(kept: Kept) -> list[tuple[Span, int, str, str, str]]:
    """What is outlined in the map: tokens, the line's width and colour, name, and which of its ends that is flush
    with."""
    needle, in_left_half = kept.needle, kept.needle.start < len(kept.tokens) / 2
    said = f"needle: the number is <b>{html.escape(kept.answer)}</b>"
    return [
        (Span(0, SINKS), 2, MUTED, "sinks", "left"),
        (kept.question, 2, MUTED, "question", "right"),
        (needle, 2, INK, said, "left" if in_left_half else "right"),
        (kept.digits, 4, INK, "", ""),
    ]


def _outline(span: Span, width: int, shade: str) -> dict[str, object]:
    edges = {"x0": span.start - 0.5, "x1": span.end - 0.5, "xref": "x", "y0": 0, "y1": 1, "yref": "y domain"}
    return {"type": "rect", "line": {"width": width, "color": shade}, **edges}


def _name(span: Span, _: int, shade: str, text: str, anchor: str) -> dict[str, object]:
    at = span.start - 0.5 if anchor == "left" else span.end - 0.5
    place = {"x": at, "xref": "x", "y": 1, "yref": "y domain", "xanchor": anchor, "yanchor": "bottom"}
    return {"name": "mark", "text": text, "showarrow": False, "font": {"size": 13, "color": shade}, **place}


def _draw_needles(figure: go.Figure, traces: Traces, result: EvictionResult, past: list[EvictionResult]) -> None:
    past, now = [r for r in past if r.needles], [result] if result.needles else []
    of = len(result.depths)
    full = next((r.full_needles for r in (*now, *reversed(past)) if r.full_needles), None)
    if full:
        _draw_line(traces["all tokens' needles"], full.count, f"all tokens: {full.count} of {full.tried}", now)
    _curves(traces, "needles", past, now, lambda r: r.needles.count, apart=_APART)
    words = [f"{r.needles.count} of {r.needles.tried}{'' if r.needles.firm else ' so far'}" for r in now]
    traces["needles"].text = words
    figure.layout.yaxis2.update(range=(-0.07 * of, 1.18 * of), dtick=max(1, of // 5))


def _draw_perplexity(figure: go.Figure, traces: Traces, result: EvictionResult, past: list[EvictionResult]) -> None:
    past, now = [r for r in past if r.quality], [result] if result.quality else []
    highest = max([_LEAST_TOP, *(1.3 * r.quality.ratio for r in (*past, *now))])
    top = min(_MOST_TOP, highest)
    _curves(traces, "perplexity", past, now, lambda r: min(r.quality.ratio, 0.85 * top))
    traces["perplexity"].text = [f"{r.quality.ratio:.3g}x ({plain(r.quality.perplexity)})" for r in now]
    name = f"all tokens: {plain(now[0].quality.baseline)}" if now else "all tokens"
    _draw_line(traces["all tokens' perplexity"], 1, name, now)
    figure.layout.yaxis3.range = log_range(_BOTTOM, top)


def _draw_line(trace: BaseTraceType, y: float, name: str, now: list[EvictionResult]) -> None:
    """The line of all tokens, with its name at the end that the setting at hand leaves free for its own words."""
    at_right = bool(now) and now[0].params.held <= _LEFT
    ends, side = (_BUDGET_AXIS[::-1], "left") if at_right else (_BUDGET_AXIS, "right")
    trace.update(x=[*ends], y=[y, y], text=[f" {name} ", ""], textposition=f"top {side}")


def _curves(
    traces: Traces,
    name: str,
    past: list[EvictionResult],
    now: list[EvictionResult],
    value: Callable[[EvictionResult], float],
    *,
    apart: float = 0.0,
) -> None:
    """A faded curve a method through the budgets tried, and the setting at hand on its own."""

    def points(results: list[EvictionResult]) -> dict[str, object]:
        shift = {method: math.exp(apart * (i - 1.5)) for i, method in enumerate(FORGETFUL)} | {FULL: 1.0}
        return {
            "x": [r.params.held * shift[r.params.method] for r in results],
            "y": [value(r) for r in results],
            "hovertext": [_hover(r) for r in results],
        }

    # The setting at hand in place of what it came out as before.
    tried = {(r.params.method, r.params.held): r for r in (*past, *now)}.values()
    for method in FORGETFUL:
        mine = sorted((r for r in tried if r.params.method == method), key=lambda r: r.params.held)
        traces[f"{method}'s {name}"].update(**points(mine), marker_color=colour(method))
    looks = {"color": [colour(r.params.method) for r in now], "symbol": [SYMBOLS[r.params.method] for r in now]}
    traces[name].update(**points(now), marker=looks)
    # Within the panel at both of its ends, beyond which words are cut off.
    sides = {max(BUDGETS): "middle left", min(BUDGETS): "top right"}
    traces[name].textposition = sides.get(now[0].params.held if now else None, "top center")


def _hover(result: EvictionResult) -> str:
    found = [f"<b>{setting(result.params)}</b>"]
    if needles := result.needles:
        found.append(f"{needles.count} of {needles.tried} needles found")
    if quality := result.quality:
        found.append(f"perplexity {plain(quality.perplexity)}, all tokens {plain(quality.baseline)}")
    return "<br>".join([*found, "MEASURED"])
