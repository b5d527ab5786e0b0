"""What a lab gives out: the bundle that a notebook keeps, CSV, numbers, the answer to a guess."""

import base64
import csv
import io
import re
import threading

from labkit.labs import _frame
from labkit.labs._prediction import Prediction
from tests.labs.fake import WAIT_S, FakeCompute, build, move


def test_export_is_a_csv_of_every_finished_result(lab, tmp_path):
    move(lab, 5)
    link = re.search(r'download="fake_lab.csv" href="data:text/csv;base64,([^"]*)"', lab._export.value)
    text = base64.b64decode(link[1]).decode()
    assert list(csv.DictReader(io.StringIO(text))) == [{"size": "2", "area": "4"}, {"size": "5", "area": "25"}]
    assert lab.to_csv(tmp_path / "out.csv") == text
    assert (tmp_path / "out.csv").read_text() == text


def test_numbers_carry_their_key_and_exact_value_and_are_escaped(lab):
    assert 'data-key="area" data-exact="4.0">4 m²<' in lab.numbers.value
    assert "Area &lt;i&gt;" in lab.numbers.value


def test_the_bundle_is_view_text_and_picture_of_the_default_result(lab):
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == "Square of 2: 4 m²"
    assert base64.b64decode(bundle["image/png"]) == b"\x89PNG picture"
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == lab.model_id


def test_the_bundle_waits_for_the_default_result(ledger, monkeypatch):
    monkeypatch.setattr(_frame, "to_png", lambda figure: None)
    compute = FakeCompute()
    lab = build(compute)
    threading.Timer(0.3, compute.gate.set).start()
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == "Square of 2: 4 m²"
    assert "image/png" not in bundle


def test_the_view_is_shown_at_once_and_the_bundle_put_in_its_place(ledger, monkeypatch):
    """A learner watches the first measurement at work; what stays in the notebook is the bundle."""
    compute, shown = FakeCompute(), []

    class Handle:
        def update(self, bundle, raw):
            shown.append(("update", bundle))

    def display(bundle, *, raw, display_id=None):
        shown.append(("display", bundle))
        compute.gate.set()
        return Handle() if display_id else None

    monkeypatch.setattr(_frame, "to_png", lambda figure: b"png")
    monkeypatch.setattr(_frame, "display", display)
    lab = build(compute)
    lab._ipython_display_()
    (first, view), (second, bundle) = shown
    assert (first, second) == ("display", "update")
    model = {"model_id": lab.model_id, "version_major": 2, "version_minor": 0}
    assert view["application/vnd.jupyter.widget-view+json"] == model and "image/png" not in view
    assert bundle["text/plain"] == "Square of 2: 4 m²" and "image/png" in bundle
    lab._ipython_display_()
    assert [kind for kind, _ in shown] == ["display", "update", "display"], "nothing to wait for the second time"


def test_the_picture_is_drawn_once_a_result(lab, monkeypatch):
    pictures = []
    monkeypatch.setattr(_frame, "to_png", lambda figure: pictures.append(figure) or b"png")
    lab._repr_mimebundle_()
    lab._repr_mimebundle_()
    assert len(pictures) == 1
    move(lab, 5)
    lab._repr_mimebundle_()
    assert len(pictures) == 2


def test_the_bundle_of_a_default_that_fails_says_why(ledger):
    compute = FakeCompute(fail={2: ValueError("no memory for 2")})
    lab = build(compute)
    assert lab._repr_mimebundle_()["text/plain"] == "Squares: no memory for 2"


def test_an_interrupt_while_the_bundle_waits_stops_the_run_and_is_shown(ledger, monkeypatch):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(_frame, "to_png", lambda figure: None)
    monkeypatch.setattr(lab, "wait", interrupted)
    assert "Square of 2" in lab._repr_mimebundle_()["text/plain"]
    assert "Interrupted" in lab.status.text
    assert lab._worker.wait(WAIT_S)
    assert compute.completed == []


def test_the_answer_is_held_back_until_a_guess_is_made(compute, ledger):
    def answer(results):
        areas = {r.params.size: r.area for r in results}
        return f"{areas[4] / areas[2]:.0f}x <b>" if {2, 4} <= areas.keys() else None

    compute.gate.set()
    lab = build(compute, prediction=Prediction("Twice the size, what area?", ("2x", "4x"), answer))
    assert lab.wait(WAIT_S)
    box = lab.prediction
    move(lab, 4)
    assert "4x" not in box._verdict.value
    box.guess.value = "2x"
    assert "Your guess: 2x. Measured: 4x &lt;b&gt;" in box._verdict.value
    lab.reset()
    assert lab.wait(WAIT_S)
    assert box.guess.value is None
    box.guess.value = "4x"
    assert "Now measure it" in box._verdict.value
