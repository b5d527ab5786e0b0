"""The ladder and the decision tree as figures say what the numbers say."""

import math

import pytest

from labkit.engine.advisor import TREE, Constraint, advise
from labkit.engine.ladder import POPULAR, RUNGS, Ladder, LadderStep
from labkit.labs.decision_tree import decision_tree
from labkit.labs.ladder_chart import RUNG_COLOURS, ladder_chart
from labkit.measure import Timing


def step(*rungs, tpot, peak, ceiling=None, refused=""):
    times = {"ttft": Timing.of([1.0]), "tpot": Timing.of([tpot])}
    title = RUNGS[rungs[-1]].title if rungs else "transformers.generate, float32, eager attention"
    return LadderStep(
        title, rungs, refused, peak_bytes=peak, perplexity=10.0, ceiling=ceiling, step_bytes=peak, **times
    )


@pytest.fixture
def ladder():
    return Ladder(
        "m",
        (
            step(tpot=1.0, peak=1000, ceiling=3.0),
            step("step", tpot=0.5, peak=1000, ceiling=3.0),
            step("step", "quantized_kv", tpot=0.1, peak=900, refused="it does not go"),
            step("step", "int4", tpot=0.25, peak=300, ceiling=11.0),
        ),
        prompt_tokens=10,
    )


def bars(chart):
    return [trace for trace in chart.figure.data if trace.type == "bar"]


def test_bars_are_times_the_baseline_and_shares_of_its_memory(ladder):
    speed, memory = bars(ladder_chart(ladder))
    assert list(speed.x) == [1.0, 2.0, 4.0]
    assert list(memory.x) == [100.0, 100.0, 30.0]
    assert len(set(speed.y)) == 3


def test_the_popular_marks_stand_on_the_rungs_that_are_meant(ladder):
    chart = ladder_chart(ladder)
    (marks,) = [t for t in chart.figure.data if t.name == "the popular ladder" and t.xaxis == "x"]
    wanted = {rung.rung: rung.speed for rung in POPULAR}
    assert dict(zip(marks.y, marks.x, strict=True)) == {"+ INT4 weights": wanted["int4"]}


def test_ceilings_are_on_the_same_axis(ladder):
    (marks,) = [t for t in ladder_chart(ladder).figure.data if (t.name or "").startswith("ceiling")]
    assert list(marks.x) == [3.0, 3.0, 11.0]
    low, high = ladder_chart(ladder).figure.layout.xaxis.range
    assert 10**low <= 1 and 10**high >= 11


def test_figures_stand_in_a_column_that_no_bar_or_mark_reaches(ladder):
    figure = ladder_chart(ladder).figure
    for axis, texts, width in (("x", ["1.00x", "2.00x", "4.00x"], 430), ("x2", ["100%", "100%", "30%"], 220)):
        (column,) = [t for t in figure.data if t.type == "scatter" and t.mode == "text" and t.xaxis == axis]
        assert list(column.text) == texts and len(set(column.x)) == 1
        reached = max(x for t in figure.data if t.xaxis == axis and t is not column for x in t.x)
        place, (low, high) = reached, figure.layout[axis.replace("x", "xaxis")].range
        if axis == "x":
            place = math.log10(reached)
        # A text ends at the half's right end and is 45 of its pixels wide.
        assert (high - place) / (high - low) * width > 45


def test_the_legend_takes_one_line(ladder):
    """In one of several lines the ceiling's tall mark would touch the one above it."""
    named = [t.name for t in ladder_chart(ladder).figure.data if t.showlegend is not False]
    # A mark and the room around it are 40 pixels, a character at most 7.5; the picture is 900 wide, a margin 180.
    assert sum(40 + 7.5 * len(name) for name in named) < 900 - 180, named


def test_the_text_is_the_table_with_what_was_left_out(ladder):
    assert "left out: it does not go" in repr(ladder_chart(ladder)) and "4.00x" in repr(ladder_chart(ladder))


def test_each_rung_has_a_colour():
    assert set(RUNG_COLOURS) == {"", *RUNGS}


def test_the_tree_names_every_branch_in_order():
    lines = repr(decision_tree()).splitlines()[1:]
    for branch, line in zip(TREE, lines, strict=True):
        assert line == f"{branch.complaint}: " + " → ".join(RUNGS[rung].title for rung in branch.rungs)


def test_the_tree_shows_what_was_decided(ladder):
    chart = decision_tree(advise(Constraint(tpot_s=0.3, has_draft=False), ladder))
    said = repr(chart)
    assert "own step [on]" in said and "INT4 weights [on]" in said and "speculation [off]" not in said
    boxes = {a.text for a in chart.figure.layout.annotations}
    assert "<s>bfloat16</s>" in boxes and "own<br>step" in boxes
    assert any("a token 1 s to 500 ms" in (t.hovertext or "") for t in chart.figure.data)


@pytest.mark.parametrize("wrong", [None, "a ladder"])
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match="ladder"):
        ladder_chart(wrong)
    with pytest.raises(ValueError, match="advice"):
        decision_tree("on")
