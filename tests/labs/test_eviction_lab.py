import dataclasses

import pytest

from labkit.labs import eviction as module
from labkit.labs import eviction_lab
from labkit.labs._eviction_figure import SYMBOLS, colour
from labkit.labs._eviction_forms import NAMES, budget_text
from labkit.labs._eviction_result import BUDGETS, DEPTHS, METHODS, Needles, Span
from labkit.labs._figures import COLOURS
from labkit.labs.eviction import who_finds
from tests.labs.eviction_fixtures import compute_for, loaded

WAIT_S = 60.0


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def compute(model):
    """Of all tests: what one has measured, the next one does not wait for."""
    return compute_for(model)


@pytest.fixture
def lab(model, compute, ledger, monkeypatch):
    monkeypatch.setattr(module, "EvictionCompute", lambda *_: compute)
    lab = eviction_lab(model, device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {trace.name: trace for trace in lab.figure.data}


def notes(lab) -> dict:
    return {note.text: note for note in lab.figure.layout.annotations if note.name == "mark"}


def with_needles(result, *found: bool, of: int = 5):
    """The same result with these prompts' outcomes."""
    return dataclasses.replace(result, needles=Needles(found, of), full_needles=Needles((True,) * of, of))


def test_each_knob_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, method="window")
    move(lab, budget=0.5)
    move(lab, depth=0.9)
    lines = [m for m in ledger.read() if m.name == "eviction_lab.cache_bytes"]
    settings = [tuple(m.params[key] for key in ("method", "budget", "depth", "model")) for m in lines]
    assert settings == [
        ("sinks", 0.25, 0.1, "tiny"),
        ("window", 0.25, 0.1, "tiny"),
        ("window", 0.5, 0.1, "tiny"),
        ("window", 0.5, 0.9, "tiny"),
    ]
    token = 2 * 2 * 2 * 16 * 4
    prompts = lab.spec.compute._prompts
    held = [round(share * len(prompts[i].input_ids)) for share, i in ((0.25, 0), (0.25, 0), (0.5, 0), (0.5, 4))]
    # The sinks' keys once more; a plain window keeps nothing beside its tokens.
    assert [m.value for m in lines] == [held[0] * token + 4 * token // 2, *(n * token for n in held[1:])]


def test_the_knobs_offer_every_method_budget_and_depth(lab):
    knobs = lab.spec.knobs
    assert list(knobs["method"].options) == [(NAMES[method], method) for method in METHODS]
    assert list(knobs["budget"].options) == [(budget_text(budget), budget) for budget in BUDGETS]
    assert [label for label, _ in knobs["budget"].options] == ["100%", "50%", "25%", "12.5%", "6.25%"]
    assert [value for _, value in knobs["depth"].options] == list(DEPTHS)


def test_the_map_has_a_cell_a_token_and_layer_in_the_colour_of_the_method(lab):
    move(lab, method="heavy_hitters")
    kept, shown = lab.result.kept, traces(lab)["kept"]
    assert [list(row) for row in shown.z] == [list(layer) for layer in kept.heads]
    assert (len(shown.x), len(shown.y), shown.zmin, shown.zmax) == (len(kept.tokens), 2, 0, 2)
    assert shown.colorscale[-1] == (1, COLOURS["heavy hitters"]) and shown.colorscale[0][1] != shown.colorscale[1][1]
    assert shown.customdata[1][kept.digits.start + 1] == kept.answer[0]
    assert list(shown.colorbar.tickvals) == [0, 1, 2]


def test_no_token_or_answer_is_read_as_a_tag(lab):
    kept = dataclasses.replace(lab.result.kept, answer="<i>&4", tokens=("<a href=x>", *lab.result.kept.tokens[1:]))
    lab.spec.draw(lab.figure, dataclasses.replace(lab.result, kept=kept), ())
    assert traces(lab)["kept"].customdata[0][0] == "&lt;a href=x&gt;"
    said = [note.text for note in lab.figure.layout.annotations if "needle" in note.text]
    assert said == ["needle: the number is <b>&lt;i&gt;&amp;4</b>"]


@pytest.mark.parametrize("depth", [0.1, 0.9])
def test_needle_question_and_sinks_are_outlined_and_named(lab, depth):
    move(lab, depth=depth)
    kept = lab.result.kept
    outlined = [(shape.x0 + 0.5, shape.x1 + 0.5) for shape in lab.figure.layout.shapes]
    spans = (Span(0, 4), kept.question, kept.needle, kept.digits)
    assert outlined == [(span.start, span.end) for span in spans]
    named = notes(lab)
    assert list(named) == ["sinks", "question", f"needle: the number is <b>{kept.answer}</b>"]
    needle, question = named[list(named)[2]], named["question"]
    assert needle.xanchor == ("left" if depth == 0.1 else "right") and question.xanchor == "right"
    titles = [note.text for note in lab.figure.layout.annotations if note.name == "title"]
    assert len(titles) == 3, "the panels' titles stay"


def test_curves_grow_with_the_budgets_tried_and_the_line_is_all_tokens(lab):
    first = lab.result
    move(lab, budget=0.125)
    second = lab.result
    move(lab, method="window")
    held = traces(lab)
    curve, now = held["sinks's perplexity"], held["perplexity"]
    assert (list(curve.x), list(curve.y)) == ([0.125, 0.25], [second.quality.ratio, first.quality.ratio])
    assert curve.opacity < 1 and curve.marker.color == COLOURS["sinks + window"] == curve.line.color
    assert (list(now.x), list(now.y)) == ([0.125], [lab.result.quality.ratio])
    assert list(held["window's perplexity"].y) == list(now.y) and not held["snapkv's perplexity"].x
    assert list(now.marker.color) == [COLOURS["window"]] and list(now.marker.symbol) == [SYMBOLS["window"]]
    line = held["all tokens' perplexity"]
    assert (
        set(line.y) == {1}
        and line.line.dash == "dash"
        and str(round(lab.result.quality.baseline)) in line.text[0].replace(",", "")
    )
    low, high = (10**exponent for exponent in lab.figure.layout.yaxis3.range)
    assert all(low < y < high for name in ("sinks's", "window's") for y in traces(lab)[f"{name} perplexity"].y)


def test_a_setting_measured_again_stands_once_as_it_came_out_last(lab):
    first = lab.result
    again = dataclasses.replace(first, quality=dataclasses.replace(first.quality, perplexity=2000.0))
    other = dataclasses.replace(first, params=dataclasses.replace(first.params, method="window"))
    for now, earlier in ((again, (first,)), (other, (first, again))):
        lab.spec.draw(lab.figure, now, earlier)
        assert list(traces(lab)["sinks's perplexity"].y) == [again.quality.ratio]


def test_needles_stand_over_the_budget_beside_those_of_other_methods(lab):
    base = lab.result
    sinks = with_needles(base, True, False, True, False, True)
    window = dataclasses.replace(
        with_needles(base, True, True, False), params=dataclasses.replace(base.params, method="window")
    )
    lab.spec.draw(lab.figure, window, (sinks,))
    held = traces(lab)
    assert list(held["sinks's needles"].y) == [3] and list(held["needles"].y) == [2]
    assert list(held["needles"].text) == ["2 of 3 so far"]
    assert set(held["all tokens' needles"].y) == {5} and "5 of 5" in held["all tokens' needles"].text[0]
    apart = held["sinks's needles"].x[0] / held["needles"].x[0]
    assert 1.02 < apart < 1.2 and held["needles"].x[0] == pytest.approx(0.25, rel=0.1)
    assert "2 of 3 needles found" in held["needles"].hovertext[0]


def test_all_tokens_stand_on_the_line_at_the_whole_budget(lab):
    move(lab, method="full")
    held = traces(lab)
    assert (list(held["perplexity"].x), list(held["perplexity"].y)) == ([1], [1])
    assert list(held["needles"].x) == [1] and list(held["needles"].marker.color) == [COLOURS["float"]]
    assert lab.result.kept.ratio == 1


def test_a_perplexity_beyond_the_axis_stands_at_its_edge_with_its_value(lab):
    quality = dataclasses.replace(lab.result.quality, perplexity=1e6 * lab.result.quality.baseline)
    exploded = dataclasses.replace(lab.result, quality=quality)
    lab.spec.draw(lab.figure, exploded, ())
    point, (low, high) = traces(lab)["perplexity"], lab.figure.layout.yaxis3.range
    assert 10**low < point.y[0] < 10**high < 100 and "1e+06x" in point.text[0]


def test_each_method_has_a_colour_and_a_shape_of_its_own(lab):
    legend = {trace.name: trace.marker for trace in lab.figure.data if trace.name in NAMES.values()}
    assert list(legend) == [NAMES[method] for method in METHODS]
    assert len({marker.color for marker in legend.values()}) == len({m.symbol for m in legend.values()}) == len(METHODS)
    assert all((legend[NAMES[m]].color, legend[NAMES[m]].symbol) == (colour(m), SYMBOLS[m]) for m in METHODS)


def test_the_numbers_say_what_was_kept_and_what_it_is_made_of(lab):
    shown = {number.key: number for number in lab.result.numbers()}
    kept = lab.result.kept
    assert shown["cache_bytes"].exact == kept.nbytes and "as its formula says" in shown["cache_bytes"].note
    assert shown["bookkeeping"].exact == 4 * 2 * 2 * 16 * 4 and "sinks" in shown["bookkeeping"].note
    assert shown["held"].text == f"{kept.held} of {len(kept.tokens)}"
    assert (
        shown["digits_kept"].exact == kept.share(kept.digits) and shown["said"].note == f"missed: it is {kept.answer}"
    )
    assert shown["full_needles"].text == "0 of 5"
    off = dataclasses.replace(lab.result, kept=dataclasses.replace(kept, predicted=kept.nbytes + 8))
    assert "-8 B off" in off.numbers()[0].note
    partial = with_needles(lab.result, True, False)
    (found,) = (n for n in partial.numbers() if n.key == "needles_found")
    assert (found.text, found.exact) == ("1 of 2", 1) and "so far, of 5" in found.note


def test_the_text_form_draws_the_prompt(lab):
    move(lab, method="window", depth=0.5)
    kept = lab.result.kept
    lines = lab.result.text().splitlines()
    (shades, marks) = (line.strip()[1:].split("|")[0] for line in lines if line.startswith("  |"))
    size = -(-len(kept.tokens) // 64)
    gone = (len(kept.tokens) - kept.held) // size
    assert shades[:gone] == " " * gone and set(shades[gone + 1 :]) == {"#"} and len(shades) == len(marks)
    # The text differs between versions of Python: its first sentence may be the needle.
    assert marks[0] == ("s" if kept.needle.start >= size else "N") and marks[-1] == "Q"
    assert marks.index("N") == kept.needle.start // size and marks.rindex("N") == (kept.needle.end - 1) // size
    assert "  0.9    0 of 1" in lines and "heavy" not in lab.result.text()


def test_the_guess_is_answered_when_all_three_have_been_asked(lab):
    asked = [
        dataclasses.replace(with_needles(lab.result, *found), params=dataclasses.replace(lab.result.params, method=m))
        for m, found in (
            ("sinks", (True,) + (False,) * 4),
            ("heavy_hitters", (False,) * 5),
            ("snapkv", (True,) * 4 + (False,)),
        )
    ]
    assert who_finds(asked[:2]) is None
    partial = dataclasses.replace(asked[2], needles=Needles((True,), 5))
    other = dataclasses.replace(asked[2], params=dataclasses.replace(asked[2].params, budget=0.5))
    assert who_finds([*asked[:2], partial, other]) is None
    ratio = f"{lab.result.quality.ratio:.3g}x"
    answer = who_finds(asked)
    assert answer.startswith("sinks + window 1 of 5, heavy hitters 0 of 5, SnapKV 4 of 5.")
    assert answer.endswith(f"SnapKV {ratio}.") and set(lab.prediction.guess.options) <= set(NAMES.values())


def test_bad_arguments_are_named():
    for values, name in (({"model": 3}, "model"), ({"device": "tpu"}, "device")):
        with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
            eviction_lab(**values)


def test_an_error_is_shown_and_the_next_move_works(lab, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("labkit.labs._eviction_compute.look", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        lab.spec.knobs["method"].value = "window"
        assert lab.wait(WAIT_S)
        assert isinstance(lab.error, MemoryError) and "no room" in lab.status.text
    move(lab, method="snapkv")
    assert lab.result.params.method == "snapkv" and "labkit-error" not in lab.status.text
