import dataclasses
import threading

import ipywidgets as widgets
import pytest

from labkit.labs._frame import Lab
from labkit.labs._worker import Run
from labkit.measure import device_lock
from tests.labs.fake import WAIT_S, FakeCompute, Params, Result, build, move, wait_until


def test_the_default_is_measured_at_construction_and_written_to_the_ledger(lab, ledger):
    assert lab.result == Result(Params(2), 4)
    (line,) = ledger.read()
    assert (line.name, line.value, line.params) == ("fake_lab.area", 4.0, {"size": 2})


def test_each_move_is_a_new_ledger_line_with_its_parameters(lab, ledger):
    move(lab, 5)
    move(lab, 7)
    assert [(m.params["size"], m.value) for m in ledger.read()] == [(2, 4.0), (5, 25.0), (7, 49.0)]


def test_drag_through_ten_values_measures_the_first_and_the_last(ledger):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    for size in range(3, 12):
        lab.spec.knobs["size"].value = size
    wait_until(lambda: compute.calls[-1] == 11)
    compute.gate.set()
    assert lab.wait(WAIT_S)
    assert compute.calls == [2, 11]
    assert compute.completed == [11]
    assert [m.params["size"] for m in ledger.read()] == [11]
    assert [r.params.size for r in lab.finished] == [11]
    assert lab.figure.data[1].x == (11,)


def test_a_partial_result_is_shown_but_not_kept(ledger):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    assert lab.result == Result(Params(2), 2, firm=False)
    assert "2 m²" in lab.numbers.value
    assert not ledger.read()
    assert lab.finished == ()
    compute.gate.set()
    assert lab.wait(WAIT_S)
    assert lab.result.firm
    assert "4 m²" in lab.numbers.value


def test_what_cannot_be_written_is_said_and_still_held(lab, ledger, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABKIT_LEDGER", str(tmp_path / "file" / "ledger.jsonl"))
    move(lab, 5)
    assert isinstance(lab.error, OSError) and [r.params.size for r in lab.finished] == [2, 5]
    assert "5" in lab.to_csv()
    monkeypatch.setenv("LABKIT_LEDGER", str(ledger.path))
    move(lab, 7)
    assert lab.error is None and [m.params["size"] for m in ledger.read()] == [2, 7]


def test_a_page_that_draws_the_figure_late_finds_all_of_it(lab):
    move(lab, 5)
    state = lab.figure.get_state(["_widget_data", "_widget_layout"])
    assert [(list(trace["x"]), list(trace["y"])) for trace in state["_widget_data"]] == [([2], [4]), ([5], [25])]
    assert state["_widget_layout"] == lab.figure.to_dict()["layout"]


def test_what_the_page_says_waits_while_the_figure_is_drawn(lab):
    # What the page filled in by itself after the last drawing: plotly strikes it out of what the kernel holds.
    answer = [{"uid": trace.uid, "opacity": 0.3, "visible": True} for trace in lab.figure.data]
    message = {"_js2py_traceDeltas": {"trace_deltas": answer, "trace_edit_id": lab.figure._last_trace_edit_id}}
    kernel = threading.Thread(target=lab.figure.set_state, args=[message], daemon=True)
    with lab.figure.drawing():
        kernel.start()
        kernel.join(0.2)
        assert kernel.is_alive() and lab.figure.data[0].opacity == 0.3
        lab.figure.data[0].x = [4]
    kernel.join(WAIT_S)
    assert not kernel.is_alive() and lab.figure.data[0].x == (4,)
    # The answer was to a drawing before this one, so that nothing of it is struck out.
    assert "opacity" in lab.figure.to_dict()["data"][0]


def test_a_page_that_answers_each_drawing_disturbs_none(lab):
    figure, ended, failed = lab.figure, threading.Event(), []

    def answer() -> None:
        while not ended.is_set():
            deltas = [{"uid": trace.uid, "x": [0], "name": "", "opacity": 1} for trace in figure.data]
            said = {"trace_deltas": deltas, "trace_edit_id": figure._last_trace_edit_id}
            try:
                figure.set_state({"_js2py_traceDeltas": said})
            except Exception as error:
                failed.append(error)

    kernel = threading.Thread(target=answer, daemon=True)
    kernel.start()
    try:
        for size in range(100, 300):
            with figure.drawing():
                lab.spec.draw(figure, Result(Params(size), size), lab.finished)
                figure.update_traces(opacity=0.5, name="drawn")
    finally:
        ended.set()
        kernel.join(WAIT_S)
    assert failed == []


def test_earlier_points_stay_on_the_figure(lab):
    move(lab, 5)
    move(lab, 7)
    assert lab.figure.data[0].x == (2, 5)
    assert lab.figure.data[0].y == (4, 25)
    assert lab.figure.data[1].x == (7,)


@pytest.mark.parametrize("error", [ValueError("size: got <9>; takes less"), KeyboardInterrupt(), RuntimeError("<oom>")])
def test_an_error_is_shown_escaped_and_the_next_move_works(lab, compute, ledger, error):
    compute.fail[9] = error
    move(lab, 9)
    assert lab.error is error
    assert "labkit-error" in lab.status.text
    assert "<9>" not in lab.status.text and "<oom>" not in lab.status.text
    expected = {ValueError: "size: got &lt;9&gt;; takes less", RuntimeError: "RuntimeError: &lt;oom&gt;"}
    assert expected.get(type(error), "Interrupted") in lab.status.text
    move(lab, 5)
    assert lab.error is None
    assert "labkit-error" not in lab.status.text
    assert lab.result == Result(Params(5), 25)
    assert [m.params["size"] for m in ledger.read()] == [2, 5]


def test_parameters_that_are_refused_are_shown(lab):
    move(lab, 13)
    assert "size: got &lt;b&gt;13&lt;/b&gt;; takes any other number" in lab.status.text
    assert lab.result == Result(Params(2), 4)


def test_an_error_of_a_setting_that_was_left_behind_is_not_shown(ledger):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    original = lab.spec.compute

    def fail_when_cancelled(params, cancelled):
        yield from original(params, cancelled)
        if cancelled():
            raise RuntimeError("too late")

    object.__setattr__(lab.spec, "compute", fail_when_cancelled)
    lab.spec.knobs["size"].value = 3
    wait_until(lambda: compute.calls[-1] == 3)
    lab.spec.knobs["size"].value = 4
    compute.gate.set()
    assert lab.wait(WAIT_S)
    assert lab.error is None
    assert lab.result == Result(Params(4), 16)


def test_what_a_cancelled_run_still_yields_is_neither_shown_nor_kept(ledger):
    """A compute that is slow to look at `cancelled` yields its result late: the newer setting's must stand."""
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    entered, release = threading.Event(), threading.Event()

    def deaf(params, cancelled):
        entered.set()
        release.wait(WAIT_S)
        yield Result(params, -1)

    object.__setattr__(lab.spec, "compute", deaf)
    lab.spec.knobs["size"].value = 3
    assert entered.wait(WAIT_S)
    lab.stop()
    release.set()
    assert lab.wait(WAIT_S)
    assert lab.result == Result(Params(2), 2, firm=False)
    assert lab.finished == () and not ledger.read()
    assert "-1" not in lab.numbers.value


def cancelled_run() -> Run:
    run = Run()
    run.cancel()
    return run


def test_a_result_that_is_cancelled_on_its_last_step_is_not_kept(ledger):
    compute = FakeCompute()
    compute.gate.set()
    lab = build(compute)
    assert lab.wait(WAIT_S)
    kept = lab.finished
    lab._finish(Result(Params(9), 81), cancelled_run(), 1.0)
    assert lab.finished == kept and [m.params["size"] for m in ledger.read()] == [2]


def test_stop_keeps_what_stands(ledger):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    assert lab._again.description == "Stop"
    lab._again.click()
    assert lab.wait(WAIT_S)
    assert "Stopped" in lab.status.text
    assert lab._again.description == "Measure again"
    assert compute.completed == [] and not ledger.read()
    compute.gate.set()
    lab._again.click()
    assert lab.wait(WAIT_S)
    assert compute.completed == [2]


def test_reset_goes_back_to_the_default_and_forgets_the_history_but_not_the_ledger(lab, compute, ledger):
    move(lab, 5)
    move(lab, 7)
    lab.reset()
    assert lab.wait(WAIT_S)
    assert lab.spec.knobs["size"].value == 2
    assert compute.calls == [2, 5, 7, 2]
    assert lab.finished == (Result(Params(2), 4),)
    assert lab.figure.data[0].x in ((), None)
    assert len(ledger.read()) == 4


def test_it_says_that_it_waits_for_another_run_on_the_device(ledger):
    compute = FakeCompute()
    compute.gate.set()
    with device_lock("cpu"):
        lab = build(compute)
        wait_until(lambda: "Waiting for another run on this device" in lab.status.text)
        assert compute.calls == []
    assert lab.wait(WAIT_S)
    assert lab.result == Result(Params(2), 4)
    assert "Measured" in lab.status.text


def test_a_lab_that_times_nothing_waits_for_nobody(ledger):
    compute = FakeCompute()
    compute.gate.set()
    with device_lock("cpu"):
        lab = build(compute, device=None)
        assert lab.wait(WAIT_S)
    assert lab.result == Result(Params(2), 4)


def test_a_cell_beside_the_lab_waits_for_its_turn(ledger):
    compute = FakeCompute()
    lab = build(compute)
    assert compute.started.wait(WAIT_S)
    waited = threading.Event()

    def cell():
        with device_lock("cpu", waited.set):
            compute.completed.append("cell")

    thread = threading.Thread(target=cell)
    thread.start()
    assert waited.wait(WAIT_S)
    compute.gate.set()
    thread.join(WAIT_S)
    assert lab.wait(WAIT_S)
    assert compute.completed == [2, "cell"]


def test_at_most_three_knobs(lab):
    knob = lab.spec.knobs["size"]
    with pytest.raises(ValueError, match="knobs: got .*takes one to three"):
        dataclasses.replace(lab.spec, knobs={str(i): knob for i in range(4)})


def test_a_switch_is_bound_as_a_knob_and_not_counted_as_one(lab, compute):
    switch, knob = widgets.Checkbox(value=True), lab.spec.knobs["size"]
    seen = []
    spec = dataclasses.replace(
        lab.spec,
        knobs={"size": knob},
        switches={"on": switch},
        params=lambda size, on: seen.append(on) or Params(size),
    )
    other = Lab(spec)
    assert other.wait(WAIT_S)
    switch.value = False
    assert other.wait(WAIT_S)
    other.reset()
    assert other.wait(WAIT_S)
    assert seen == [True, False, True] and switch.value is True
    three = {str(i): widgets.IntSlider() for i in range(3)}
    assert list(dataclasses.replace(spec, knobs=three).controls) == ["0", "1", "2", "on"]
