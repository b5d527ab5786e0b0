"""Sets that were not measured: ratios multiply, lengths add bytes."""

from dataclasses import replace

import pytest

from labkit.engine.ladder import Ladder, LadderStep
from labkit.engine.ladder.estimate import estimate
from labkit.measure import Label, Timing


def step(*rungs, ttft=1.0, tpot=1.0, peak=100, ppl=10.0, step_bytes=100, kv=1.0, refused=""):
    times = {"ttft": Timing.of([ttft]), "tpot": Timing.of([tpot])}
    sizes = {"peak_bytes": peak, "step_bytes": step_bytes, "kv_bytes": kv}
    return LadderStep(rungs[-1] if rungs else "base", rungs, perplexity=ppl, refused=refused, **times, **sizes)


LADDER = Ladder(
    "m",
    (
        step(),
        step("step", tpot=0.5),
        step("step", "int8", tpot=0.25, peak=50, ppl=10.1, step_bytes=50),
        step("step", "int8", "int4", tpot=0.2, peak=25, ppl=11.0, step_bytes=25),
        step("step", "int8", "int4", "quantized_kv", tpot=0.3, peak=24, ppl=11.0, step_bytes=25, kv=0.5),
    ),
    prompt_tokens=10,
)


def test_a_measured_set_is_what_was_measured():
    found = estimate(LADDER, ["step", "int8"])
    assert (found.tpot_s, found.peak_bytes, found.label) == (0.25, 50, Label.MEASURED)
    assert found.loss == pytest.approx(0.01)


def test_int4_takes_the_place_of_int8_and_has_both_gains():
    assert estimate(LADDER, ["step", "int4"]) == estimate(LADDER, ["int8", "int4", "step"])
    found = estimate(LADDER, ["int4"])
    assert found.label is Label.MODELLED
    assert found.tpot_s == pytest.approx(1.0 * (0.25 / 0.5) * (0.2 / 0.25))
    assert found.peak_bytes == pytest.approx(25)
    assert found.loss == pytest.approx(0.1)


def test_other_sets_are_products_of_ratios():
    found = estimate(LADDER, ["step", "quantized_kv"])
    assert found.tpot_s == pytest.approx(0.5 * 0.3 / 0.2)
    assert found.peak_bytes == pytest.approx(100 * 24 / 25) and found.loss == pytest.approx(0)


def test_a_set_that_was_measured_beside_the_ladder_is_taken_as_it_was():
    other = step("step", "quantized_kv", tpot=0.7, ttft=3.0, peak=77)
    found = estimate(replace(LADDER, also=(other,)), ["step", "quantized_kv"])
    assert (found.tpot_s, found.ttft_s, found.peak_bytes, found.label) == (0.7, 3.0, 77, Label.MEASURED)


def test_a_rung_that_was_not_measured_is_refused():
    with pytest.raises(ValueError, match="rungs: got 'attention'"):
        estimate(LADDER, ["attention"])
