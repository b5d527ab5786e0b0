import dataclasses

import plotly.graph_objects as go
import pytest

from labkit.engine.ladder import RUNGS
from labkit.labs._figures import COLOURS
from labkit.labs._stack_figure import build_figure, draw
from tests.labs.stack_fixtures import ALL, by_hand

FOUR = ("step", "bfloat16", "int4")


def drawn(result, earlier=()) -> tuple[go.Figure, dict]:
    figure = build_figure()
    draw(figure, result, earlier)
    return figure, {trace.name: trace for trace in figure.data}


def rows(trace) -> dict[float, list]:
    """x by y."""
    found: dict[float, list] = {}
    for x, y in zip(trace.x or (), trace.y or (), strict=True):
        found.setdefault(y, []).append(x)
    return found


def test_a_row_is_the_baseline_this_set_and_each_set_before_the_latest_first():
    before = [by_hand("step", speedup=1.2), by_hand("step", "bfloat16", speedup=1.5)]
    figure, held = drawn(by_hand(*FOUR, speedup=3.0), before)
    speeds = rows(held["speed"])
    assert speeds == {0.0: [10.0], -1.0: [pytest.approx(30)], -2.0: [pytest.approx(15)], -3.0: [pytest.approx(12)]}
    assert held["speed"].marker.opacity[:2] == (1.0, 1.0) and max(held["speed"].marker.opacity[2:]) < 0.5
    assert held["speed"].marker.color == tuple(COLOURS[k] for k in ("baseline", "int4", "bfloat16", "step"))
    assert "<b>30 tokens/s: 3x</b>" in held["speed words"].text and held["speed"].hovertext[1].count("MEASURED") == 1
    names = list(RUNGS)
    on = {y: [names[x] for x in xs] for y, xs in rows(held["on"]).items()}
    assert on == {-1.0: list(FOUR), -2.0: ["step", "bfloat16"], -3.0: ["step"]}
    assert len(held["on"].x) + len(held["off"].x) == 4 * len(RUNGS)
    low, top = figure.layout.yaxis.range
    assert low < -3.3 and top > 0.3 and figure.layout.yaxis.ticktext[:2] == ("baseline", "<b>this set</b> ")


def test_a_set_measured_again_stands_once_as_it_came_out_last():
    before = [by_hand("step", speedup=1.2), by_hand(*FOUR, speedup=2.0), by_hand("step", speedup=1.4)]
    _, held = drawn(by_hand(*FOUR, speedup=3.0), before)
    assert rows(held["speed"]) == {0.0: [10.0], -1.0: [pytest.approx(30)], -2.0: [pytest.approx(14)]}
    many = [by_hand("step", "speculation", num_assistant_tokens=n) for n in range(1, 7)]
    many += [by_hand(*FOUR, "speculation", num_assistant_tokens=n) for n in range(1, 7)]
    figure, held = drawn(by_hand(), many)
    assert min(held["speed"].y) == -8.0, "the latest ones"
    assert figure.layout.yaxis.ticktext[2] == "before, γ 6 "


def test_each_set_has_its_ceiling_and_what_the_popular_ladder_says_of_it():
    result = by_hand(*FOUR, speedup=3.0)
    _, held = drawn(result, [by_hand("step")])
    assert rows(held["ceiling"]) == {-1.0: [result.ceiling]} and result.ceiling == pytest.approx(50.0)
    assert rows(held["earlier ceilings"]) == {-2.0: [pytest.approx(50.0)]}
    assert rows(held["popular"]) == {-1.0: [pytest.approx(30.0)]}, "3x of the baseline's 10; nothing of the own step"
    assert held["popular"].marker.symbol == "diamond-open" and "MODELLED" in held["ceiling"].hovertext[0]
    _, held = drawn(by_hand(*ALL))
    assert rows(held["popular"]) == {-1.0: [pytest.approx(80.0)]}
    assert rows(held["popular memory"]) == {-1.0: [pytest.approx(0.3 * 480)]}


def test_memory_is_weights_and_the_rest_beside_the_baselines():
    result = by_hand(*FOUR)
    _, held = drawn(result)
    assert rows(held["weights"]) == {0.0: [400.0], -1.0: [100.0]}
    assert rows(held["rest"]) == {0.0: [80.0], -1.0: [20.0]}
    assert list(held["memory words"].text) == ["480 MB", "<b>120 MB: 25%</b>"]
    early = dataclasses.replace(result.sizes, peak_bytes=0)
    base = dataclasses.replace(result.base_sizes, peak_bytes=0)
    _, held = drawn(dataclasses.replace(result, sizes=early, base_sizes=base))
    assert rows(held["rest"]) == {0.0: [0.0], -1.0: [0.0]} and "of weights" in held["memory words"].text[1]


def test_a_rung_that_is_left_out_is_crossed_with_its_reason():
    result = by_hand("bfloat16", left_out={"speculation": "needs the own step"})
    _, held = drawn(result, [by_hand("int4", left_out={"speculation": "needs the own step"})])
    assert rows(held["refused"]) == {-1.0: [list(RUNGS).index("speculation")]}
    assert "needs the own step" in held["refused"].hovertext[0]


def test_int4_takes_int8s_place_in_the_row():
    _, held = drawn(by_hand("int8", "int4"))
    assert [list(RUNGS)[x] for x in held["on"].x] == ["int4"]
    assert [list(RUNGS)[x] for x in held["refused"].x] == ["int8"], "crossed, as the numbers say"
    assert "INT4 takes its place" in held["refused"].hovertext[0]


def test_what_is_not_measured_yet_is_not_drawn():
    start = dataclasses.replace(by_hand(*FOUR), first=None, kept=None, turns=(), bandwidth=0.0, quality=None)
    _, held = drawn(start)
    for name in ("speed", "ceiling", "earlier ceilings", "popular", "speed words"):
        assert not held[name].x, name
    assert rows(held["weights"])[-1.0] == [100.0]
    look = dataclasses.replace(by_hand(*FOUR), kept=None, turns=(), bandwidth=0.0)
    _, held = drawn(look)
    assert list(held["speed"].y) == [-1.0] and not held["ceiling"].x and not held["popular"].x
