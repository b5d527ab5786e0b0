import subprocess
import sys

import pytest
import torch

from labkit.hardware import Datasheet
from labkit.labs import _roofline_compute, roofline_lab
from labkit.labs._roofline_figure import SYMBOLS
from labkit.labs._roofline_result import FAMILIES
from labkit.labs.roofline import batch_answer
from tests.labs.roofline_fixtures import CEILINGS, loaded

WAIT_S = 60.0
pytestmark = pytest.mark.usefixtures("fixed_ceilings")


@pytest.fixture
def lab(ledger):
    lab = roofline_lab(loaded(), device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {(trace.type, trace.name): trace for trace in lab.figure.data}


def test_each_knob_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, batch=2)
    move(lab, seq_len=256)
    move(lab, dtype="bfloat16")
    keys = ("batch", "seq_len", "dtype", "model")
    settings = [tuple(m.params[key] for key in keys) for m in ledger.read() if m.name == "roofline_lab.tpot"]
    assert settings == [
        (1, 128, "float32", "tiny"),
        (2, 128, "float32", "tiny"),
        (2, 256, "float32", "tiny"),
        (2, 256, "bfloat16", "tiny"),
    ]


def test_every_op_with_flops_is_a_point_at_its_intensity_and_speed(lab):
    result = lab.result
    for family in FAMILIES:
        expected = [
            (op.cost.intensity, op.cost.flops / op.seconds.median, SYMBOLS[phase.name])
            for phase in result.phases
            for op in phase.family(family)
            if op.cost.flops
        ]
        trace = traces(lab)["scatter", family]
        assert list(zip(trace.x, trace.y, trace.marker.symbol, strict=True)) == expected
    whole = traces(lab)["scatter", "whole step"]
    assert list(whole.x) == [phase.intensity for phase in result.phases]
    assert list(whole.y) == [phase.achieved_flops for phase in result.phases]


def test_the_roof_is_the_measured_one_and_follows_the_dtype(lab):
    for dtype, peak in (("float32", 4e13), ("bfloat16", 8e13)):
        move(lab, dtype=dtype)
        roof = traces(lab)["scatter", "measured roof"]
        for x, y in zip(roof.x, roof.y, strict=True):
            assert y == pytest.approx(min(peak, x * CEILINGS.read_bandwidth))
        assert max(roof.y) == peak
        assert not traces(lab)["scatter", "datasheet"].visible


def test_the_datasheet_stands_beside_it_where_it_is_known(lab, monkeypatch):
    sheet = Datasheet("a chip", 2e13, {torch.bfloat16: 9e13}, 1, None, None, "its maker")
    monkeypatch.setattr(_roofline_compute, "datasheet", lambda device: sheet)
    move(lab, batch=2)
    assert not traces(lab)["scatter", "datasheet"].visible, "it says nothing of float32"
    move(lab, dtype="bfloat16")
    roof = traces(lab)["scatter", "datasheet"]
    assert roof.visible and roof.line.dash == "dash"
    for x, y in zip(roof.x, roof.y, strict=True):
        assert y == pytest.approx(min(9e13, x * 2e13))
    names = [name.replace("<br>", " ").strip() for name in roof.text]
    assert names == ["", "datasheet 20.0 TB/s", "datasheet 90.0 TFLOP/s", ""]


def test_earlier_steps_stay(lab):
    first = lab.result
    move(lab, batch=4)
    earlier = traces(lab)["scatter", "earlier"]
    assert list(earlier.x) == [first.decode.intensity, first.prefill.intensity]
    assert list(earlier.y) == [first.decode.achieved_flops, first.prefill.achieved_flops]


def test_bars_are_the_shares_of_the_clocked_step_beside_the_roof(lab):
    result = lab.result
    totals = {}
    for family in FAMILIES:
        bar = traces(lab)["bar", family]
        for at, share in zip(bar.x, bar.y, strict=True):
            totals[at] = totals.get(at, 0.0) + share
    decode, decode_roof, prefill, _ = (totals[at] for at in sorted(totals))
    assert decode == pytest.approx(100) and prefill == pytest.approx(100)
    clocked = sum(op.seconds.median for op in result.decode.ops)
    assert decode_roof == pytest.approx(100 * result.decode.floor_s / clocked)


def test_axes_hold_every_point(lab):
    move(lab, batch=64)
    for axis, low, high in (("x", *lab.figure.layout.xaxis.range), ("y", *lab.figure.layout.yaxis.range)):
        for family in ("earlier", *FAMILIES):
            for value in traces(lab)["scatter", family][axis]:
                assert 10**low < value < 10**high


def test_the_guess_is_answered_by_batch_one_and_eight_alike_in_all_else(lab):
    lab.prediction.guess.value = "8x"
    move(lab, dtype="bfloat16", batch=8)
    assert lab.prediction._answer is None
    move(lab, dtype="float32")
    one, eight = lab.finished[0].decode, lab.result.decode
    ratio = eight.tokens_per_second / one.tokens_per_second
    assert f"{ratio:.1f}x" in batch_answer(lab.finished)
    assert f"Your guess: 8x. Measured: {ratio:.1f}x" in lab.prediction._verdict.value


def test_a_setting_that_does_not_fit_is_shown_and_the_next_move_works(lab, ledger):
    lab.spec.compute._free_bytes = lambda: 10_000
    lab.spec.knobs["batch"].value = 64
    assert lab.wait(WAIT_S)
    assert "takes at most batch" in lab.status.text and isinstance(lab.error, ValueError)
    lab.spec.compute._free_bytes = lambda: 10**12
    move(lab, batch=2)
    assert lab.result.params.batch == 2
    assert "labkit-error" not in lab.status.text


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="model: got 3; takes "):
        roofline_lab(3)
    with pytest.raises(ValueError, match="device: got 'tpu'; takes "):
        roofline_lab(device="tpu")


def test_naming_the_labs_imports_no_widgets():
    code = "import sys, labkit.labs; dir(labkit.labs); print({'ipywidgets', 'plotly', 'torch'} & sys.modules.keys())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
