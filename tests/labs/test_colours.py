"""One colour for each technique in all figures, and no colour from anywhere but the course's palette."""

import ast
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plotly.colors import get_colorscale

import labkit.labs
from labkit.labs import (
    _eviction_figure,
    _figures,
    _paging_figure,
    _quantization_figure,
    _roofline_figure,
    _sampling_figure,
    _speculative_figure,
    _speculative_trace,
    _stack_figure,
    _tile_walk_figure,
)
from labkit.labs._figures import COLOURS, line_looks, technique
from labkit.labs.charts import curves, time_shares
from labkit.measure import Timing

FILES = sorted(Path(labkit.labs.__file__).parent.glob("*.py"))
HEX = re.compile(r"#[0-9a-fA-F]{3,8}\b")
# What a page's own theme does not say is told to it as a fallback; the page's colours are not the figures'.
THEMED = re.compile(r"var\(--jp-[^)]*\)")
PALETTE = {value for value in vars(_figures).values() if isinstance(value, str) and HEX.fullmatch(value)}
PLAIN = {"white", "rgba(0,0,0,0)", "rgba(255,255,255,0.7)"}
LADDER = ("baseline", "step", "bfloat16", "int8", "int4", "attention rung", "quantized KV", "speculation")


def named_colours(source):
    """Colours that a module writes out: hex anywhere, and a word or a scale's name where a colour is set."""
    tree = ast.parse(source)
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = [match for text in texts for match in HEX.findall(THEMED.sub("", text))]
    pairs = [(n.arg, n.value) for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg]
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            pairs += [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
    for key, value in pairs:
        is_colour = isinstance(key, str) and re.search(r"color(scale|way)?$", key)
        if is_colour and isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value not in PLAIN:
            found.append(value.value)
    return found


@pytest.mark.parametrize("path", [f for f in FILES if f.name != "_figures.py"], ids=lambda path: path.name)
def test_no_module_but_the_palette_names_a_colour(path):
    assert named_colours(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    ['X = "#0072B2"', 'f(marker_color="red")', '{"color": "blue"}', '{"colorscale": "Viridis"}', 'C = [[0, "#fff"]]'],
)
def test_a_colour_that_is_written_out_is_seen(source):
    assert len(named_colours(source)) == 1


def colours_of(figure):
    """Every colour of a figure's traces, axes and notes, outside its template."""
    drawn = figure.to_dict()
    drawn["layout"].pop("template", None)
    return set(HEX.findall(repr(drawn)))


@pytest.mark.parametrize(
    "module",
    [
        _eviction_figure,
        _paging_figure,
        _quantization_figure,
        _roofline_figure,
        _sampling_figure,
        _speculative_figure,
        _stack_figure,
        _tile_walk_figure,
    ],
)
def test_a_labs_figure_holds_colours_of_the_palette_alone(module):
    figure = go.Figure(module.build_figure())
    scales = (_figures.SHARES, *map(get_colorscale, (_figures.MAGNITUDES, _figures.DECADES)))
    assert colours_of(figure) and colours_of(figure) <= PALETTE | {colour for scale in scales for _, colour in scale}


def test_each_technique_has_a_colour_of_the_palette_and_each_rung_its_own():
    assert set(COLOURS.values()) <= PALETTE
    assert len({COLOURS[rung] for rung in LADDER}) == len(LADDER)


@pytest.mark.parametrize(
    ("rung", "own"),
    [
        ("baseline", "float"),
        ("int4", "int4 copy"),
        ("attention rung", "own attention"),
        ("speculation", "EAGLE head"),
    ],
)
def test_a_rung_has_the_colour_that_its_technique_has_in_its_chapter(rung, own):
    assert COLOURS[rung] == COLOURS[own]


@pytest.mark.parametrize(
    "together",
    [
        ("float", "bfloat16", "RTN", "AWQ", "GPTQ", "QAT", "ceiling"),
        ("bfloat16", "int8", "int4", "ceiling"),
        ("float", "window", "sinks + window", "heavy hitters", "SnapKV", "ceiling"),
        ("paged KV", "reserved KV", "ceiling"),
        ("standard attention", "native attention", "own attention", "ceiling"),
        ("EAGLE head", "prompt lookup", "int4 copy", "ceiling", "free drafts", "folk claim"),
        ("accepted", "rejected", "residual", "bonus", "plain"),
        ("MLP", "projections", "attention", "LM head", "elementwise", "other", "ceiling"),
    ],
)
def test_what_stands_in_one_figure_is_told_apart(together):
    assert len({COLOURS[name] for name in together}) == len(together)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("GPTQ", "GPTQ"),
        ("4 bits", "int4"),
        ("4 bits, dequantized first", "int4"),
        ("tiles, 2,048 tokens", "own attention"),
        ("PyTorch's kernel", "native attention"),
        ("3 bits, trained", "QAT"),
        ("float, tuned on the same batches", "float"),
        ("measured", None),
        ("q, k, v", None),
        ("", None),
    ],
)
def test_a_lines_name_says_its_technique(name, key):
    assert technique(name) == key


def test_a_line_has_its_techniques_colour_whatever_stands_beside_it():
    for names in (["4 bits"], ["16 bits", "4 bits"], ["a", "b", "8 bits", "4 bits", "c"]):
        chart = curves((1, 2), dict.fromkeys(names, [1, 2]), title="t", x_title="x", y_title="y")
        drawn = {line.name: line.line.color for line in chart.figure.data}
        assert drawn["4 bits"] == COLOURS["int4"] and len(set(drawn.values())) == len(names)


def test_two_forms_of_a_technique_share_its_colour_and_not_its_look():
    chart = curves(
        (1, 2),
        {"tiles, 1": [1, 2], "tiles, 2": [2, 3], "roof": [9, 9]},
        ceiling="roof",
        title="t",
        x_title="x",
        y_title="y",
    )
    one, two, roof = chart.figure.data
    assert one.line.color == two.line.color == COLOURS["own attention"] and roof.line.color == COLOURS["ceiling"]
    assert (one.line.dash, two.line.dash) == (None, "dot") and one.marker.symbol != two.marker.symbol


def test_many_lines_without_a_technique_are_still_told_apart():
    names = [f"line {i}" for i in range(9)]
    looks = line_looks(names)
    assert len({tuple(look.values()) for look in looks.values()}) == len(names)


def test_a_steps_bars_have_the_colours_of_their_families():
    second = Timing(1.0, 1.0, 1.0, 1)
    bars = time_shares(
        dict.fromkeys(("q_proj", "up_proj", "attention", "lm_head", "rope", "new op"), second), title="t"
    )
    (bar,) = bars.figure.data
    by_op = dict(zip(bar.y, bar.marker.color, strict=True))
    families = {"q_proj": "projections", "up_proj": "MLP", "attention": "attention", "lm_head": "LM head"}
    families |= {"rope": "elementwise", "new op": "other"}
    assert by_op == {op: COLOURS[family] for op, family in families.items()}


def test_a_tokens_mark_has_the_colour_of_its_kind():
    for kind in ("accepted", "residual", "bonus"):
        rule = re.search(rf"\.labkit-{kind} {{([^}}]*)}}", _speculative_trace.STYLE)[1]
        assert HEX.findall(rule) == [COLOURS[kind]]
