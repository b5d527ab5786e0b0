import dataclasses

import pytest

from labkit.labs._figures import COLOURS
from labkit.labs._sampling_figure import build_figure, draw
from tests.labs.sampling_fixtures import by_hand
from tests.labs.speculative_fixtures import points, traces


def test_each_token_s_bars_are_its_own_probability_and_that_it_is_drawn_with():
    figure, result = build_figure(), by_hand()
    draw(figure, result, [])
    held = traces(figure)
    assert list(held["own"].x) == [0.5, 0.2, 0.1, 0.2] and list(held["own"].y) == [0, 1, 2, 3]
    assert list(held["drawn"].x) == [0.75, 0.25, 0.0, 0.0]
    assert list(held["cut"].x) == [0.0, 0.0, 0.15, 0.0], "what is cut keeps the length it had"
    words = held["words"].text
    assert "75.0%" in words[0] and "cut by top_p" in words[2] and held["words"].x[2] == 0.15
    assert list(figure.layout.yaxis.ticktext) == ["·the", "&lt;i&gt;", "↵", "<i>997 others</i>"]
    assert figure.layout.xaxis.range[1] > 0.75
    shapes = [held[name].marker.pattern.shape for name in ("drawn", "cut")]
    assert shapes[0] != shapes[1], "told apart without colour"


def test_earlier_points_stay_and_those_of_the_same_cut_are_joined():
    figure, result = build_figure(), by_hand(1.0, 0.6, 0.7)
    others = [by_hand(1.4, 0.3), by_hand(0.4, 0.5, top_k=5), by_hand(0.0, 0.8), by_hand(1.4, 0.4, 0.45)]
    draw(figure, result, [*others, by_hand(1.0, 0.1)])
    held = traces(figure)
    assert points(held["now"]) == [(1.0, 0.6)] and points(held["theory"]) == [(1.0, pytest.approx(0.7))]
    assert held["now"].error_y.array[0] == pytest.approx((0.6 * 0.4 / 30) ** 0.5)
    assert points(held["earlier"]) == [(1.4, 0.4), (0.4, 0.5), (0.0, 0.8)], "measured again: as it came out last"
    assert held["earlier theory"].y[0] == pytest.approx(0.45)
    assert points(held["curve"]) == [(0.0, 0.8), (1.0, 0.6), (1.4, 0.4)]
    strong, weak, _ = held["earlier"].marker.opacity
    assert weak < strong < 1 and held["earlier"].marker.symbol == ("square", "square-open", "square")
    assert held["now"].marker.color == COLOURS["int4 copy"] and 0.8 < figure.layout.yaxis2.range[1] <= 1.03


def test_while_texts_are_drawn_there_is_no_point_yet():
    figure, result = build_figure(), by_hand()
    draw(figure, dataclasses.replace(result, texts=result.texts[:2]), [by_hand(0.2)])
    held = traces(figure)
    assert not points(held["now"]) and not points(held["theory"]) and len(points(held["earlier"])) == 1
    assert list(held["drawn"].x) == [0.75, 0.25, 0.0, 0.0]
