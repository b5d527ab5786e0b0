import dataclasses
import math

import pytest
import torch

from labkit.labs import _kv_cache_compute, kv_cache_lab
from labkit.labs._figures import COLOURS
from labkit.labs._kv_cache_result import BITS, SEQ_LENS
from labkit.labs.kv_cache import _shape, group_size, head_options, how_many_times
from tests.labs.kv_cache_fixtures import HEAD_DIM, LAYERS, STUDY, loaded
from tests.labs.roofline_fixtures import CEILINGS

WAIT_S = 60.0


pytestmark = pytest.mark.usefixtures("fixed_kv_cache")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def lab(model, ledger):
    lab = kv_cache_lab(model, device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {trace.name: trace for trace in lab.figure.data}


def notes(lab) -> dict:
    return {note.name: note for note in lab.figure.layout.annotations if note.name}


def points(trace) -> list[tuple]:
    return list(zip(trace.x, trace.y, trace.marker.symbol, trace.marker.color, strict=True))


def test_each_knob_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, seq_len=512)
    move(lab, num_key_value_heads=1)
    move(lab, bits=4)
    lines = [m for m in ledger.read() if m.name == "kv_cache_lab.cache_bytes"]
    keys = ("seq_len", "num_key_value_heads", "bits", "q_group_size", "residual_length", "model")
    settings = [tuple(m.params[key] for key in keys) for m in lines]
    assert settings == [
        (4096, 2, 16, 32, 32, "tiny"),
        (512, 2, 16, 32, 32, "tiny"),
        (512, 1, 16, 32, 32, "tiny"),
        (512, 1, 4, 32, 32, "tiny"),
    ]
    full = LAYERS * 2 * HEAD_DIM * 2
    # Of 512 tokens 448 are in codes of 4 bits with a bit more for scale and minimum each; each layer has a counter.
    small = LAYERS * (2 * HEAD_DIM * (448 * 5 // 8 + 64 * 2) + 4)
    assert [m.value for m in lines] == [full * 2 * 4096, full * 2 * 512, full * 512, small]


def test_bytes_over_length_for_all_bits_at_the_chosen_heads(lab):
    first = lab.result
    move(lab, num_key_value_heads=1, bits=4)
    held, sizes = traces(lab), lab.result.sizes
    for bits in BITS:
        curve = held[f"curve {bits}"]
        assert dict(zip(curve.x, curve.y, strict=True)) == sizes.curves[bits] and list(curve.x) == list(SEQ_LENS)
        assert (curve.line.width == 4) == (bits == 4)
        assert curve.line.color == COLOURS["float" if bits == 16 else "quantized KV"]
    # 4,032 tokens in codes of 5 bits with their grids, 64 in 16 bits, for one head's keys and values; a counter.
    total = LAYERS * (2 * HEAD_DIM * (4032 * 5 // 8 + 64 * 2) + 4)
    assert points(held["bytes"]) == [(4096, total, "square", COLOURS["quantized KV"])]
    assert points(held["earlier bytes"])[0][:2] == (4096, first.sizes.total)
    assert notes(lab)["bytes"].text == "339 kB" and notes(lab)["bytes"].visible
    for name, value in (("free memory", sizes.free), ("weights", sizes.weights)):
        assert set(held[name].y) == {value} and name in held[name].text[0]
    low, high = (10**end for end in lab.figure.layout.yaxis.range)
    shown = [*sizes.curves[2].values(), *sizes.curves[16].values(), sizes.free, sizes.weights]
    assert low < min(shown) and max(shown) < high


def test_the_axis_of_bytes_stays_as_heads_change(lab):
    lab.spec.compute._free_bytes = lambda: 10**10
    move(lab, num_key_value_heads=4)
    before = lab.figure.layout.yaxis.range
    move(lab, num_key_value_heads=1)
    assert lab.figure.layout.yaxis.range == pytest.approx(before, abs=0.01)


def test_time_stands_over_the_bytes_and_the_measured_bandwidth_below(lab):
    first = lab.result
    move(lab, bits=2)
    held, speed = traces(lab), lab.result.speed
    for x, y in zip(held["ceiling"].x, held["ceiling"].y, strict=True):
        assert x / y == pytest.approx(CEILINGS.read_bandwidth)
    assert points(held["time"])[0][:2] == (speed.read_bytes, speed.timing.median)
    assert points(held["earlier time"])[0][:2] == (first.speed.read_bytes, first.speed.timing.median)
    assert [points(held[name])[0][3] for name in ("earlier time", "time")] == [
        COLOURS["float"],
        COLOURS["quantized KV"],
    ]
    for name in ("time", "earlier time"):
        for axis, at in (("xaxis2", held[name].x[0]), ("yaxis2", held[name].y[0])):
            low, high = lab.figure.layout[axis].range
            assert low < math.log10(at) < high
    assert held["earlier time"].marker.opacity < 1
    assert notes(lab)["time"].visible and "of ceiling" in notes(lab)["time"].text


def test_perplexity_stands_over_how_much_smaller_the_cache_is(lab):
    move(lab, bits=4)
    move(lab, bits=2)
    held, quality = traces(lab), lab.result.quality
    ((x, y, _, colour),) = points(held["perplexity"])
    assert (x, y, colour) == (pytest.approx(16 / 3), quality.ratio, COLOURS["quantized KV"])
    assert list(held["earlier perplexity"].x) == pytest.approx([1, 16 / 5])
    assert held["earlier perplexity"].y[0] == 1.0
    move(lab, seq_len=256)
    assert len(traces(lab)["earlier perplexity"].x) == 3, "no length of the cache changes it"
    assert not notes(lab)["recorded or not"].visible


def test_merged_heads_are_hollow_and_beyond_the_axis_a_triangle(lab, monkeypatch):
    move(lab, num_key_value_heads=1)
    note = notes(lab)["recorded or not"]
    assert note.visible and note.text == "1 KV head: not recorded"
    assert not traces(lab)["merged"].x and not traces(lab)["perplexity"].x
    monkeypatch.setattr(_kv_cache_compute, "recorded_merge_study", lambda: STUDY)
    move(lab, bits=4)
    merged = traces(lab)["merged"]
    assert list(merged.x) == [2.0, 2.0] and list(merged.text) == [" fitted: 4x ", " mean: 500x "]
    assert list(merged.textposition) == ["middle left", "middle right"]
    low, high = (10**end for end in lab.figure.layout.yaxis3.range)
    assert low < 1 < merged.y[0] == 4.0 < merged.y[1] < high < 500
    assert list(merged.marker.symbol) == [f"{traces(lab)['bytes'].marker.symbol[0]}-open", "triangle-up-open"]
    assert all("RECORDED 2026-11-30" in hover for hover in merged.hovertext)
    assert notes(lab)["recorded or not"].text == "hollow: RECORDED"
    move(lab, num_key_value_heads=2)
    assert not traces(lab)["merged"].x and not notes(lab)["recorded or not"].visible
    assert 10 ** lab.figure.layout.yaxis3.range[1] < 2


def test_a_partial_perplexity_is_drawn_before_the_whole(lab, monkeypatch):
    drawn = []
    real = lab.spec.draw

    def draw(figure, result, earlier):
        drawn.append(result.quality and result.quality.scored)
        real(figure, result, earlier)

    lab.spec = dataclasses.replace(lab.spec, draw=draw)
    move(lab, bits=8)
    assert drawn[:4] == [None, None, 32, 64] and drawn[-1] == 511


def test_the_shapes_of_the_legend_are_those_of_the_points(lab):
    held = traces(lab)
    shapes = [held[name].marker.symbol for name in ("4 KV heads", "2 KV heads", "1 KV head")]
    assert len(set(shapes)) == 3
    assert points(held["bytes"])[0][2] == shapes[1]
    move(lab, num_key_value_heads=1)
    assert points(traces(lab)["bytes"])[0][2] == shapes[2]
    assert (held["16 bits"].line.color, held["quantized"].line.color) == (COLOURS["float"], COLOURS["quantized KV"])


def test_the_guess_is_answered_by_heads_and_bits_of_one_length(lab):
    question = lab.spec.prediction
    assert question.question.startswith("From 2 KV heads to 1 and from 16 bits to 4 (groups of 32)")
    assert question.options == ("6x", "6.4x", "8x")
    lab.prediction.guess.value = "8x"
    move(lab, num_key_value_heads=1)
    move(lab, seq_len=512, bits=4)
    assert how_many_times(lab.finished, 2) is None, "two lengths say nothing"
    move(lab, seq_len=4096)
    ratio = lab.finished[0].sizes.total / lab.result.sizes.total
    assert ratio == pytest.approx(6.4, rel=0.05) and ratio < 6.4
    answer = how_many_times(lab.finished, 2)
    assert answer.startswith(f"{ratio:.3g}x (") and "Heads give 2x; bits give 16/5" in answer
    assert f"Your guess: 8x. Measured: {ratio:.3g}x" in lab.prediction._verdict.value


def test_a_setting_that_does_not_fit_is_shown_and_the_next_move_works(lab):
    lab.spec.compute._free_bytes = lambda: 10**6
    lab.spec.knobs["seq_len"].value = 32768
    assert lab.wait(WAIT_S)
    assert "1.00 MB are free; takes at most 512" in lab.status.text and isinstance(lab.error, ValueError)
    move(lab, seq_len=512)
    assert lab.result.params.seq_len == 512 and "labkit-error" not in lab.status.text


def test_the_knobs_offer_what_the_model_can_be(lab):
    assert lab.spec.knobs["num_key_value_heads"].options == (4, 2, 1)
    assert [value for _, value in lab.spec.knobs["seq_len"].options] == [2**i for i in range(8, 16)]
    assert lab.spec.knobs["bits"].options == (16, 8, 4, 2)
    shape = _shape("smollm2-135m", torch.device("cpu"))
    assert (head_options(shape), shape.num_key_value_heads, group_size(shape.head_dim)) == ((9, 3, 1), 3, 32)
    assert [group_size(width) for width in (128, 48, 16, 7)] == [32, 16, 16, 1]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="^model: got 3; takes "):
        kv_cache_lab(3)
    with pytest.raises(ValueError, match="^device: got 'tpu'; takes "):
        kv_cache_lab(device="tpu")
