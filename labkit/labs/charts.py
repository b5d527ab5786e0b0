"""The few charts that notebooks draw outside a lab, in the course's look, kept with a static picture and as text."""

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import _check
from labkit._table import readable
from labkit.labs._figures import COLOURS, INK, MAGNITUDES, TEMPLATE, line_looks, log_ticks, to_png
from labkit.labs._roofline_result import FAMILIES
from labkit.measure import Timing

_HEIGHT = 420
# A notebook's column is some 1000 pixels wide and shows a picture as it is: a wider one is cut off.
_WIDTH = 900


@dataclass(frozen=True, repr=False)
class Chart:
    """A figure that a notebook keeps in three forms: interactive, a PNG where one can be drawn, and text."""

    figure: go.Figure
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, object]:
        bundle: dict[str, object] = {"application/vnd.plotly.v1+json": self.figure.to_plotly_json()}
        picture = to_png(self.figure, width=_WIDTH)
        if picture is not None:
            bundle["image/png"] = base64.b64encode(picture).decode()
        return bundle | {"text/plain": self.text}


def time_shares(times: Mapping[str, Timing], *, title: str, floors: Mapping[str, float] | None = None) -> Chart:
    """Bars of seconds by op in its family's colour, longest at the top, with their share.

    `times` is what `op_times` returns; `floors`, seconds by the same names, marks the least time that the roof allows.
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
    bars = {"orientation": "h", "y": names, "showlegend": False}
    colours = [COLOURS[next((f for f, ops in FAMILIES.items() if name in ops), "other")] for name in names]
    figure.add_bar(x=milliseconds, text=shares, name="measured", marker_color=colours, **bars)
    if floors is not None:
        marks = {"symbol": "line-ns", "size": 16, "line": {"width": 3, "color": INK}}
        least = [1e3 * floors[name] for name in names]
        figure.add_scatter(x=least, y=names, mode="markers", marker=marks, name="least the measured roof allows")
    figure.update_xaxes(title="milliseconds a step, all layers")
    figure.update_yaxes(dtick=1, automargin=True)  # a label for every bar
    rows = zip(names, shares, strict=True)
    lines = [f"{name:<14} {readable(times[name].median, 's'):>9}  {share:>4}" for name, share in rows]
    return Chart(figure, "\n".join([title, *reversed(lines)]))


# Of several limits in one figure.
_DASHES = ("dash", "dot", "dashdot")


def curves(
    x: Sequence[float],
    lines: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_title: str,
    y_title: str,
    ceiling: str | Sequence[str] = (),
    log_x: bool = True,
    log_y: bool = True,
) -> Chart:
    """Curves by name, over logarithmic axes unless told otherwise; `ceiling` names those that are limits, dashed."""
    ceilings = (ceiling,) if isinstance(ceiling, str) else tuple(ceiling)
    _check_curves(x, lines, ceilings, log_x)
    figure = go.Figure(layout={"template": TEMPLATE, "title": title, "height": _HEIGHT})
    looks = line_looks([name for name in lines if name not in ceilings])
    for name, y in lines.items():
        look = looks.get(name, {})
        style = {"line": {"width": 3, "color": look.get("color"), "dash": look.get("dash")}}
        style["marker_symbol"] = look.get("symbol")
        if name in ceilings:
            style = {"line": {"dash": _DASHES[ceilings.index(name) % len(_DASHES)], "color": COLOURS["ceiling"]}}
        figure.add_scatter(
            x=list(x), y=list(y), name=name, mode="lines" if name in ceilings else "lines+markers", **style
        )
    # Logarithmic both ways, as a roofline is: what grows in proportion is a straight line, and a limit bends it.
    ticks = {"type": "log", "tickvals": list(x), "ticktext": [f"{value:g}" for value in x]} if log_x else {}
    figure.update_xaxes(title=x_title, **ticks)
    shown = [value for y in lines.values() for value in y if 0 < value < math.inf]
    steps = {"type": "log", **log_ticks(shown)} if log_y and shown else {"type": "log" if log_y else "linear"}
    # However wide the labels of the ticks are, the title stands beside them.
    figure.update_yaxes(title={"text": y_title, "standoff": 10}, automargin=True, **steps)
    rows = [f"{x_title:<24}" + "".join(f"{value:>10g}" for value in x)]
    rows += [f"{name:<24}" + "".join(f"{value:>10.3g}" for value in y) for name, y in lines.items()]
    return Chart(figure, "\n".join([title, *rows]))


def _check_curves(x: Sequence[float], lines: Mapping[str, Sequence[float]], ceilings: tuple, log_x: bool) -> None:
    """As many values in each line as there are x."""
    for value in x if isinstance(x, Sequence) else [x]:
        positive = _check.number("x", value) > 0 or not log_x
        _check.require(positive, "x", value, "numbers above 0: the axis is logarithmic")
    _check.require(isinstance(lines, Mapping) and bool(lines), "lines", lines, "values by name")
    for name, y in lines.items():
        _check.require(isinstance(y, Sequence), f"lines[{name!r}]", y, "a list of numbers")
        _check.require(len(y) == len(x), f"lines[{name!r}]", f"{len(y)} values", f"{len(x)}, one for each x")
    for name in ceilings:
        _check.require(name in lines, "ceiling", name, _check.near(name, lines))


def heat_map(
    rows: Mapping[str, Sequence[float]], *, title: str, x_title: str, value_title: str, highest: int = 3
) -> Chart:
    """One coloured square for each value, a line of them a name; darker is more, on a logarithmic scale.

    The text form says which are the `highest`, and each line's median.
    """
    full = isinstance(rows, Mapping) and bool(rows) and len({len(values) for values in rows.values()}) == 1
    _check.require(full, "rows", rows, "lists of one length, by name")
    flat = [(value, name, i) for name, values in rows.items() for i, value in enumerate(values)]
    for value, name, i in flat:
        _check.require(_check.number("rows", value) > 0, f"rows[{name!r}][{i}]", value, "numbers above 0")
    figure = go.Figure(layout={"template": TEMPLATE, "title": title, "height": _HEIGHT})
    shades = [[math.log10(value) for value in values] for values in rows.values()]
    ends = (math.ceil(min(map(min, shades))), math.floor(max(map(max, shades))))
    ticks = {"tickvals": list(range(ends[0], ends[1] + 1))}
    ticks["ticktext"] = [f"{10.0**power:g}" for power in ticks["tickvals"]]
    figure.add_heatmap(
        z=shades,
        y=list(rows),
        customdata=[list(values) for values in rows.values()],
        hovertemplate=f"%{{y}}, {x_title} %{{x}}: %{{customdata:.3g}}<extra></extra>",
        colorscale=MAGNITUDES,
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": value_title, "side": "right"}, **ticks},
    )
    figure.update_xaxes(title=x_title, showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False, automargin=True)
    worst = sorted(flat, reverse=True)[:highest]
    lines = [f"{name:<12} median {statistics.median(values):.3g}" for name, values in rows.items()]
    lines += [f"highest: {name} at {x_title} {i}, {value:.3g}" for value, name, i in worst]
    return Chart(figure, "\n".join([f"{title} ({value_title})", *lines]))
