"""The right panel of `speculative_lab`: what one call takes, part by part, beside the plain steps it stands for."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit.labs._figures import COLOURS, INK, MUTED, SILVER
from labkit.labs._result import duration
from labkit.labs._speculative_result import SpeculativeResult

Traces = Mapping[str, BaseTraceType]
_PLAIN, _CALL = 1, 0
# Where the words stand, over the plain steps and under the call.
_OVER, _UNDER = 1.4, -0.46
_PARTS = {"draft": COLOURS["draft"], "verify": COLOURS["verify"], "rest": MUTED}


def add_call(figure: go.Figure, col: int) -> None:
    """Empty traces: plain steps, the parts of a call, the call as it was clocked, and words."""
    where = {"row": 1, "col": col, "showlegend": False}
    bars = {"orientation": "h", "width": 0.5, "hovertemplate": "%{hovertext}<extra></extra>"}
    for name, colour in {"plain steps": SILVER, **_PARTS}.items():
        figure.add_bar(name=name, marker={"color": colour, "line": {"color": "white", "width": 2}}, **bars, **where)
    mark = {"symbol": "line-ns", "size": 50, "line": {"width": 4, "color": INK}}
    figure.add_scatter(name="clocked", mode="markers", marker=mark, cliponaxis=False, hoverinfo="skip", **where)
    words = {"mode": "text", "textposition": "middle right", "textfont": {"size": 15}, "cliponaxis": False}
    figure.add_scatter(name="call words", hoverinfo="skip", **words, **where)
    figure.update_xaxes(title={"text": "Milliseconds", "standoff": 4}, row=1, col=col)
    names = {"tickvals": [_CALL, _PLAIN], "ticktext": ["one call", "plain"], "range": (-0.75, 1.65)}
    figure.update_yaxes(showgrid=False, **names, row=1, col=col)


def draw_call(figure: go.Figure, traces: Traces, result: SpeculativeResult) -> None:
    """Bars as soon as there are costs."""
    costs, made = result.costs.get(result.params.num_assistant_tokens), result.tokens_a_call
    if costs is None or made is None:
        for name in ("plain steps", *_PARTS, "clocked", "call words"):
            traces[name].update(x=[], y=[], text=None, hovertext=None)
        return
    # Drawn step by step: whole ones, then the part of one.
    whole, step = int(made), 1e3 * costs.step_s
    lengths = [step] * whole + [step * (made - whole)]
    steps = f"{made:.2f} plain steps of {duration(costs.step_s)}"
    traces["plain steps"].update(x=lengths, y=[_PLAIN] * len(lengths), hovertext=[steps] * len(lengths))
    # The mean over the calls; one that nothing was drafted for is a plain step, whose loop is in it.
    rest = result.share * costs.rest_s
    verify = costs.step_s * result.verify_cost(result.params.num_assistant_tokens) - rest
    parts = {"draft": costs.draft_s, "verify": verify, "rest": rest}
    for name, seconds in parts.items():
        traces[name].update(x=[1e3 * seconds], y=[_CALL], hovertext=[f"{name}: {duration(seconds)}"])
    clocked = made * result.speculative.median if result.rounds else None
    traces["clocked"].update(x=[1e3 * clocked] if clocked else [], y=[_CALL] if clocked else [])
    draft, verified, others = (_word(name, seconds) for name, seconds in parts.items())
    mark = f"; <b>┃ clocked: {duration(clocked)}</b>" if clocked else ""
    under = f"{draft} + {verified}<br>+ {others}{mark}"
    traces["call words"].update(x=[0, 0], y=[_OVER, _UNDER], text=[steps, under])
    longest = max(step * made, 1e3 * sum(parts.values()), 1e3 * (clocked or 0))
    figure.layout.xaxis2.range = (0, 1.12 * longest)


def _word(name: str, seconds: float) -> str:
    return f'<span style="color:{_PARTS[name]}">■</span> {name} {duration(seconds)}'
