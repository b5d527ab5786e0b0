import dataclasses
import math

import pytest
import torch

from labkit.labs import _flash_attention_steps, flash_attention, flash_attention_lab
from labkit.labs._figures import COLOURS
from labkit.labs._flash_attention_costs import ROLES, moved_bytes, predicted_peak
from labkit.labs._flash_attention_figure import build_figure, draw, spread
from labkit.labs._flash_attention_result import BLOCK_SIZES, HEAD_DIMS
from labkit.labs.flash_attention import how_it_grows, lengths_for
from labkit.roofline import attainable_flops
from tests.labs.flash_attention_fixtures import CPU, LENGTHS, by_hand, found
from tests.labs.roofline_fixtures import CEILINGS

WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("fixed_flash_attention")


@pytest.fixture
def lab(ledger, monkeypatch):
    """The lab over short lengths."""
    monkeypatch.setattr(flash_attention, "lengths_for", lambda device: LENGTHS)
    monkeypatch.setattr(flash_attention, "_DEFAULT_LEN", 128)
    lab = flash_attention_lab(device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.controls[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(figure) -> dict:
    return {trace.name: trace for trace in figure.data}


def points(trace) -> list[tuple]:
    return list(zip(trace.x or (), trace.y or (), strict=True))


def test_each_control_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, seq_len=64)
    move(lab, head_dim=32)
    move(lab, block_size=16)
    move(lab, causal=False)
    lines = [m for m in ledger.read() if m.name == "flash_attention_lab.own_s"]
    keys = ("seq_len", "head_dim", "block_size", "causal")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (128, 64, 128, True),
        (64, 64, 128, True),
        (64, 32, 128, True),
        (64, 32, 16, True),
        (64, 32, 16, False),
    ]
    fixed = {"num_attention_heads": 3, "num_key_value_heads": 1, "dtype": "float32", "kernel": "tiled"}
    assert all(m.params.items() >= fixed.items() and m.backend == "labkit tiled" for m in lines)
    assert [m.value for m in lines] == [r.seconds("own") for r in lab.finished]
    lab.reset()
    assert lab.wait(WAIT_S) and lab.spec.switches["causal"].value is True
    assert lab.result.params == lab.finished[0].params and len(lab.finished) == 1


def test_time_and_memory_are_curves_over_all_lengths_up_to_the_chosen(lab):
    held, result = traces(lab.figure), lab.result
    for role in ROLES:
        colour = COLOURS[f"{role} attention"]
        for panel, value in (("time", result.seconds), ("memory", result.peak)):
            curve, now = held[f"{role} curve {panel}"], held[f"{role} {panel}"]
            assert points(curve) == [(n, value(role, n)) for n in (32, 64, 128)]
            assert points(now) == [(128, value(role))] and not points(held[f"earlier {role} {panel}"])
            assert curve.line.color == now.marker.color == colour and now.marker.size > curve.marker.size
    symbols = {role: held[f"{role} time"].marker.symbol for role in ROLES}
    assert len(set(symbols.values())) == 3
    for role, symbol in symbols.items():
        assert {held[f"{role} {panel}"].marker.symbol for panel in ("memory", "rate", "curve time")} == {symbol}


def test_earlier_points_stay_faded_and_the_curve_grows(lab):
    first = lab.result
    move(lab, head_dim=32)
    move(lab, seq_len=256)
    held = traces(lab.figure)
    for role in ROLES:
        assert points(held[f"earlier {role} time"]) == [(128, r.seconds(role)) for r in lab.finished[:2]]
        assert points(held[f"earlier {role} memory"])[0] == (128, first.peak(role))
        assert held[f"earlier {role} time"].marker.opacity < 0.5
        assert [x for x, _ in points(held[f"{role} curve time"])] == list(LENGTHS)
        assert len(points(held[f"earlier {role} rate"])) == 2
    for axis, panel in (("yaxis", "time"), ("yaxis2", "memory")):
        low, high = lab.figure.layout[axis].range
        shown = [y for name, trace in held.items() if name.endswith(f" {panel}") for _, y in points(trace)]
        assert all(low < math.log10(y) < high for y in shown)


def test_the_least_time_is_a_line_for_the_needed_flops_and_every_byte_once(lab):
    floor = points(traces(lab.figure)["floor"])
    assert [n for n, _ in floor] == list(LENGTHS)
    for n, seconds in floor:
        # Two products over a head, and six operations of the softmax.
        needed, p = (4 * 64 + 6) * 3 * n * (n + 1) // 2, lab.result.params.at(n)
        by_bytes, by_flops = moved_bytes(p, "native") / CEILINGS.read_bandwidth, needed / 4e13
        assert seconds == pytest.approx(max(by_bytes, by_flops))
    assert traces(lab.figure)["floor"].line.dash == "dash"


def test_the_formulas_of_n_and_its_square_and_free_memory_stand_beside_the_curves(lab):
    held, result = traces(lab.figure), lab.result
    for role, name in (("standard", "n²"), ("native", "n")):
        guide = held[f"{role} formula"]
        assert points(guide) == [(n, predicted_peak(result.params.at(n), role)) for n in LENGTHS]
        assert [text for text in guide.text if text] == [name] and guide.line.dash == "dot"
    assert set(held["free memory"].y) == {result.free_bytes} and "free memory" in held["free memory"].text[0]
    assert 10 ** lab.figure.layout.yaxis2.range[1] > result.free_bytes


def test_larger_blocks_move_the_course_s_kernel_to_the_right_under_the_roof(lab):
    places = {}
    for size in (16, 64):
        move(lab, block_size=size)
        held, result = traces(lab.figure), lab.result
        for role in ROLES:
            ((x, y),) = points(held[f"{role} rate"])
            assert x == pytest.approx(result.needed_flops / moved_bytes(result.params, role))
            assert y == result.rate(role)
            places[role, size] = x
    assert places["own", 64] > 2 * places["own", 16]
    assert places["standard", 64] == places["standard", 16] < places["own", 16] < places["native", 16]
    roof = points(held["roof"])
    assert roof == [(x, attainable_flops(x, CEILINGS, "float32")) for x, _ in roof] and len(roof) == 3
    assert roof[1] == (pytest.approx(4), 4e13), "the ridge"
    low, high = lab.figure.layout.xaxis3.range
    assert all(low < math.log10(x) < high for x in places.values())


def test_labels_stand_apart_in_order():
    assert spread([1.0, 2.0], 0.5) == [1.0, 2.0]
    near = spread([1.0, 1.01, 0.99], 0.2)
    assert near[2] < near[0] < near[1] and sum(near) == pytest.approx(3.0)
    assert near[1] - near[0] >= 0.2 - 1e-6 and near[0] - near[2] >= 0.2 - 1e-6


def test_labels_say_the_chosen_figures_in_their_colours(lab):
    labels = traces(lab.figure)["labels memory"]
    assert len(labels.text) == 3 and list(labels.textfont.color) == [COLOURS[f"{role} attention"] for role in ROLES]
    assert labels.text[0] == f"<b>{dict((n.key, n.text) for n in lab.result.numbers())['standard_peak']}</b>"


def test_what_was_not_run_is_no_point():
    figure = build_figure(LENGTHS, "tiled")
    result = by_hand({64: (1.0, 2.0, 3.0), 128: (4.0, 5.0, 6.0)})
    absent = {**result.found, "standard": dataclasses.replace(found(0.0), timing=None, peak_bytes=None)}
    draw(figure, dataclasses.replace(result, found=absent, curve={**result.curve, 128: absent}), [])
    held = traces(figure)
    assert points(held["standard curve time"]) == [(64, 1.0)] and not points(held["standard time"])
    assert points(held["native time"]) == [(128, 5.0)] and not points(held["standard rate"])
    assert not points(held["roof"]), "no ceilings yet"


def test_nothing_measured_yet_is_drawn_as_nothing():
    figure = build_figure(LENGTHS, "triton")
    empty = dataclasses.replace(by_hand({128: (4.0, 5.0, 6.0)}), found={}, curve={})
    draw(figure, empty, [])
    assert not any(points(traces(figure)[f"{role} {panel}"]) for role in ROLES for panel in ("time", "memory"))
    assert any("labkit triton" in (name or "") for name in traces(figure))


def test_the_guess_is_answered_by_two_lengths_of_one_setting(lab):
    lab.prediction.guess.value = "4x and 4x"
    move(lab, head_dim=32)
    move(lab, seq_len=64)
    move(lab, seq_len=128)
    half, whole = lab.finished[-2:]
    grown = whole.peak("standard") / half.peak("standard")
    answer = how_it_grows(lab.finished)
    assert answer.startswith(f"from 64 to 128 tokens, standard {grown:.3g}x (")
    assert f"without the matrix {whole.peak('native') / half.peak('native'):.3g}x (" in answer
    larger = dataclasses.replace(whole, found=whole.found | {"standard": found(1.0, 10 * half.peak("standard"))})
    assert "standard 10x" in how_it_grows([half, larger]) and how_it_grows([larger, half]) is None
    other = dataclasses.replace(half, params=dataclasses.replace(half.params, head_dim=64))
    assert how_it_grows([other, whole]) is None, "two head sizes say nothing"
    missing = dataclasses.replace(whole, found=whole.found | {"standard": found(1.0, None)})
    assert how_it_grows([half, missing]) is None
    assert "Your guess: 4x and 4x. Measured: from 64 to 128" in lab.prediction._verdict.value


def test_a_failure_is_shown_and_the_next_move_works(lab, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of <memory>")

    with monkeypatch.context() as patch:
        patch.setattr(_flash_attention_steps, "run_attention", fail)
        lab.spec.knobs["seq_len"].value = 32
        assert lab.wait(WAIT_S)
    assert "out of &lt;memory&gt;" in lab.status.text and isinstance(lab.error, RuntimeError)
    move(lab, seq_len=64)
    assert lab.result.params.seq_len == 64 and "labkit-error" not in lab.status.text


def test_the_controls_offer_what_the_device_can_do(ledger, monkeypatch):
    assert lengths_for(CPU) == (128, 256, 512, 1024, 2048, 4096, 8192)
    assert lengths_for(torch.device("cuda", 0))[-1] == 65536
    monkeypatch.setattr(flash_attention.Lab, "measure", lambda self: None)
    lab = flash_attention_lab(device="cpu")
    assert [value for _, value in lab.spec.knobs["seq_len"].options] == list(lengths_for(CPU))
    assert lab.spec.knobs["head_dim"].options == HEAD_DIMS == (32, 64, 96, 128)
    assert lab.spec.knobs["block_size"].options == BLOCK_SIZES == (16, 32, 64, 128, 256)
    assert lab.spec.switches["causal"].value is True
    values = {name: control.value for name, control in lab.spec.controls.items()}
    assert lab.spec.params(**values).seq_len == 2048


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="^device: got 'tpu'; takes "):
        flash_attention_lab(device="tpu")
