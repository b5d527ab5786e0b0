"""How `roofline_lab` draws a result: every op under the measured roof, and where the time of a step goes."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.labs._figures import COLOURS, INK, MUTED, TEMPLATE, log_range, named_line
from labkit.labs._result import duration, si
from labkit.labs._roofline_result import FAMILIES, OpPoint, PhaseResult, RooflineResult

SYMBOLS = {"decode": "circle", "prefill": "diamond"}
_BAR_AT = {("decode", "measured"): 0.0, ("decode", "at the roof"): 1.0} | {
    ("prefill", "measured"): 2.4,
    ("prefill", "at the roof"): 3.4,
}
_X_LOW = 0.04
_LINE = "<br> "
_HOVER = (
    "<b>%{customdata[0]}</b><br>%{customdata[1]}, %{customdata[2]} of its ceiling<br>"
    "%{customdata[3]}, %{customdata[4]}<br>%{x:.3g} FLOP/byte, %{customdata[5]}<extra></extra>"
)


def build_figure() -> go.Figure:
    """The empty figure: the roof's lines, one trace a family, the whole steps, the earlier points; the bars."""
    figure = make_subplots(
        cols=2,
        column_widths=[0.66, 0.34],
        horizontal_spacing=0.1,
        subplot_titles=("Each op under the measured roof", "Where the time goes, op by op"),
    )
    # Above the ridge there are no points to cover: the bandwidth to its left, the peak to its right.
    places = ["top left", "top left", "top right", "top left"]
    look = {"hoverinfo": "skip", "showlegend": False, **named_line(places)}
    roof = {"color": COLOURS["ceiling"], "width": 3}
    figure.add_scatter(name="measured roof", line=roof, **look, row=1, col=1)
    sheet = {"color": MUTED, "width": 2, "dash": "dash"}
    figure.add_scatter(name="datasheet", line=sheet, **look, textfont_color=MUTED, visible=False, row=1, col=1)
    faded = {"size": 11, "opacity": 0.5, "line": {"width": 0}, "color": MUTED}
    figure.add_scatter(name="earlier", mode="markers", marker=faded, hovertemplate=_HOVER, row=1, col=1)
    for family in FAMILIES:
        marker = {"size": 12, "color": COLOURS[family], "line": {"width": 1, "color": "white"}}
        look = {"name": family, "legendgroup": family, "mode": "markers", "hovertemplate": _HOVER}
        figure.add_scatter(marker=marker, **look, row=1, col=1)
    for phase, symbol in SYMBOLS.items():
        # A point that is nowhere, so that the legend says what the shapes stand for.
        shape = {"size": 12, "symbol": symbol, "color": "white", "line": {"width": 2, "color": MUTED}}
        figure.add_scatter(name=phase, x=[None], y=[None], mode="markers", marker=shape, row=1, col=1)
    whole = {"size": 20, "color": "rgba(0,0,0,0)", "line": {"width": 3, "color": INK}}
    look = {"mode": "markers+text", "textposition": "bottom right", "textfont": {"size": 14, "color": INK}}
    figure.add_scatter(name="whole step", marker=whole, **look, showlegend=False, hovertemplate=_HOVER, row=1, col=1)
    for family in FAMILIES:
        look = {"name": family, "legendgroup": family, "showlegend": False, "marker_color": COLOURS[family]}
        text = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "texttemplate": "%{text}"}
        figure.add_bar(**look, **text, hovertemplate="%{hovertext}<extra></extra>", row=1, col=2)
    _lay_out(figure)
    return figure


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(template=TEMPLATE, height=500, barmode="stack", bargap=0.25, uniformtext={"minsize": 11})
    figure.update_layout(uniformtext_mode="hide", margin={"l": 75, "r": 15, "t": 45, "b": 100})
    figure.update_annotations(font_size=16)
    figure.update_xaxes(title="Intensity (FLOP per byte moved)", type="log", dtick=1, row=1, col=1)
    log_axis = {"type": "log", "dtick": 1, "exponentformat": "SI extended"}
    figure.update_yaxes(title="Achieved FLOP/s", **log_axis, row=1, col=1)
    figure.update_yaxes(title="% of the ops' summed times", range=[0, 104], row=1, col=2)
    figure.update_xaxes(range=[-0.6, 4.0], tickangle=0, tickfont_size=13, row=1, col=2)


def _hover(name: str, seconds: float, fraction: float, flops: float, moved: float) -> list[str]:
    rate = si(flops / seconds, "FLOP/s")
    return [name, duration(seconds), f"{fraction:.0%}", si(flops, "FLOP"), f"{si(moved, 'B')} moved", rate]


def _op_hover(phase: PhaseResult, op: OpPoint) -> list[str]:
    return _hover(f"{phase.name}: {op.cost.name}", op.seconds.median, op.fraction, op.cost.flops, op.cost.bytes)


def _step_hover(result: RooflineResult, phase: PhaseResult) -> list[str]:
    name = f"{phase.name} step, batch {phase.batch}, {phase.kv_len} tokens, {result.params.dtype}"
    return _hover(name, phase.step.median, phase.fraction, phase.total("flops"), phase.total("bytes"))


def _roof(bandwidth: float, peak: float, whose: str, lift: str = "") -> dict[str, list]:
    """The two roofs as one line, past both ends of the axis: bytes/s times intensity up to the ridge, then flat.

    `lift` goes below their names, so that those of two roofs stand one above the other, and above both.
    """
    low, ridge = _X_LOW / 10, peak / bandwidth
    names = ["", f"{whose} {si(bandwidth, 'B/s')} {lift}", f" {whose} {si(peak, 'FLOP/s')}{lift}", ""]
    return {"x": [low, ridge, ridge, 1e4 * ridge], "y": [bandwidth * low, peak, peak, peak], "text": names}


def _set_ranges(figure: go.Figure, result: RooflineResult, earlier: Sequence[RooflineResult]) -> None:
    """Both axes to hold every point of this and the earlier results, and enough roof on both sides of the ridge."""
    phases = [phase for shown in (*earlier, result) for phase in shown.phases]
    ops = [op for phase in phases for op in phase.ops if op.cost.flops]
    right = max(3 * result.ridge, *(20 * op.cost.intensity for op in ops))
    bottom = min(result.peak / 1e3, *(op.achieved_flops / 2 for op in ops))
    top = 4 * max(result.peak, *(op.achieved_flops for op in ops))
    figure.layout.xaxis.range = log_range(_X_LOW, right)
    figure.layout.yaxis.range = log_range(bottom, top)


def draw(figure: go.Figure, result: RooflineResult, earlier: Sequence[RooflineResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded whole steps."""
    traces = {(trace.type, trace.name): trace for trace in figure.data}
    _set_ranges(figure, result, earlier)
    lift = _LINE if _draw_datasheet(traces["scatter", "datasheet"], result) else ""
    roof = _roof(result.ceilings.read_bandwidth, result.peak, "measured", lift)
    traces["scatter", "measured roof"].update(roof)
    past = [(old, phase) for old in earlier for phase in old.phases]
    traces["scatter", "earlier"].update(
        x=[phase.intensity for _, phase in past],
        y=[phase.achieved_flops for _, phase in past],
        customdata=[_step_hover(old, phase) for old, phase in past],
        marker_symbol=[SYMBOLS[phase.name] for _, phase in past],
    )
    for family in FAMILIES:
        points = [(phase, op) for phase in result.phases for op in phase.family(family) if op.cost.flops]
        traces["scatter", family].update(
            x=[op.cost.intensity for _, op in points],
            y=[op.achieved_flops for _, op in points],
            customdata=[_op_hover(phase, op) for phase, op in points],
            marker_symbol=[SYMBOLS[phase.name] for phase, _ in points],
        )
    traces["scatter", "whole step"].update(
        x=[phase.intensity for phase in result.phases],
        y=[phase.achieved_flops for phase in result.phases],
        text=[f"{phase.name} step: {phase.fraction:.0%}" for phase in result.phases],
        customdata=[_step_hover(result, phase) for phase in result.phases],
        marker_symbol=[SYMBOLS[phase.name] for phase in result.phases],
    )
    _draw_bars(figure, traces, result)


def _draw_datasheet(trace: go.Scatter, result: RooflineResult) -> bool:
    """The maker's roof, where it is known; returns whether it is."""
    sheet = result.sheet
    peaks = {str(dtype): flops for dtype, flops in sheet.matmul_flops.items()} if sheet else {}
    peak = peaks.get(f"torch.{result.params.dtype}")
    trace.visible = peak is not None
    if trace.visible:
        trace.update(_roof(sheet.memory_bandwidth, peak, "datasheet", 2 * _LINE))
    return trace.visible


def _draw_bars(figure: go.Figure, traces: dict, result: RooflineResult) -> None:
    """Two bars a phase: the shares of the step's time, and what the roof would leave of each."""
    bars = [
        (phase, kind, sum(seconds(op) for op in phase.ops), seconds)
        for phase in result.phases
        for kind, seconds in (("measured", lambda op: op.seconds.median), ("at the roof", lambda op: op.floor_s))
    ]
    whole = {phase.name: total for phase, kind, total, _ in bars if kind == "measured"}
    at = [_BAR_AT[phase.name, kind] for phase, kind, _, _ in bars]
    figure.layout.xaxis2.tickvals = at
    figure.layout.xaxis2.ticktext = [
        f"{phase.name if kind == 'measured' else 'roof'}<br>{duration(total)}" for phase, kind, total, _ in bars
    ]
    for family in FAMILIES:
        parts = [sum(seconds(op) for op in phase.family(family)) for phase, _, _, seconds in bars]
        shares = [part / whole[phase.name] for part, (phase, *_) in zip(parts, bars, strict=True)]
        hover = [
            f"<b>{phase.name}: {family}</b><br>{duration(part)} {kind}"
            for part, (phase, kind, *_) in zip(parts, bars, strict=True)
        ]
        text = [f"{share:.0%}" for share in shares]
        traces["bar", family].update(x=at, y=[100 * share for share in shares], text=text, hovertext=hover)
