"""Words in the labs' figures stand clear of lines, marks and one another."""

import dataclasses
import math

import pytest

from labkit.labs import (
    _eviction_figure,
    _flash_attention_figure,
    _kv_cache_figure,
    _paging_figure,
    _quantization_figure,
    _roofline_figure,
    _sampling_figure,
    _speculative_figure,
    _stack_figure,
    _tile_walk_figure,
)
from labkit.labs import _eviction_result as eviction
from labkit.labs._figures import HALO
from labkit.labs._kv_cache_result import BITS, FULL, SEQ_LENS, KVCacheParams, KVCacheResult, Sizes
from labkit.labs._paging_result import PagingParams, PagingResult, Replay
from labkit.roofline import attainable_flops
from tests.labs import sampling_fixtures, speculative_fixtures
from tests.labs.flash_attention_fixtures import LENGTHS, by_hand
from tests.labs.roofline_fixtures import CEILINGS
from tests.labs.speculative_fixtures import costs, points, traces

BUILD = {
    "eviction": _eviction_figure.build_figure,
    "flash_attention": lambda: _flash_attention_figure.build_figure(LENGTHS, "tiled"),
    "kv_cache": lambda: _kv_cache_figure.build_figure((9, 3, 1)),
    "paging": _paging_figure.build_figure,
    "quantization": _quantization_figure.build_figure,
    "roofline": _roofline_figure.build_figure,
    "sampling": _sampling_figure.build_figure,
    "speculative": _speculative_figure.build_figure,
    "stack": _stack_figure.build_figure,
    "tile_walk": _tile_walk_figure.build_figure,
}
# Pixels that a character of 14 takes on average in DejaVu Sans, which is wider than what a page has as a rule.
CHARACTER = 7.0


def every_text(trace):
    """Where each text of a trace stands."""
    place = trace.textposition
    return {place} if isinstance(place, str) else set(place)


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_a_lines_name_stands_off_the_line(build):
    named = [t for t in build().data if t.type == "scatter" and {"lines", "text"} <= set((t.mode or "").split("+"))]
    beside = [t for t in named if every_text(t) != {"middle right"} and t.name != "error"]
    for trace in beside:
        # plotly leaves room for a mark alone, seen or not.
        assert "markers" in trace.mode and trace.marker.opacity == 0 and trace.marker.size >= 8, trace.name


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_words_have_a_halo_where_a_line_lies_under_them(build):
    figure = build()
    (points_look,) = figure.layout.template.data.scatter
    assert points_look.textfont.shadow == HALO
    own = {t.name for t in figure.data if t.type == "scatter" and t.textfont.shadow}
    assert own <= {"sequences"}, "a block's number alone has its colour behind it and no halo"


def test_the_attention_labs_labels_are_drawn_over_its_lines():
    order = [(t.xaxis, t.name) for t in BUILD["flash_attention"]().data]
    for axis, words, lines in (
        ("x", "labels time", ["floor"]),
        ("x2", "labels memory", ["standard formula", "native formula"]),
    ):
        assert all(order.index((axis, line)) < order.index((axis, words)) for line in lines)


def test_the_roofs_names_stand_over_its_flat_part_where_no_point_is():
    figure = BUILD["flash_attention"]()
    result = dataclasses.replace(by_hand({64: (1.0, 2.0, 3.0), 128: (4.0, 5.0, 6.0)}), ceilings=CEILINGS)
    _flash_attention_figure.draw(figure, result, [])
    roof = traces(figure)["roof"]
    said = [(text, y) for text, y in zip(roof.text, roof.y, strict=True) if text]
    assert len(said) == 1 and said[0][1] == attainable_flops(1e9, CEILINGS, "float32")
    assert "10.0 TB/s" in said[0][0] and "40.0 TFLOP/s" in said[0][0] and every_text(roof) == {"top left"}


def test_free_memory_and_weights_end_where_the_curves_names_begin():
    curves = {bits: {n: n * bits for n in SEQ_LENS} for bits in BITS}
    # As many bytes of weights as the curve of 4 bits ends at: its name is where the line would go on.
    sizes = Sizes(1, 1, 1, 1, 64, 1, 1, curves[4][SEQ_LENS[-1]], 10**9, curves)
    result = KVCacheResult(KVCacheParams(256, 3, FULL), 3, "cpu", "bfloat16", "float32", 8192, sizes)
    figure = BUILD["kv_cache"]()
    _kv_cache_figure.draw(figure, result, [], (9, 3, 1))
    held = traces(figure)
    for name in ("weights", "free memory"):
        assert max(held[name].x) == max(held["curve 4"].x)
    assert figure.layout.xaxis.range[1] > math.log10(max(held["weights"].x)) + 0.5, "room for the names"


def eviction_result(budget: float, method: str) -> eviction.EvictionResult:
    """Everything found within this share of ten tokens."""
    span = eviction.Span(0, 1)
    kept = eviction.Kept(((1,) * 10,), ("t",) * 10, 1, span, span, span, 1, 1, 1, 1, 1, "1", "1", True)
    found = eviction.Needles((True,) * 10, 10)
    quality = eviction.Quality(11.5, 11.5, 96, 96, 512)
    params = eviction.EvictionParams(method, budget, model="tiny")
    return eviction.EvictionResult(params, "cpu", "float32", kept, (0.5,) * 10, found, found, quality)


@pytest.mark.parametrize("method", ["window", "snapkv"])
@pytest.mark.parametrize("budget", eviction.BUDGETS)
def test_all_tokens_line_is_named_where_the_setting_at_hand_says_nothing(budget, method):
    figure = BUILD["eviction"]()
    _eviction_figure.draw(figure, eviction_result(budget, method), [])
    held = traces(figure)
    for kind, axis in (("needles", "xaxis2"), ("perplexity", "xaxis3")):
        low, high = figure.layout[axis].range
        pixels = 350 / (high - low)
        point, line = held[kind], held[f"all tokens' {kind}"]
        at, half = math.log10(point.x[0]) * pixels, len(point.text[0]) * CHARACTER / 2
        # From its middle; at the ends of the axis to one side.
        shift = {"top center": 0, "middle left": -half - 8, "top right": half + 8}[point.textposition]
        mine = (at + shift - half, at + shift + half)
        assert low * pixels < mine[0] and mine[1] < high * pixels, "not cut off"
        size = (line.textfont.size or 14) / 14
        start, long = math.log10(line.x[0]) * pixels, len(line.text[0].strip()) * CHARACTER * size + 8
        its = (start, start + long) if line.textposition == "top right" else (start - long, start)
        assert mine[1] < its[0] or its[1] < mine[0], (kind, mine, its)


@pytest.mark.parametrize("gamma", range(1, 9))
def test_plain_decoding_is_named_clear_of_the_point_and_the_curves(gamma):
    figure = BUILD["speculative"]()
    result = speculative_fixtures.by_hand(gamma, 0.9, alpha=0.3)
    # Drafting is so dear that the time model falls from the start, while E rises.
    dear = {n: costs(n, draft_cost=0.3, verify_cost=1.5) for n in range(1, 9)}
    _speculative_figure.draw(figure, dataclasses.replace(result, costs=dear), [])
    held, (low, high) = traces(figure), figure.layout.xaxis.range
    pixels, even = 400 / (high - low), held["even"]
    (at,) = [i for i, text in enumerate(even.text) if text]
    long = len(even.text[at].strip()) * CHARACTER / pixels
    left = even.x[at] if even.textposition.endswith("right") else even.x[at] - long
    ((x, _),) = points(held["speed-up"])
    words = len("0.90x") * 1.3 * CHARACTER / pixels
    assert left + long < x or x + words < left, "the point and its words"
    above = even.textposition.startswith("top")
    height = 25 / (335 / figure.layout.yaxis.range[1])  # of a name and its distance from the line
    for name in ("time model", "free drafts"):
        near = [y for n, y in points(held[name]) if left - 0.5 <= n <= left + long + 0.5]
        assert all(y > 1 + height or y <= 1 if above else y < 1 - height or y >= 1 for y in near), name


@pytest.mark.parametrize(
    ("temperature", "past", "side"),
    [
        (1.2, (), "left"),
        (1.2, (0.8,), "right"),
        (1.2, (0.8, 1.4), "left"),  # there is no free side
        (0.4, (), "right"),
        (2.0, (1.8,), "left"),  # the axis ends
        (0.8, (1.2,), "left"),
    ],
)
def test_acceptance_is_said_on_the_side_where_no_earlier_point_stands(temperature, past, side):
    figure = BUILD["sampling"]()
    earlier = [sampling_fixtures.by_hand(other) for other in past]
    _sampling_figure.draw(figure, sampling_fixtures.by_hand(temperature), earlier)
    assert traces(figure)["now"].textposition == f"middle {side}"


@pytest.mark.parametrize(("size", "place"), [(1, "top center"), (16, "top left"), (256, "top left")])
def test_the_empty_share_is_said_off_the_formulas_line(size, place):
    replay = Replay(0.01, 10, 1000.0, 0, 10.0, ())
    figure = BUILD["paging"]()
    _paging_figure.draw(figure, PagingResult(PagingParams(size, 2048, 0), replay, replay), [])
    assert traces(figure)["paged by size"].textposition == place
