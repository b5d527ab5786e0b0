"""Charts outside a lab: what they draw, and the three forms that a notebook keeps."""

import math

import pytest

from labkit.labs import charts
from labkit.labs.charts import curves, heat_map, time_shares
from labkit.measure import Timing

TIMES = {"embed": Timing(0.001, 0.001, 0.001, 1), "lm_head": Timing(0.003, 0.003, 0.003, 1)}


def test_shares_are_of_the_whole_and_the_longest_is_on_top() -> None:
    chart = time_shares(TIMES, floors={"embed": 0.0005, "lm_head": 0.002}, title="A step")
    bars, marks = chart.figure.data
    assert list(bars.y) == ["embed", "lm_head"] and list(bars.x) == [1.0, 3.0] and list(bars.text) == ["25%", "75%"]
    assert list(marks.y) == list(bars.y) and list(marks.x) == [0.5, 2.0]
    assert chart.text.splitlines()[1].split() == ["lm_head", "3", "ms", "75%"]


def test_curves_mark_the_ceiling() -> None:
    chart = curves(
        (1, 2), {"measured": [10, 18], "roof": [12, 24]}, title="t", x_title="batch", y_title="y", ceiling="roof"
    )
    measured, roof = chart.figure.data
    assert roof.line.dash == "dash" and measured.line.dash is None and list(measured.y) == [10, 18]
    assert chart.text.splitlines()[2].split() == ["measured", "10", "18"]


def test_several_ceilings_are_told_apart() -> None:
    lines = {"measured": [1, 2], "roof a": [3, 3], "roof b": [4, 4]}
    chart = curves((1, 2), lines, title="t", x_title="x", y_title="y", ceiling=["roof a", "roof b"])
    assert [trace.line.dash for trace in chart.figure.data] == [None, "dash", "dot"]


def test_curves_may_have_linear_axes_and_then_hold_a_zero() -> None:
    chart = curves((0, 1), {"a": [3, 2]}, title="t", x_title="x", y_title="y", log_x=False, log_y=False)
    assert chart.figure.layout.xaxis.type is None and chart.figure.layout.yaxis.type == "linear"
    with pytest.raises(ValueError, match="^x: got"):
        curves((0, 1), {"a": [3, 2]}, title="t", x_title="x", y_title="y", log_y=False)


def test_a_heat_map_shades_by_powers_of_ten_and_names_the_highest() -> None:
    rows = {"q": [0.001, 0.01, 0.1], "down": [1.0, 0.1, 0.01]}
    chart = heat_map(rows, title="Loss", x_title="layer", value_title="nats", highest=1)
    (squares,) = chart.figure.data
    assert list(squares.y) == ["q", "down"] and [round(z) for z in squares.z[0]] == [-3, -2, -1]
    assert chart.text.splitlines()[-1] == "highest: down at layer 0, 1"
    for wrong in ({}, {"a": [1.0], "b": [1.0, 2.0]}, {"a": [0.0]}):
        with pytest.raises(ValueError, match="^rows"):
            heat_map(wrong, title="t", x_title="x", value_title="v")


def test_the_bundle_has_text_a_picture_where_one_can_be_drawn_and_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    chart = time_shares(TIMES, title="A step")
    for picture, kept in ((b"png", "cG5n"), (None, None)):
        asked = []
        monkeypatch.setattr(charts, "to_png", lambda *_, p=picture, asked=asked, **size: asked.append(size) or p)
        bundle = chart._repr_mimebundle_()
        assert asked[0]["width"] <= 900, "a wider one is cut off in a notebook's column"
        assert bundle.get("image/png") == kept and bundle["text/plain"] == chart.text == repr(chart)
        assert bundle["application/vnd.plotly.v1+json"]["data"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: time_shares({}, title="t"), "times"),
        (lambda: time_shares(None, title="t"), "times"),
        (lambda: time_shares({"a": 3}, title="t"), "times"),
        (lambda: time_shares(TIMES, floors={"embed": 1}, title="t"), "floors"),
        (lambda: curves(None, {"a": [1]}, title="t", x_title="x", y_title="y"), "x"),
        (lambda: curves((0, 1), {"a": [1, 2]}, title="t", x_title="x", y_title="y"), "x"),
        (lambda: curves((1, 2), None, title="t", x_title="x", y_title="y"), "lines"),
        (lambda: curves((1, 2), {"a": 5}, title="t", x_title="x", y_title="y"), r"lines\['a'\]"),
        (lambda: curves((1, 2), {"a": [1]}, title="t", x_title="x", y_title="y"), r"lines\['a'\]"),
        (lambda: curves((1,), {"a": [1]}, title="t", x_title="x", y_title="y", ceiling="b"), "ceiling"),
    ],
)
def test_refusals(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        call()


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.6, 55.0], "0.5 1 2 5 10 20 50".split()),
        ([70.0, 750.0], "100 200 500".split()),
        ([0.02, 3.0], "0.02 0.05 0.1 0.2 0.5 1 2".split()),
        ([1e3, 2e8], ["1,000", "10,000", "100,000", "10<sup>6</sup>", "10<sup>7</sup>", "10<sup>8</sup>"]),
    ],
)
def test_ticks_of_a_logarithmic_axis_are_written_out_and_stand_apart(values, texts):
    axis = curves([1, 2], {"a": values}, title="t", x_title="x", y_title="y").figure.layout.yaxis
    assert axis.type == "log" and list(axis.ticktext) == texts
    places = [math.log10(value) for value in axis.tickvals]
    # A label is some 20 of the 270 pixels that the axis is high.
    apart = min(b - a for a, b in zip(places, places[1:], strict=False))
    assert apart > 20 / 270 * (math.log10(values[1]) - math.log10(values[0]))


def test_an_axis_of_many_decades_has_at_most_a_dozen_ticks_and_a_short_one_is_plotlys_own():
    wide = curves([1, 2], {"a": [1e-12, 1e12]}, title="t", x_title="x", y_title="y").figure.layout.yaxis
    assert 8 <= len(wide.tickvals) <= 12
    short = curves([1, 2], {"a": [100.0, 110.0]}, title="t", x_title="x", y_title="y").figure.layout.yaxis
    assert short.type == "log" and short.tickvals is None
    endless = curves([1, 2], {"a": [1.0, math.inf]}, title="t", x_title="x", y_title="y").figure.layout.yaxis
    assert endless.type == "log"
