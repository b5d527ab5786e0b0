import dataclasses
import math

import pytest
import torch

from labkit.engine.ladder import Ladder, LadderStep, Stack, StackModels, WeightForm
from labkit.labs import _stack_compute, _stack_steps
from labkit.labs._result import Progress
from labkit.labs._stack_result import StackParams, StackResult
from labkit.measure import Timing
from labkit.quality import perplexity
from tests.labs.stack_fixtures import ALL, CONTEXT, CPU, WINDOWS, computed, first, fix, loaded, params, run, texts


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    fix(monkeypatch)


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def compute(model):
    return computed(model)


def test_each_form_of_the_weights_takes_fewer_bytes(compute):
    forms = [(), ("bfloat16",), ("bfloat16", "int8"), ("bfloat16", "int4")]
    whole, half, eight, four = (first(compute, *on).sizes for on in forms)
    assert whole.weight_bytes == 2 * half.weight_bytes and whole.kv_bytes == 2 * half.kv_bytes
    assert four.weight_bytes < eight.weight_bytes < half.weight_bytes
    assert four.step_bytes < eight.step_bytes < half.step_bytes < whole.step_bytes


def test_a_packed_head_is_read_in_fewer_bytes_and_leaves_the_matrices(compute):
    plain, packed = (first(compute, "step", "bfloat16", "int4", *more) for more in ((), ("int8_head",)))
    head = 256 * 64
    saved = plain.sizes.step_bytes - packed.sizes.step_bytes
    # One byte a weight in place of two, and a scale and a zero for 64 of them.
    assert 0.8 * head < saved <= head


def test_a_quantized_cache_holds_nine_sixteenths(compute):
    plain, packed = (first(compute, "bfloat16", *more).sizes for more in ((), ("quantized_kv",)))
    group = 16  # the tiny model's heads have so many channels: a scale and a zero of 16 bits each
    assert packed.kv_bytes / plain.kv_bytes == (8 + 32 / group) / 16
    wide = computed(loaded(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    plain, packed = (first(wide, "bfloat16", *more).sizes for more in ((), ("quantized_kv",)))
    assert packed.kv_bytes / plain.kv_bytes == (8 + 1) / 16


def test_speculation_yields_at_least_a_token_a_call_and_at_most_the_draft_and_one(compute):
    for gamma in (1, 3):
        last = run(compute, "step", "speculation", num_assistant_tokens=gamma)[-1]
        assert 1 <= last.tokens_per_call <= gamma + 1 and last.gamma == gamma and last.proposer == "prompt lookup"
    assert last.stats.n_emitted > 0
    off = run(compute, "step", num_assistant_tokens=3)[-1]
    assert off.tokens_per_call == 1.0 and off.gamma == 0 and off.acceptance is None


def test_what_does_not_go_together_is_left_out_and_the_set_stays(compute):
    last = run(compute, "bfloat16", "speculation")[-1]
    assert last.on == ("bfloat16",) and list(last.left_out) == ["speculation"]
    assert "own step" in last.left_out["speculation"] and last.speedup > 0
    half = loaded()
    half.model.to(torch.bfloat16)
    half = first(computed(half), "step", "bfloat16")
    assert half.on == ("step",) and "16 bits already" in half.left_out["bfloat16"] and half.dtype == "bfloat16"


def test_rungs_go_on_in_the_ladders_order_and_int4_takes_int8s_place(compute):
    last = run(compute, *reversed(ALL))[-1]
    assert last.params.rungs == ALL and last.on == ALL and not last.left_out
    assert last.effective == tuple(rung for rung in ALL if rung != "int8")
    only = first(compute, *(rung for rung in ALL if rung != "int8"))
    assert only.sizes.weight_bytes == last.sizes.weight_bytes and only.key == last.key


def test_a_look_comes_first_then_turns_then_bytes_then_perplexity(compute):
    found = list(compute(params("step", "bfloat16", "int4"), lambda: False))
    results = [step for step in found if isinstance(step, StackResult)]
    counted = [
        (bool(r.first), bool(r.kept), len(r.turns), bool(r.sizes.peak_bytes), bool(r.bandwidth), _windows(r))
        for r in results
    ]
    assert counted[0] == (False, False, 0, False, False, 0) and results[0].sizes.weight_bytes > 0
    assert counted == sorted(counted) and counted[-1] == (True, True, 2, True, True, WINDOWS)
    assert (True, False, 0, False, False, 0) in counted and (True, True, 1, False, False, 0) in counted
    fractions = [step.fraction for step in found if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and fractions[-1] < 1


def _windows(result: StackResult) -> int:
    return len(result.quality.stack) if result.quality else 0


def test_baseline_and_set_take_turns_and_the_baselines_first_look_is_kept(compute, monkeypatch):
    calls = []
    generate = Stack.generate

    def noted(stack, input_ids, *, max_new_tokens):
        calls.append((stack.rungs, input_ids.shape[1], max_new_tokens))
        return generate(stack, input_ids, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(Stack, "generate", noted)
    one, look, turn = run(compute, "step")[-1], _stack_compute._FIRST_TOKENS, _stack_compute._TURN_TOKENS
    clocked = [(rungs, new) for rungs, _, new in calls if new > 2]
    assert clocked[:6] == [(("step",), look), ((), look)] + [((), turn), (("step",), turn)] * 2
    calls.clear()
    two = run(compute, "step", "attention")
    clocked = [rungs for rungs, _, new in calls if new == look]
    assert clocked == [("step", "attention")] and two[1].kept == one.kept, "once for a prompt"
    calls.clear()
    run(compute, "step", prompt="long")
    assert [(rungs, n) for rungs, n, new in calls if new == look] == [(("step",), 48), ((), 48)]


def test_times_and_ratios_are_those_of_the_turns(compute):
    last = run(compute, "step")[-1]
    assert last.speedups == sorted(turn.baseline.tpot_s / turn.stack.tpot_s for turn in last.turns)
    assert last.stack == Timing.of([turn.stack.tpot_s for turn in last.turns])
    assert last.baseline == Timing.of([turn.baseline.tpot_s for turn in last.turns])
    assert last.ceiling == pytest.approx(last.bandwidth / last.sizes.step_bytes)
    drafting = run(compute, "step", "speculation")[-1]
    expected = drafting.tokens_per_call * drafting.bandwidth / drafting.sizes.step_bytes
    assert drafting.ceiling == pytest.approx(expected)


def test_perplexity_is_the_whole_texts_and_each_form_is_judged_once(compute, model, monkeypatch):
    asked = []
    judged = Stack.perplexity

    def noted(stack, token_ids, context_length):
        asked.append(stack.rungs)
        return judged(stack, token_ids, context_length)

    monkeypatch.setattr(Stack, "perplexity", noted)
    last = run(compute, "step", "int4")[-1]
    windows, four = texts().evaluation, StackModels(model).model(WeightForm(torch.float32, 4))
    assert last.quality.base == pytest.approx(perplexity(model, windows.flatten(), CONTEXT), rel=1e-5)
    assert last.quality.perplexity == pytest.approx(perplexity(four, windows.flatten(), CONTEXT), rel=1e-5)
    assert last.quality.loss == pytest.approx(last.quality.perplexity / last.quality.base - 1)
    assert asked == [(), ("step", "int4")] * WINDOWS
    asked.clear()
    again = run(compute, "step", "int4", "attention")[-1]
    assert not asked and again.quality == last.quality, "attention leaves the output as it is"
    run(compute, "step", "int4", "quantized_kv")
    assert asked == [("step", "int4", "quantized_kv")] * WINDOWS


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 11])
def test_a_cancelled_setting_runs_at_most_what_it_is_in(model, after, monkeypatch):
    compute, looked, late = computed(model), [], []
    for name in ("generate", "perplexity", "peak_bytes"):
        whole = getattr(Stack, name)

        def counted(stack, *args, whole=whole, name=name, **options):
            late.append(len(looked) > after and name != "generate" or len(looked) > after + 1)
            return whole(stack, *args, **options)

        monkeypatch.setattr(Stack, name, counted)

    def cancelled() -> bool:
        looked.append(None)
        return len(looked) > after

    found = list(compute(params("step", "bfloat16"), cancelled))
    assert not any(late), "nothing is begun once it has been seen"
    assert not any(isinstance(s, StackResult) and _windows(s) == WINDOWS for s in found)


def test_the_ceiling_is_measured_again_where_a_step_beats_it(model, monkeypatch):
    found, refreshed = [1.0, 7e9], []

    def measure(device, refresh=False):
        refreshed.append(refresh)
        return type("Ceilings", (), {"read_bandwidth": found[min(len(refreshed), 2) - 1]})

    monkeypatch.setattr(_stack_compute, "measure_ceilings", measure)
    compute = computed(model)
    assert run(compute, "step")[-1].bandwidth == 7e9 and refreshed == [False, True]
    assert run(compute)[-1].bandwidth == 7e9 and refreshed == [False, True], "once"


def test_threads_are_put_back(model, monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(_stack_compute, "fastest_threads", lambda decoder, counts, cancelled: counts[0])
        assert run(computed(model), "step")[-1].threads == 1 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_popular_ladder_stands_beside_the_sets_that_it_names(compute):
    def told(*on: str) -> float | None:
        result = dataclasses.replace(first(compute), on=on)
        return result.popular and result.popular.speed

    assert told() == 1.0 and told("int8") == 1.8 and told("step", "bfloat16", "int8") == 1.8
    assert told("int4") == told("int8", "int4") == told("int4", "attention") == 3.0
    assert told("int4", "attention", "quantized_kv") == 5.0 and told(*ALL) == 8.0
    nothing = ("step",), ("step", "speculation"), ("int4", "quantized_kv"), ("int4", "speculation")
    assert {told(*on) for on in nothing} == {None}


def test_the_same_set_of_a_recorded_ladder_is_found(monkeypatch):
    def step(*rungs: str, tpot: float) -> LadderStep:
        return LadderStep("", rungs, ttft=Timing.of([1.0]), tpot=Timing.of([tpot]))

    steps = (step(tpot=0.1), step("step", tpot=0.05), step("step", "int8", "int4", tpot=0.02))
    steps += (step("step", "speculation", tpot=0.01),)
    where = {"date": "2026-01-01", "machine": "a machine", "num_assistant_tokens": 2}
    ladder = Ladder("tiny", steps, prompt_tokens=40, where=where)
    monkeypatch.setattr(_stack_steps, "recorded_ladders", lambda: {"tiny, cpu": ladder})
    assert _stack_steps.recorded("tiny", CPU, ("step",), 4).speedup == pytest.approx(2.0)
    found = _stack_steps.recorded("tiny", CPU, ("step", "int4"), 2)
    assert found.speedup == pytest.approx(5.0) and found.where == "2026-01-01, a machine, 40 prompt tokens"
    drafts = [_stack_steps.recorded("tiny", CPU, ("step", "speculation"), gamma) for gamma in (2, 3)]
    assert drafts[0].speedup == pytest.approx(10.0) and drafts[1] is None, "another draft length is another set"
    assert _stack_steps.recorded("tiny", CPU, ("step", "bfloat16"), 2) is None
    assert _stack_steps.recorded("other", CPU, ("step",), 2) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rungs": ("int5",)}, "^rungs: got 'int5'"),
        ({"rungs": ("int4", "int4")}, "^rungs: got .*each rung once"),
        ({"rungs": (), "prompt": "short"}, "^prompt: got 'short'"),
        ({"rungs": (), "num_assistant_tokens": 0}, "^num_assistant_tokens: got 0; takes an integer from 1 to 6"),
    ],
)
def test_a_wrong_setting_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        StackParams(**wrong)


def test_every_figure_is_finite_and_labelled(compute):
    last = run(compute, *ALL)[-1]
    lines = {m.name.removeprefix("stack_lab."): m for m in last.measurements()}
    assert all(math.isfinite(m.value) for m in lines.values())
    assert {lines[name].label for name in ("ceiling", "kv_bytes", "step_bytes")} == {"MODELLED"}
    assert not any("popular" in name for name in lines), "a folk claim is no measurement"
    assert lines["speedup"].label == lines["peak_bytes"].label == lines["perplexity"].label == "MEASURED"
    assert lines["speedup"].params["rungs"] == list(ALL) and lines["speedup"].params["num_assistant_tokens"] == 2
