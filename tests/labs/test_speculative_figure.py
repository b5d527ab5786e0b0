import dataclasses

import pytest

from labkit.labs._figures import COLOURS
from labkit.labs._speculative_figure import build_figure, draw
from tests.labs.speculative_fixtures import by_hand, call, points, traces


def test_the_figure_holds_the_curves_of_this_setting_and_the_claim():
    figure, result = build_figure(), by_hand(4, 1.5)
    draw(figure, result, [])
    held = traces(figure)
    assert points(held["speed-up"]) == [(4, 1.5)] and held["speed-up"].marker.color == COLOURS["prompt lookup"]
    assert points(held["time model"]) == [(n, result.model(n)) for n in range(9)] and held["time model"].y[0] == 1
    assert points(held["free drafts"]) == [(n, result.formula(n)) for n in range(9)]
    assert set(held["even"].y) == {1} and "1x" in "".join(held["even"].text)
    low, top = figure.layout.yaxis.range
    assert low == 0 and top == 4.5 and max(held["time model"].y) < top
    # 1 / (1 - α) = 5 is beyond the axis: the line stands at its edge and says so.
    assert max(held["folk claim"].y) < top and "5x (beyond the axis)" in held["folk claim"].text[0]
    draw(figure, by_hand(4, 1.5, alpha=0.5), [])
    assert set(traces(figure)["folk claim"].y) == {2.0} and "beyond" not in traces(figure)["folk claim"].text[0]
    dashes = {held[name].line.dash for name in ("time model", "free drafts", "folk claim")}
    assert len(dashes) == 3
    draw(figure, by_hand(0, 1.0), [])
    assert not points(traces(figure)["folk claim"]) and points(traces(figure)["speed-up"]) == [(0, 1.0)]


def test_earlier_points_stay_and_those_of_the_same_curve_stand_out():
    figure, result = build_figure(), by_hand(4, 1.5)
    others = [by_hand(2, 1.3), by_hand(8, 0.9), by_hand(4, 1.1, temperature=1.0), by_hand(2, 1.2)]
    draw(figure, result, [*others, by_hand(4, 1.4)])
    earlier = traces(figure)["earlier"]
    assert list(earlier.x) == [2, 8, 4], "measured again: one point"
    assert list(earlier.y) == pytest.approx([1.2, 0.9, 1.1]), "as it came out last"
    strong, _, weak = earlier.marker.opacity
    assert weak < strong < 1 and [*earlier.marker.opacity] == [strong, strong, weak]
    fast = by_hand(4, 7.0)
    draw(figure, result, [fast, by_hand(1, 7.0)])
    assert figure.layout.yaxis.range[1] > 7.0


def test_one_call_stands_beside_the_plain_steps_it_replaces():
    figure, result = build_figure(), by_hand(4, 1.5)
    draw(figure, result, [])
    held = traces(figure)
    assert sum(held["plain steps"].x) == pytest.approx(1e3 * 3.0 * 0.01) and len(held["plain steps"].x) == 4
    parts = {name: held[name].x[0] for name in ("draft", "verify", "rest")}
    assert parts == {"draft": pytest.approx(4.0), "verify": pytest.approx(11.8), "rest": pytest.approx(0.2)}
    assert held["clocked"].x[0] == pytest.approx(1e3 * 3.0 * 0.01)
    assert figure.layout.xaxis2.range[1] > 30 and "clocked: 30.0 ms" in held["call words"].text[1]
    # Where a call in two has a draft, the other takes a plain step.
    half = (*result.calls[:2], call("", 0, "x", "bonus"))
    draw(figure, dataclasses.replace(result, calls=half), [])
    assert traces(figure)["verify"].x[0] == pytest.approx((11.8 + 10) / 2)
    assert traces(figure)["rest"].x[0] == pytest.approx(0.1)
    draw(figure, dataclasses.replace(result, costs={}, rounds=()), [])
    assert not any(
        points(traces(figure)[name]) for name in ("plain steps", "draft", "clocked", "call words", "speed-up")
    )
