"""How `stack_lab` draws a result: a row a set of rungs, with its tokens a second under their ceiling and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.engine.ladder import RUNGS
from labkit.labs._figures import COLOURS, INK, MUTED, SILVER, TEMPLATE
from labkit.labs._flash_attention_forms import times
from labkit.labs._result import si
from labkit.labs._stack_forms import setting
from labkit.labs._stack_result import Sizes, StackResult
from labkit.labs.ladder_chart import RUNG_COLOURS

Traces = Mapping[str, BaseTraceType]
_SHORT = {"step": "own step", "bfloat16": "bfloat16", "int8": "INT8", "int4": "INT4", "int8_head": "INT8 head"}
_SHORT |= {"attention": "attention", "quantized_kv": "INT8 KV", "speculation": "speculation"}
_HOVER = "%{hovertext}<extra></extra>"
# The baseline, the set at hand, and those before it.
_MOST_ROWS, _FEWEST_ROWS = 9, 5
_FADED = 0.35
# Words stand over their bar.
_BAR, _OVER = 0.42, 0.36


def colour(rungs: Sequence[str]) -> str:
    """Of the rung that was put on last; the head's is that of other INT8 weights, in a shape of its own."""
    return COLOURS[RUNG_COLOURS[rungs[-1] if rungs else ""]]


def build_figure() -> go.Figure:
    """The empty figure: rungs, speed and memory side by side, over the same rows."""
    titles = ("Rungs that are on", "Tokens a second", "Memory at the peak")
    widths = {"column_widths": [0.26, 0.45, 0.29], "horizontal_spacing": 0.03}
    figure = make_subplots(cols=3, shared_yaxes=True, subplot_titles=titles, **widths)
    where = {"row": 1, "col": 1, "showlegend": False, "mode": "markers"}
    figure.add_scatter(name="off", marker={"size": 6, "color": SILVER}, hoverinfo="skip", **where)
    figure.add_scatter(name="on", marker={"size": 15}, hovertemplate=_HOVER, **where)
    refused = {"size": 11, "symbol": "x-thin", "line": {"width": 3, "color": INK}}
    figure.add_scatter(name="refused", marker=refused, hovertemplate=_HOVER, **where)
    bars = {"orientation": "h", "width": _BAR, "hovertemplate": _HOVER, "showlegend": False}
    figure.add_bar(name="speed", **bars, row=1, col=2)
    figure.add_bar(name="weights", **bars, row=1, col=3)
    figure.add_bar(name="rest", **bars, row=1, col=3)
    for name, look in _marks().items():
        figure.add_scatter(name=name, marker=look, hovertemplate=_HOVER, **where | {"col": 2})
    told = _marks()["popular"]
    figure.add_scatter(name="popular memory", marker=told, hovertemplate=_HOVER, **where | {"col": 3})
    for col, name in ((2, "speed words"), (3, "memory words")):
        words = {"mode": "text", "textposition": "middle right", "textfont": {"size": 13}, "cliponaxis": False}
        figure.add_scatter(name=name, hoverinfo="skip", showlegend=False, **words, row=1, col=col)
    _add_legend(figure)
    _lay_out(figure)
    return figure


def _marks() -> dict[str, dict[str, object]]:
    """What stands beside the bars of speed."""
    line = {"symbol": "line-ns", "size": 22}
    return {
        "earlier ceilings": line | {"line": {"width": 3, "color": SILVER}},
        "ceiling": line | {"line": {"width": 4, "color": COLOURS["ceiling"]}},
        "popular": {"symbol": "diamond-open", "size": 14, "line": {"width": 2}, "color": COLOURS["folk claim"]},
    }


def _add_legend(figure: go.Figure) -> None:
    """Points that are nowhere, so that the legend says what shapes stand for."""
    marks = _marks()
    square = {"symbol": "square", "size": 13}
    looks = {
        "bar: MEASURED, faded for sets from before": square | {"color": MUTED},
        "light end: all but the weights": square | {"color": SILVER},
        "left out": {"size": 9, "symbol": "x-thin", "line": {"width": 3, "color": INK}},
        "ceiling of the set's bytes (MODELLED)": marks["ceiling"] | {"size": 14},
        "the popular ladder, a folk claim": marks["popular"],
    }
    for name, look in looks.items():
        figure.add_scatter(name=name, x=[None], y=[None], mode="markers", marker=look, row=1, col=2)


def _lay_out(figure: go.Figure) -> None:
    margin = {"l": 100, "r": 20, "t": 40, "b": 150}
    figure.update_layout(template=TEMPLATE, height=550, barmode="stack", margin=margin)
    figure.update_layout(legend_traceorder="normal")
    figure.update_annotations(font_size=16)
    ticks = {"tickvals": list(range(len(RUNGS))), "ticktext": list(_SHORT.values()), "tickangle": -45}
    figure.update_xaxes(range=(-0.6, len(RUNGS) - 0.4), showgrid=False, **ticks, row=1, col=1)
    figure.update_xaxes(rangemode="tozero", row=1, col=2)
    figure.update_xaxes(rangemode="tozero", title={"text": "MB", "standoff": 4}, row=1, col=3)
    figure.update_yaxes(showgrid=False, ticks="")


def draw(figure: go.Figure, result: StackResult, earlier: Sequence[StackResult]) -> None:
    """Set the traces' data: the baseline, this set, then sets from before, the latest first, each as it came out
    last."""
    traces = {trace.name: trace for trace in figure.data}
    past = {r.key: r for r in earlier if r.key != result.key}
    # A key keeps its first place: what was measured again last counts as later.
    order = {r.key: i for i, r in enumerate(earlier)}
    shown = [result, *sorted(past.values(), key=lambda r: -order[r.key])][: _MOST_ROWS - 1]
    _draw_rungs(traces, shown)
    _draw_speed(traces, shown)
    _draw_memory(traces, shown)
    _set_axes(figure, shown)


def _place(index: int) -> float:
    """Of a set's row; the baseline's is 0."""
    return -1.0 - index


def _draw_rungs(traces: Traces, shown: Sequence[StackResult]) -> None:
    names, at = list(RUNGS), {"off": ([], []), "on": ([], []), "refused": ([], [])}
    looks, said = [], {"on": [], "refused": []}
    for row, r in [(None, None), *enumerate(shown)]:
        for x, rung in enumerate(names):
            on = r is not None and rung in r.effective
            why = r.idle.get(rung) if row == 0 else None
            kind = "on" if on else "refused" if why else "off"
            at[kind][0].append(x)
            at[kind][1].append(0.0 if r is None else _place(row))
            if on:
                looks.append((colour((rung,)), "diamond" if rung == "int8_head" else "circle", 1 if row == 0 else 0.45))
                said["on"].append(f"<b>{RUNGS[rung].title}</b><br>{RUNGS[rung].does}")
            elif why:
                said["refused"].append(f"<b>{RUNGS[rung].title} is left out</b><br>{why}")
    for kind, (xs, ys) in at.items():
        traces[kind].update(x=xs, y=ys, hovertext=said.get(kind))
    colours, symbols, opacities = ([look[i] for look in looks] for i in range(3))
    traces["on"].marker.update(color=colours, symbol=symbols, opacity=opacities)


def _draw_speed(traces: Traces, shown: Sequence[StackResult]) -> None:
    result = shown[0]
    known = [(i, r) for i, r in enumerate(shown) if r.stack]
    base = [1 / result.baseline.median] if result.baseline else []
    ys = [0.0] * len(base) + [_place(i) for i, _ in known]
    speeds = [*base, *(1 / r.stack.median for _, r in known)]
    words = [f"{rate:.3g} tokens/s: baseline, 1x" for rate in base]
    words += [f"{'<b>' if i == 0 else ''}{_speed_words(r)}{'</b>' if i == 0 else ''}" for i, r in known]
    traces["speed"].update(x=speeds, y=ys, hovertext=[*[result.baseline_name for _ in base], *_hovers(known)])
    colours = [*[COLOURS["baseline"] for _ in base], *(colour(r.effective) for _, r in known)]
    opacities = [*[1.0 for _ in base], *(_opacity(i) for i, _ in known)]
    traces["speed"].marker.update(color=colours, opacity=opacities)
    traces["speed words"].update(x=[0] * len(ys), y=[y + _OVER for y in ys], text=words)
    for name, rows in (("ceiling", known[:1]), ("earlier ceilings", known[1:])):
        rows = [(i, r) for i, r in rows if r.ceiling and (i == 0) == (name == "ceiling")]
        said = [f"ceiling {r.ceiling:.3g} tokens/s: {si(r.sizes.step_bytes, 'B')} a step; MODELLED" for _, r in rows]
        traces[name].update(x=[r.ceiling for _, r in rows], y=[_place(i) for i, _ in rows], hovertext=said)
    told = [(i, r) for i, r in known if r.popular and r.baseline]
    traces["popular"].update(
        x=[r.popular.speed / r.baseline.median for _, r in told],
        y=[_place(i) for i, _ in told],
        hovertext=[f"popular ladder, {r.popular.title}: {times(r.popular.speed)}" for _, r in told],
        marker_opacity=[_opacity(i) for i, _ in told],
    )


def _speed_words(result: StackResult) -> str:
    rate = f"{1 / result.stack.median:.3g} tokens/s"
    return f"{rate}: {times(result.speedup)}" if result.speedup else rate


def _hovers(known: Sequence[tuple[int, StackResult]]) -> list[str]:
    return [f"<b>{_speed_words(r)}; MEASURED</b><br>" + setting(r).replace(" + ", "<br>+ ") for _, r in known]


def _opacity(row: int) -> float:
    """Of the set at hand, and of those before it."""
    return 1.0 if row == 0 else _FADED


def _draw_memory(traces: Traces, shown: Sequence[StackResult]) -> None:
    result = shown[0]
    rows: list[tuple[float, Sizes, float]] = [(0.0, result.base_sizes, 1.0)]
    rows += [(_place(i), r.sizes, _opacity(i)) for i, r in enumerate(shown)]
    ys, opacities = [y for y, _, _ in rows], [opacity for _, _, opacity in rows]
    colours = [COLOURS["baseline"], *(colour(r.effective) for r in shown)]
    whole = [result.base_sizes.peak_bytes, *(r.base_sizes.peak_bytes for r in shown)]
    words = [_memory_words(sizes, base, y) for (y, sizes, _), base in zip(rows, whole, strict=True)]
    for name, part, look in (("weights", "weight_bytes", colours), ("rest", "rest_bytes", SILVER)):
        values = [getattr(sizes, part) for _, sizes, _ in rows]
        traces[name].update(x=[v / 1e6 for v in values], y=ys, hovertext=[f"{name}: {si(v, 'B')}" for v in values])
        traces[name].marker.update(color=look, opacity=opacities)
    traces["memory words"].update(x=[0] * len(ys), y=[y + _OVER for y in ys], text=words)
    told = [(i, r) for i, r in enumerate(shown) if r.popular and r.popular.memory and r.base_sizes.peak_bytes]
    traces["popular memory"].update(
        x=[r.popular.memory * r.base_sizes.peak_bytes / 1e6 for _, r in told],
        y=[_place(i) for i, _ in told],
        hovertext=[f"popular ladder: {r.popular.memory:.0%} of the baseline's" for _, r in told],
        marker_opacity=[_opacity(i) for i, _ in told],
    )


def _memory_words(sizes: Sizes, base: int, y: float) -> str:
    if not sizes.peak_bytes:
        return f"{si(sizes.weight_bytes, 'B')} of weights"
    words = si(sizes.peak_bytes, "B") + (f": {sizes.peak_bytes / base:.0%}" if base and y else "")
    return f"<b>{words}</b>" if y == _place(0) else words


def _set_axes(figure: go.Figure, shown: Sequence[StackResult]) -> None:
    rows = 1 + len(shown)
    labels = ["baseline", *(_label(i, r) for i, r in enumerate(shown))]
    # Rows keep their height while there are few.
    reach = (0.6 - max(rows, _FEWEST_ROWS), 0.75)
    names = {"tickvals": [-float(i) for i in range(rows)], "ticktext": labels, "range": reach}
    figure.layout.yaxis.update(**names)
    figure.layout.yaxis2.range = figure.layout.yaxis3.range = reach


def _label(row: int, result: StackResult) -> str:
    """What the columns of rungs do not tell: the prompt, and how much is drafted."""
    said = ["<b>this set</b>" if row == 0 else "before"]
    said += ["long"] if result.params.prompt == "long" else []
    said += [f"γ {result.gamma}"] if result.gamma else []
    return ", ".join(said) + " "
