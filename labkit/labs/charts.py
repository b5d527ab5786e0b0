"""The few charts that notebooks draw outside a lab, in the course's look, kept with a static picture and as text."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import _check
from labkit._table import readable
from labkit.labs._figures import COLOURS, INK, TEMPLATE, to_png
from labkit.measure import Timing

_HEIGHT = 420


@dataclass(frozen=True, repr=False)
class Chart:
    """A figure that a notebook keeps in three forms: interactive, a PNG where one can be drawn, and text."""

    figure: go.Figure
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        bundle: dict[str, object] = {"application/vnd.plotly.v1+json": self.figure.to_plotly_json()}
        picture = to_png(self.figure)
        if picture is not None:
            bundle["image/png"] = base64.b64encode(picture).decode()
        return bundle | {"text/plain": self.text}


def time_shares(times: Mapping[str, Timing], *, title: str, floors: Mapping[str, float] | None = None) -> Chart:
    """Bars of seconds by op, longest at the top, with their share; `floors` marks the least time that the roof allows.

    `times` is what `op_times` returns; `floors` seconds by the same names.
    """
    timed = isinstance(times, Mapping) and times and all(isinstance(t, Timing) for t in times.values())
    _check.require(bool(timed), "times", times, "a Timing by op, as op_times returns")
    marked = floors is None or (isinstance(floors, Mapping) and set(times) <= set(floors))
    _check.require(marked, "floors", floors, f"None, or seconds for each of {', '.join(times)}")
    total = sum(timing.median for timing in times.values())
    names = sorted(times, key=lambda name: times[name].median)
    milliseconds = [1e3 * times[name].median for name in names]
    shares = [f"{times[name].median / total:.0%}" for name in names]
    figure = go.Figure(layout={"template": TEMPLATE, "title": title, "height": _HEIGHT + 120, "barmode": "overlay"})
    bars = {"orientation": "h", "y": names}
    figure.add_bar(x=milliseconds, text=shares, name="measured", marker_color=COLOURS["projections"], **bars)
    if floors is not None:
        marks = {"symbol": "line-ns", "size": 16, "line": {"width": 3, "color": INK}}
        least = [1e3 * floors[name] for name in names]
        figure.add_scatter(x=least, y=names, mode="markers", marker=marks, name="least the measured roof allows")
    figure.update_xaxes(title="milliseconds a step, all layers")
    figure.update_yaxes(dtick=1, automargin=True)  # a label for every bar
    rows = zip(names, shares, strict=True)
    lines = [f"{name:<14} {readable(times[name].median, 's'):>9}  {share:>4}" for name, share in rows]
    return Chart(figure, "\n".join([title, *reversed(lines)]))


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    ceiling: str | None = None,
) -> Chart:
    """Curves over two logarithmic axes, by name; the one named by `ceiling` is drawn as the dashed line of a limit."""
    for value in x if isinstance(x, Sequence) else [x]:
        _check.require(_check.number("x", value) > 0, "x", value, "numbers above 0: the axis is logarithmic")
    _check.require(isinstance(lines, Mapping) and bool(lines), "lines", lines, "values by name")
    for name, y in lines.items():
        _check.require(isinstance(y, Sequence), f"lines[{name!r}]", y, "a list of numbers")
        _check.require(len(y) == len(x), f"lines[{name!r}]", f"{len(y)} values", f"{len(x)}, one for each x")
    _check.require(ceiling is None or ceiling in lines, "ceiling", ceiling, _check.near(ceiling, lines))
    figure = go.Figure(layout={"template": TEMPLATE, "title": title, "height": _HEIGHT})
    for name, y in lines.items():
        style = {"line": {"dash": "dash", "color": COLOURS["ceiling"]}} if name == ceiling else {"line": {"width": 3}}
        figure.add_scatter(
            x=list(x), y=list(y), name=name, mode="lines" if name == ceiling else "lines+markers", **style
        )
    figure.update_xaxes(title=x_title, type="log", tickvals=list(x), ticktext=[f"{value:g}" for value in x])
    # Logarithmic both ways, as a roofline is: what grows in proportion is a straight line, and a limit bends it.
    figure.update_yaxes(title=y_title, type="log")
    rows = [f"{x_title:<24}" + "".join(f"{value:>10g}" for value in x)]
    rows += [f"{name:<24}" + "".join(f"{value:>10.3g}" for value in y) for name, y in lines.items()]
    return Chart(figure, "\n".join([title, *rows]))
