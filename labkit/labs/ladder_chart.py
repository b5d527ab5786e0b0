"""The measured ladder beside the popular one: speed, and memory that is left."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit import _check
from labkit.engine.ladder import POPULAR, Ladder, LadderStep, PopularRung
from labkit.labs._figures import COLOURS, INK, TEMPLATE, log_range
from labkit.labs.charts import Chart

# The colour of each rung; "" is the baseline.
RUNG_COLOURS = {
    "": "baseline",
    "step": "step",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int4": "int4",
    "int8_head": "int8",
    "attention": "attention rung",
    "quantized_kv": "quantized KV",
    "speculation": "speculation",
}
_HEIGHT = 600
# Room at the right end of either half for a column of figures, where no bar and no mark runs through them.
_PAST_MARKS, _PAST_BARS = 2.4, 1.4
_TICKS = [0.5, 1, 2, 4, 8, 16, 32, 64, 128]


def ladder_chart(ladder: Ladder, popular: Sequence[PopularRung] = POPULAR) -> Chart:
    """Bars of times the baseline's tokens a second, a rung a line, with what the measured bandwidth would allow; beside
    them peak memory as a share of the baseline's. Hollow marks are the `popular` ladder's, a folk claim
    without a source. Text: the ladder's table."""
    _check.require(isinstance(ladder, Ladder), "ladder", type(ladder).__name__, "a Ladder, as measure_ladder returns")
    steps = list(ladder.measured())
    titles = [_title(step) for step in steps]
    figure = make_subplots(cols=2, shared_yaxes=True, column_widths=[0.66, 0.34], horizontal_spacing=0.04)
    colours = [COLOURS[RUNG_COLOURS[step.rungs[-1] if step.rungs else ""]] for step in steps]
    speeds = [ladder.speedup(step) for step in steps]
    # The head is INT8 as the matrices are: told apart by its hatching.
    hatched = ["/" if step.rungs[-1:] == ("int8_head",) else "" for step in steps]
    marker = {"color": colours, "pattern": {"shape": hatched, "fgcolor": INK}}
    bars = {"orientation": "h", "y": titles, "marker": marker}
    figure.add_bar(x=speeds, name="measured", col=1, row=1, **bars)
    shares = [100 * step.peak_bytes / ladder.baseline.peak_bytes for step in steps]
    figure.add_bar(x=shares, showlegend=False, col=2, row=1, **bars)
    _ceilings(figure, ladder, steps, titles)
    _popular(figure, popular, {step.rungs[-1] if step.rungs else "": _title(step) for step in steps})
    figure.update_layout(template=TEMPLATE, title=_heading(ladder), height=_HEIGHT, bargap=0.35, margin_b=150)
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    # Logarithmic: the ceilings rise far above what is reached, and equal gains are equal lengths.
    ceilings = [step.ceiling / ladder.baseline.tokens_per_second for step in steps if step.ceiling is not None]
    most = max([*speeds, *ceilings, *(rung.speed for rung in popular)])
    shown = [x for x in _TICKS if x <= most]
    ticks = {"tickvals": shown, "ticktext": [f"{x:g}" for x in shown]}
    axis = {"type": "log", "range": log_range(0.5, _PAST_MARKS * most), **ticks}
    highest = max([*shares, *(100 * rung.memory for rung in popular if rung.memory is not None)])
    _column(figure, titles, _PAST_MARKS * most, [f"{s:.2f}x" for s in speeds], col=1)
    _column(figure, titles, _PAST_BARS * highest, [f"{s:.0f}%" for s in shares], col=2)
    figure.update_xaxes(title="times the baseline's tokens a second", col=1, row=1, **axis)
    figure.update_xaxes(title="peak memory, % of it", range=[0, _PAST_BARS * highest], col=2, row=1)
    return Chart(figure, "\n".join([_heading(ladder), repr(ladder)]))


def _column(figure: go.Figure, titles: Sequence[str], x: float, texts: Sequence[str], *, col: int) -> None:
    """What each bar says in figures, right-aligned at `x`."""
    said = {"text": list(texts), "textposition": "middle left", "mode": "text", "showlegend": False}
    figure.add_scatter(x=[x] * len(titles), y=titles, hoverinfo="skip", col=col, row=1, **said)


def _title(step: LadderStep) -> str:
    return f"+ {step.title}" if step.rungs else step.title.replace(", ", ",<br>", 1)


def _heading(ladder: Ladder) -> str:
    return f"The ladder on {ladder.model}, each rung on top of those before ({ladder.label})"


def _ceilings(figure: go.Figure, ladder: Ladder, steps: Sequence[LadderStep], titles: Sequence[str]) -> None:
    """A line where the bytes of a step, at the measured bandwidth, end."""
    known = [(step, title) for step, title in zip(steps, titles, strict=True) if step.ceiling is not None]
    marks = {"symbol": "line-ns", "size": 22, "line": {"width": 3, "color": INK}}
    x = [step.ceiling / ladder.baseline.tokens_per_second for step, _ in known]
    # Short enough for a legend of one line: in one of several, marks as tall as these touch.
    name = "ceiling: a step's bytes at the measured bandwidth"
    figure.add_scatter(x=x, y=[title for _, title in known], mode="markers", marker=marks, name=name, col=1, row=1)


def _popular(figure: go.Figure, popular: Sequence[PopularRung], titles: dict[str, str]) -> None:
    """Hollow marks on the line of the rung that is meant, where the ladder has it."""
    shown = [rung for rung in popular if rung.rung and rung.rung in titles]
    marks = {"symbol": "diamond-open", "size": 13, "line": {"width": 3, "color": COLOURS["folk claim"]}}
    marks["color"] = COLOURS["folk claim"]
    places = [titles[rung.rung] for rung in shown]
    common = {"mode": "markers", "marker": marks, "name": "the popular ladder"}
    figure.add_scatter(x=[rung.speed for rung in shown], y=places, col=1, row=1, **common)
    held = [(100 * rung.memory, place) for rung, place in zip(shown, places, strict=True) if rung.memory is not None]
    x, y = zip(*held, strict=True) if held else ((), ())
    figure.add_scatter(x=x, y=y, showlegend=False, col=2, row=1, **common)
