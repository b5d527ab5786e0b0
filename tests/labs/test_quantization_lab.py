import dataclasses
import math

import pytest

from labkit.labs import _quantization_compute, quantization_lab
from labkit.labs._figures import COLOURS
from labkit.labs._quantization_figure import SYMBOLS
from labkit.labs._quantization_forms import percent, plain, share
from labkit.labs._quantization_result import METHODS
from labkit.labs.quantization import _group_sizes, groups_or_bits
from labkit.quantization.recorded import RecordedRun
from tests.labs.quantization_fixtures import CPU, KINDS, loaded
from tests.labs.roofline_fixtures import CEILINGS

WAIT_S = 60.0
RUN = RecordedRun("GPTQ", 4, 64, False, 300.0, 4.42, 130.0, 250.0, "tiny", "a machine", "2026-11-30", "abc")


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr(_quantization_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *_: None)


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def lab(model, ledger):
    lab = quantization_lab(model, device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {trace.name: trace for trace in lab.figure.data}


def test_each_knob_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, bits=8)
    move(lab, group_size=32)
    move(lab, method="GPTQ")
    lines = [m for m in ledger.read() if m.name == "quantization_lab.bits_per_weight"]
    settings = [(*(m.params[key] for key in ("bits", "group_size", "method", "model")), m.value) for m in lines]
    assert settings[:3] == [
        (4, 64, "RTN", "tiny", 4.375),
        (8, 64, "RTN", "tiny", 8.375),
        (8, 32, "RTN", "tiny", 8.75),
    ]
    assert settings[3][:4] == (8, 32, "GPTQ", "tiny") and 8.75 < settings[3][4] < 9.5


def test_every_matrix_is_a_cell_of_the_map_on_a_logarithmic_scale(lab):
    whole = traces(lab)["error by layer"]
    assert list(whole.y) == [kind.removesuffix("_proj") for kind in KINDS] and list(whole.x) == [0, 1]
    for row, kind in zip(whole.z, KINDS, strict=True):
        assert list(row) == pytest.approx([math.log10(e) for e in lab.result.layers.by_kind[kind]])
    low, high = lab.figure.layout.coloraxis.cmin, lab.figure.layout.coloraxis.cmax
    assert all(low < value < high for row in whole.z for value in row)


def test_the_block_stands_beside_round_to_nearest_and_is_marked_in_the_map(lab):
    assert not lab.figure.layout.shapes and len(traces(lab)["error in detail"].x) == 1
    move(lab, method="GPTQ")
    detail, block = traces(lab)["error in detail"], lab.result.block
    assert [name.replace("<br>", " ") for name in detail.x[1:]] == ["RTN, layer 1", "GPTQ, layer 1"]
    shown = [(row[1], row[2]) for row in detail.text]
    assert shown == [(percent(block.rtn[kind]), percent(block.errors[kind])) for kind in KINDS]
    (shape,) = lab.figure.layout.shapes
    assert (shape.x0, shape.x1) == (0.5, 1.5)
    move(lab, method="RTN")
    assert not lab.figure.layout.shapes


def test_perplexity_stands_over_the_stored_bits_and_earlier_points_stay(lab):
    first = lab.result
    move(lab, bits=8)
    now, earlier = traces(lab)["perplexity"], traces(lab)["earlier perplexity"]
    assert (list(now.x), list(now.y)) == ([8.375], [lab.result.quality.perplexity])
    assert list(now.marker.symbol) == ["circle"] and list(now.marker.color) == [COLOURS["RTN"]]
    assert (list(earlier.x), list(earlier.y)) == ([4.375], [first.quality.perplexity])
    assert list(earlier.text) == ["4/64"] and earlier.marker.opacity < 1
    float_line = traces(lab)["float"]
    assert float_line.line.dash == "dash" and set(float_line.y) == {lab.result.quality.baseline}


def test_a_perplexity_beyond_the_axis_stands_at_its_edge_with_its_value(lab):
    base = lab.result.quality.baseline
    quality = dataclasses.replace(lab.result.quality, perplexity=100 * base)
    exploded = dataclasses.replace(lab.result, quality=quality)
    for earlier in ((), (exploded,)):
        lab.spec.draw(lab.figure, exploded, earlier)
        for name in ("perplexity", "earlier perplexity")[: 1 + len(earlier)]:
            trace = traces(lab)[name]
            low, high = (10**exponent for exponent in lab.figure.layout.yaxis3.range)
            assert list(trace.marker.symbol) == ["triangle-up"] and low < base < trace.y[0] < high < 10 * base
            assert plain(100 * base) in trace.hovertext[0]
    assert list(traces(lab)["perplexity"].text) == [plain(100 * base)]


def test_a_recorded_perplexity_is_hollow_and_a_missing_one_is_said(lab, monkeypatch):
    move(lab, method="GPTQ")
    now = traces(lab)["perplexity"]
    assert now.mode == "text" and list(now.text) == ["GPTQ, 4 bits, groups of 64: not recorded "]
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *_: RUN)
    move(lab, bits=8)
    assert list(now.y) == [300.0] and list(now.marker.symbol) == ["diamond-open"]
    assert list(now.marker.color) == [COLOURS["GPTQ"]] and "markers" in now.mode
    assert "RECORDED 2026-11-30:<br>a machine" in now.hovertext[0]
    move(lab, method="RTN")
    assert list(now.marker.symbol) == ["circle"]
    assert list(traces(lab)["earlier perplexity"].marker.symbol) == ["circle", "diamond-open"]


def test_speed_stands_under_the_measured_bandwidth(lab):
    first = lab.result
    move(lab, bits=2)
    held, result = traces(lab), lab.result
    for x, y in zip(held["ceiling"].x, held["ceiling"].y, strict=True):
        assert x * y == pytest.approx(CEILINGS.read_bandwidth / 1e6)
    assert (list(held["speed"].x), list(held["speed"].y)) == (
        [result.speed.read_bytes / 1e6],
        [result.speed.tokens_per_second],
    )
    assert list(held["earlier speed"].y) == [first.speed.tokens_per_second]
    assert list(held["bfloat16"].y) == [result.float_speed.tokens_per_second]
    for name in ("speed", "earlier speed", "bfloat16"):
        for axis, at in (("xaxis4", held[name].x[0]), ("yaxis4", math.log10(held[name].y[0]))):
            low, high = lab.figure.layout[axis].range
            assert low < at < high


def test_each_method_has_a_colour_and_a_shape_of_its_own(lab):
    legend = {trace.name: trace.marker for trace in lab.figure.data if trace.name in METHODS}
    assert list(legend) == list(METHODS)
    for method, marker in legend.items():
        assert (marker.color, marker.symbol) == (COLOURS[method], SYMBOLS[method])
    names = ("RTN", "AWQ", "GPTQ", "QAT", "float")
    assert len({COLOURS[name] for name in names}) == len(names)


def test_the_guess_is_answered_by_nearly_equal_bytes(lab):
    lab.prediction.guess.value = "4 bits: smaller and better"
    assert groups_or_bits(lab.finished) is None
    move(lab, bits=3, method="GPTQ", group_size=16)
    assert groups_or_bits(lab.finished) is None, "the question is about round-to-nearest"
    move(lab, method="RTN")
    answer = groups_or_bits(lab.finished)
    assert "store 4.5 bits a weight" in answer and "store 4.375 bits a weight" in answer
    for result in (lab.finished[0], lab.result):
        assert f"perplexity {plain(result.quality.perplexity)}" in answer
    assert f"Your guess: 4 bits: smaller and better. Measured: {answer[:20]}" in lab.prediction._verdict.value


def test_a_setting_that_does_not_fit_is_shown_and_the_next_move_works(lab):
    lab.spec.compute._free_bytes = lambda: 1000
    lab.spec.knobs["bits"].value = 8
    assert lab.wait(WAIT_S)
    assert "takes a smaller model" in lab.status.text and isinstance(lab.error, ValueError)
    lab.spec.compute._free_bytes = lambda: 10**12
    move(lab, bits=3)
    assert lab.result.params.bits == 3 and "labkit-error" not in lab.status.text


def test_only_group_sizes_that_divide_the_model_are_offered(lab):
    assert [value for _, value in lab.spec.knobs["group_size"].options] == [16, 32, 64, -1]
    assert _group_sizes("smollm2-135m", CPU) == (16, 32, 64, 96, -1)
    odd = loaded(hidden_size=96, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2)
    assert _group_sizes(odd, CPU) == (16, 32, -1)


def test_bad_arguments_are_named():
    for values, name in (({"model": 3}, "model"), ({"device": "tpu"}, "device"), ({"text": 3}, "text")):
        with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
            quantization_lab(**values)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (percent, 0.0000312, "0.00312%"),
        (percent, 0.481, "48.1%"),
        (percent, 2.01, "201%"),
        (plain, 14.57, "14.6"),
        (plain, 2130.4, "2,130"),
        (plain, 3.14e7, "3.1e+07"),
        (plain, math.inf, "inf"),
        (share, 1.05, "105%"),
        (share, 0.0033, "0.33%"),
    ],
)
def test_figures_are_written_to_be_read(form, value, text):
    assert form(value) == text
