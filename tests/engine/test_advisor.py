"""From what must hold and what was measured to a stack, each rung with its reason."""

from dataclasses import replace

import pytest

from labkit.engine.advisor import TREE, Constraint, advise
from labkit.engine.ladder import RUNGS, Ladder, LadderStep, recorded_ladders
from labkit.engine.ladder.rungs import effective
from labkit.measure import Timing

ORDER = ("step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation")


def ladder(**changed):
    """tpot, ttft, peak, perplexity of each prefix; the quantized cache saves memory and costs time."""
    figures = {
        "": (100, 400, 600, 10.0),
        "step": (50, 300, 600, 10.0),
        "bfloat16": (40, 200, 300, 10.0),
        "int8": (25, 200, 200, 10.05),
        "int4": (18, 200, 140, 10.9),
        "int8_head": (14, 190, 120, 10.91),
        "attention": (14, 100, 110, 10.91),
        "quantized_kv": (20, 110, 90, 10.92),
        "speculation": (16, 110, 90, 10.92),
    } | changed
    steps = []
    for place, (name, (tpot, ttft, peak, ppl)) in enumerate(figures.items()):
        times = {"ttft": Timing.of([ttft / 1e3]), "tpot": Timing.of([tpot / 1e3])}
        sizes = {"peak_bytes": peak, "step_bytes": peak, "kv_bytes": 0.25 if "kv" in name or place > 6 else 0.5}
        steps.append(LadderStep(name, ORDER[:place], perplexity=ppl, **times, **sizes))
    return Ladder("m", tuple(steps), prompt_tokens=100)


def reasons(advice):
    return {step.rung: (step.on, step.reason) for step in advice.steps}


def test_without_limits_whatever_makes_tokens_faster_is_on():
    advice = advise(Constraint(), ladder())
    assert set(advice.rungs) == {"step", "bfloat16", "int4", "int8_head", "attention", "speculation"}
    on, why = reasons(advice)["quantized_kv"]
    assert not on and "costs more than it brings: a token" in why
    assert reasons(advice)["int8"] == (False, "INT4 takes its place")
    assert advice.missed == ()


def test_a_memory_limit_takes_only_what_it_needs():
    assert advise(Constraint(memory_bytes=320), ladder()).rungs == ("bfloat16",)
    advice = advise(Constraint(memory_bytes=95), ladder())
    assert "quantized_kv" in advice.rungs and advice.expected.peak_bytes <= 95
    assert "step" not in reasons(advice)


def test_a_rung_is_worth_what_it_costs_another_limit_only_while_that_is_met_or_less_than_it_brings():
    # bfloat16 makes the first token four times as fast and the others a fifth slower.
    slow = ladder(bfloat16=(60, 75, 300, 10.0), int8=(25, 200, 200, 10.05))
    both_missed = advise(Constraint(ttft_s=0.05, tpot_s=0.001), slow)
    assert reasons(both_missed)["bfloat16"][0]
    met = advise(Constraint(ttft_s=0.05, tpot_s=0.055), slow)
    assert not reasons(met)["bfloat16"][0] and "costs more" in reasons(met)["bfloat16"][1]


def test_what_cannot_be_met_is_said_with_both_figures():
    advice = advise(Constraint(memory_bytes=10, tpot_s=0.001), ladder())
    assert len(advice.missed) == 2
    assert advice.missed[0].startswith("Missed: memory") and "asked 10 B" in advice.missed[0]


def test_a_late_first_token_asks_for_attention_not_for_bits():
    advice = advise(Constraint(ttft_s=0.12), ladder())
    assert advice.rungs == ("step", "bfloat16", "attention")


def test_quality_forbids_four_bits_and_a_margin_forbids_them_sooner():
    assert "int4" in advise(Constraint(max_loss=0.1), ladder()).rungs
    for constraint in (Constraint(max_loss=0.05), Constraint(max_loss=0.1, loss_factor=2.0)):
        advice = advise(constraint, ladder())
        assert "int4" not in advice.rungs and "int8" in advice.rungs
        assert "loss +9.1%" in reasons(advice)["int4"][1]
    assert "counted 2 times" in reasons(advice)["int4"][1]


def test_what_is_known_of_another_task_stands_beside_and_decides_nothing():
    plain, code = (advise(Constraint(task=task), ladder()) for task in ("chat", "code"))
    assert code.rungs == plain.rungs and plain.notes == ()
    assert "chapter 02" in code.notes[0] and code.notes[0] in repr(code)
    assert "not measured" in advise(Constraint(task="mathematics"), ladder()).notes[0]


def test_no_draft_no_speculation():
    advice = advise(Constraint(has_draft=False), ladder())
    assert reasons(advice)["speculation"] == (False, "no draft at hand")


def test_of_several_ladders_the_one_of_about_that_length_speaks():
    long = replace(ladder(quantized_kv=(9, 110, 90, 10.92), speculation=(8, 110, 90, 10.92)), prompt_tokens=2000)
    both = [ladder(), long]
    assert "quantized_kv" not in advise(Constraint(prompt_tokens=60), both).rungs
    assert "quantized_kv" in advise(Constraint(prompt_tokens=3000), both).rungs
    assert advise(Constraint(), both).rungs == advise(Constraint(), ladder()).rungs
    for tokens in (40, 700, 9000):
        with pytest.raises(ValueError, match="prompt_tokens: got .*100, 2000"):
            advise(Constraint(prompt_tokens=tokens), both)


def test_what_the_ladder_refused_stays_off_with_its_reason():
    base = ladder()
    steps = tuple(replace(s, refused="because") if s.title == "speculation" else s for s in base.steps)
    assert reasons(advise(Constraint(), replace(base, steps=steps)))["speculation"] == (False, "because")


def test_packed_weights_bring_the_16_bits_that_they_compute_in():
    slow = ladder(bfloat16=(60, 200, 300, 10.0))  # on top of the step alone bfloat16 loses
    advice = advise(Constraint(), slow)
    assert {"bfloat16", "int4"} <= set(advice.rungs)
    assert reasons(advice)["bfloat16"] == (True, "INT8 weights compute in it")


def test_on_the_recorded_ladder_it_finds_the_fastest_set():
    recorded = recorded_ladders()["smollm2-135m, cpu"]
    advice = advise(Constraint(), recorded)
    assert set(advice.rungs) == set(effective(recorded.fastest.rungs))
    assert advice.expected.tpot_s == recorded.fastest.tpot.median


def test_it_follows_the_figures():
    slow = ladder(speculation=(40, 110, 90, 10.92))
    assert "speculation" not in advise(Constraint(), slow).rungs


def test_the_tree_names_every_rung():
    assert {rung for branch in TREE for rung in branch.rungs} == set(RUNGS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"loss_factor": -1},
        {"ttft_s": -1},
        {"max_loss": -0.1},
        {"task": "poems"},
        {"has_draft": "yes"},
    ],
)
def test_wrong_constraints_are_refused_by_field(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Constraint(**wrong)


@pytest.mark.parametrize("wrong", [None, "ladder", [], ["ladder"]])
def test_what_is_no_ladder_is_refused(wrong):
    with pytest.raises(ValueError, match="ladder: got"):
        advise(Constraint(), wrong)
    with pytest.raises(ValueError, match="constraint: got"):
        advise("faster", ladder())


def test_renders_with_what_to_expect():
    text = repr(advise(Constraint(), ladder()))
    assert "own step" in text and "Expected:" in text
