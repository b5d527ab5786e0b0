"""The advisor's decision tree drawn, with what it decided where an advice is given."""

from __future__ import annotations

import textwrap

import plotly.graph_objects as go

from labkit import _check
from labkit.engine.advisor import TREE, Advice
from labkit.engine.ladder import RUNGS
from labkit.labs._figures import COLOURS, INK, MUTED, TEMPLATE
from labkit.labs.charts import Chart
from labkit.labs.ladder_chart import RUNG_COLOURS

_ROW, _WIDTH, _GAP = 1.0, 1.0, 0.12
_COMPLAINT_WIDTH, _ROOT_WIDTH = 1.5, 0.8
# "speculation", the longest word in a box, fills four fifths of one where the figure is 900 pixels wide.
_FONT, _COMPLAINT_CHARS = 12, 16


def decision_tree(advice: Advice | None = None) -> Chart:
    """The complaints, and the rungs that help with each, in the order in which they are tried: what costs least first.

    With an `advice`: what it put on is filled, what it looked at and left off is crossed out, the rest is pale.
    """
    takes = "an Advice, as advise returns, or None"
    _check.require(advice is None or isinstance(advice, Advice), "advice", type(advice).__name__, takes)
    title = "What is wrong, and what helps" + ("" if advice is None else ": " + ", ".join(_titles(advice.rungs)))
    figure = go.Figure(layout={"template": TEMPLATE, "title": title, "height": 330, "showlegend": False})
    root = -_COMPLAINT_WIDTH - _ROOT_WIDTH - 3 * _GAP
    middle = -_ROW * (len(TREE) - 1) / 2
    _box(figure, root, middle, _ROOT_WIDTH, "what is<br>wrong?", fill="white")
    for row, branch in enumerate(TREE):
        y = -_ROW * row
        left = -_COMPLAINT_WIDTH - _GAP
        _line(figure, root + _ROOT_WIDTH, middle, left, y)
        complaint = "<br>".join(textwrap.wrap(branch.complaint, _COMPLAINT_CHARS))
        _box(figure, left, y, _COMPLAINT_WIDTH, complaint, fill="white")
        for place, rung in enumerate(branch.rungs):
            x = place * (_WIDTH + _GAP)
            _line(figure, x - _GAP, y, x, y)
            _rung(figure, x, y, rung, advice)
    longest = max(len(branch.rungs) for branch in TREE) * (_WIDTH + _GAP)
    figure.update_xaxes(visible=False, range=[root - 0.1, longest])
    figure.update_yaxes(visible=False, range=[-_ROW * (len(TREE) - 0.4), 0.6 * _ROW])
    figure.update_layout(margin={"l": 10, "r": 10, "t": 60, "b": 10})
    return Chart(figure, "\n".join([title, *(_words(branch.complaint, branch.rungs, advice) for branch in TREE)]))


def _titles(rungs: tuple[str, ...]) -> list[str]:
    return [RUNGS[rung].title for rung in rungs] or ["nothing to put on"]


def _words(complaint: str, rungs: tuple[str, ...], advice: Advice | None) -> str:
    marks = {"on": " [on]", "off": " [off]", "": ""}
    return f"{complaint}: " + " → ".join(RUNGS[rung].title + marks[_state(rung, advice)] for rung in rungs)


def _state(rung: str, advice: Advice | None) -> str:
    """Whether the advice put a rung on or looked at it and left it off."""
    if advice is None:
        return ""
    if rung in advice.rungs:
        return "on"
    return "off" if any(step.rung == rung for step in advice.steps) else ""


def _rung(figure: go.Figure, x: float, y: float, rung: str, advice: Advice | None) -> None:
    state, colour = _state(rung, advice), COLOURS[RUNG_COLOURS[rung]]
    text = RUNGS[rung].title.replace(" ", "<br>", 1)
    filled = advice is None or state == "on"
    said = {step.rung: step.reason for step in advice.steps} if advice else {}
    text = f"<s>{text}</s>" if state == "off" else text
    pale = advice is not None and state != "on"
    _box(figure, x, y, _WIDTH, text, fill=colour if filled else "white", edge=colour, ink=MUTED if pale else INK)
    hover = said.get(rung, RUNGS[rung].does)
    marker = {"opacity": 0, "size": 40}
    figure.add_scatter(x=[x + _WIDTH / 2], y=[y], mode="markers", marker=marker, hovertext=hover, hoverinfo="text")


def _box(
    figure: go.Figure, x: float, y: float, width: float, text: str, *, fill: str, edge: str = MUTED, ink: str = INK
) -> None:
    size = {"x0": x, "x1": x + width, "y0": y - 0.32, "y1": y + 0.32}
    # The fill is light enough to read on; the edge is the colour itself.
    figure.add_shape(type="rect", fillcolor=fill, opacity=0.35, line_width=0, layer="below", **size)
    figure.add_shape(type="rect", line={"color": edge, "width": 2}, layer="below", **size)
    font = {"color": ink, "size": _FONT}
    figure.add_annotation(x=x + width / 2, y=y, text=text, showarrow=False, font=font)


def _line(figure: go.Figure, x0: float, y0: float, x1: float, y1: float) -> None:
    figure.add_shape(type="line", x0=x0, y0=y0, x1=x1, y1=y1, line={"color": MUTED, "width": 1.5}, layer="below")
