import itertools
import math

import pytest

from labkit.engine.decode import Decoder
from labkit.labs import _speculative_compute, _speculative_steps
from labkit.labs._result import Progress
from labkit.labs._speculative_compute import SpeculativeCompute
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import SpeculativeResult
from labkit.labs._speculative_tokens import EMITTED
from labkit.speculative.prompts import prompt_ids
from tests.labs.speculative_fixtures import (
    CPU,
    NEW,
    PROMPTS,
    Scripted,
    computed,
    continuation,
    costs,
    loaded,
    params,
    run,
)

pytestmark = pytest.mark.usefixtures("fixed_speculative")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def truth(model):
    return continuation(model)


def kinds(result: SpeculativeResult) -> list[list[str]]:
    """Of each verifying call."""
    first, *rest = [[t.kind for t in own] for _, own in itertools.groupby(result.tokens, lambda token: token.call)]
    assert first == ["prompt"]
    return rest


def test_without_a_draft_each_call_gives_exactly_one_token(model, truth):
    proposer = Scripted(truth)
    last = run(computed(proposer, model), 0)[-1]
    assert last.tokens_a_call == 1.0 and last.alpha is None and last.drafted == 0
    assert kinds(last) == [["plain"]] * 12 and proposer.asked == 0
    assert last.formula() == last.model() == 1.0 and last.speedup > 0 and not last.costs


@pytest.mark.parametrize(("gamma", "calls"), [(1, 6), (2, 4), (3, 3), (5, 2)])
def test_a_draft_that_is_always_right_gives_one_token_more_than_it_drafts(model, truth, gamma, calls):
    last = run(computed(Scripted(truth), model), gamma)[-1]
    assert last.tokens_a_call == last.formula() == gamma + 1 and last.alpha == 1.0
    assert last.drafted == gamma and last.share == 1.0 and math.isinf(last.folk)
    assert kinds(last) == [["accepted"] * gamma + ["bonus"]] * calls


def test_a_draft_whose_second_token_is_wrong_is_corrected_there(model, truth):
    last = run(computed(Scripted(truth, wrong_at=1), model), 3)[-1]
    # Five calls keep one of two that were tested; the last has room for one drafted token, which is right.
    assert last.tokens_a_call == 2.0 and last.alpha == 6 / 11 and last.folk == pytest.approx(11 / 5)
    wrong = ["accepted", "rejected", "untested", "residual"]
    assert kinds(last) == [wrong] * 5 + [["accepted", "bonus"]]
    assert last.formula() == pytest.approx((1 - last.alpha**4) / (1 - last.alpha))


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_the_tokens_that_stand_are_the_target_s(model, truth, wrong_at):
    last = run(computed(Scripted(truth, wrong_at), model), 4)[-1]
    text = "".join(token.text for token in last.tokens if token.kind in EMITTED)
    assert text == model.tokenizer.decode(truth[1][:NEW])
    assert [token.call for token in last.tokens] == sorted(token.call for token in last.tokens)


def test_tokens_come_first_then_speed_then_costs_and_each_result_is_fuller(model, truth):
    steps = list(computed(Scripted(truth), model)(params(2), lambda: False))
    results = [step for step in steps if isinstance(step, SpeculativeResult)]
    shown = [(len(r.tokens), len(r.rounds), len(r.costs)) for r in results]
    assert shown == sorted(shown) and shown[0][0] > 0 and shown[0][1:] == (0, 0)
    assert all(
        r.tokens == results[0].tokens[: len(r.tokens)] or len(r.tokens) >= len(results[0].tokens) for r in results
    )
    by_rounds = [len(r.rounds) for r in results if not r.costs]
    assert sorted(set(by_rounds)) == [0, 1, 2] and [len(r.costs) for r in results][-2:] == [1, 8]
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and fractions[-1] < 1
    assert results[-1].stats.n_emitted == 3 * 12, "one that is shown, two that are clocked"


def test_a_call_is_shown_before_the_next_one_is_made(model, truth, monkeypatch):
    monkeypatch.setattr(_speculative_steps, "_SHOWN_EVERY_S", 0.0)
    proposer, seen = Scripted(truth), []
    for step in computed(proposer, model)(params(2), lambda: False):
        if isinstance(step, SpeculativeResult) and not step.stats.n_row_calls:
            seen.append((len(step.calls), proposer.asked))
    assert seen == [(2, 1), (3, 2), (4, 3), (5, 4)], "the prompt's pass and a call, and a call more each time"


@pytest.mark.parametrize("after", [0, 1, 2, 5, 9, 14, 20, 30, 45, 60])
def test_a_cancelled_setting_drafts_no_more(model, truth, after, monkeypatch):
    looked, late = [], []
    proposer = Scripted(truth)
    decoded = Decoder.forward

    def cancelled() -> bool:
        looked.append(None)
        return len(looked) > after

    def forward(decoder, *args, **options):
        late.append(len(looked) > after)
        return decoded(decoder, *args, **options)

    monkeypatch.setattr(Decoder, "forward", forward)
    monkeypatch.setattr(_speculative_compute, "measure_costs", lambda *args, **options: costs(args[3]))
    steps = list(computed(proposer, model)(params(1), cancelled))
    # Between two looks lie at most the prompt's pass and one call; one more is made where two threads look.
    assert sum(late) <= 4 and not any(isinstance(s, SpeculativeResult) and len(s.costs) == 8 for s in steps)
    again = run(computed(Scripted(truth), model), 2)[-1]
    assert again.tokens_a_call == 3.0


def test_an_error_while_generating_is_raised(model, truth):
    proposer = Scripted(truth)
    proposer.on_ask = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(computed(proposer, model), 2)


def test_a_proposer_that_cannot_be_had_says_so_in_one_line_and_another_works(model, tmp_path):
    compute = SpeculativeCompute(Targets(model, CPU, tmp_path / "none.safetensors"), PROMPTS)
    with pytest.raises(ValueError, match="^proposer: got 'EAGLE head', which cannot draft here .*; takes ") as raised:
        run(compute, proposer="EAGLE head")
    assert "\n" not in str(raised.value) and "prompt lookup or int4 copy" in str(raised.value)
    last = run(compute, proposer="prompt lookup", prompt="copy_heavy")[-1]
    assert last.stats.n_emitted > 0 and last.speedup > 0
    assert run(compute, 0, proposer="EAGLE head")[-1].tokens_a_call == 1.0, "nothing is drafted"


def test_the_int4_copy_of_an_int4_target_is_always_right(model):
    compute = SpeculativeCompute(Targets(model, CPU), PROMPTS)
    same = run(compute, 3, proposer="int4 copy", weights="int4")[-1]
    assert same.dtype == "bfloat16" and same.tokens_a_call == 4.0 and same.alpha == 1.0
    assert run(compute, 3, proposer="int4 copy")[-1].dtype == "float32"


def test_sampling_draws_another_text_each_round_and_the_same_ones_again(model):
    compute = SpeculativeCompute(Targets(model, CPU), PROMPTS)
    one, two = (run(compute, 2, temperature=1.0, proposer="int4 copy")[-1] for _ in range(2))
    assert one.calls == two.calls and one.stats == two.stats
    assert one.stats.n_emitted == 3 * 12 and 0 < one.alpha <= 1
    greedy = run(compute, 2, proposer="int4 copy")[-1]
    assert greedy.calls != one.calls


def test_an_end_of_text_ends_the_answer(truth):
    model = loaded()
    model.tokenizer.eos_token_id = truth[1][4]
    end = truth[1].index(truth[1][4]) + 1
    last = run(computed(Scripted(truth), model), 2)[-1]
    assert sum(len(c.emitted) for c in last.calls) == end


def test_costs_of_other_lengths_are_measured_once_and_the_chosen_each_time(model, truth, monkeypatch):
    asked = []

    def measure(target, proposer, input_ids, gamma, *, sampling, min_run_s):
        asked.append((gamma, sampling.temperature, min_run_s))
        return costs(gamma)

    monkeypatch.setattr(_speculative_compute, "measure_costs", measure)
    compute = computed(Scripted(truth), model)
    run(compute, 3)
    assert [gamma for gamma, *_ in asked] == [3, 1, 2, 4, 5, 6, 7, 8]
    assert asked[0][2] > asked[1][2], "the chosen one for longer"
    asked.clear()
    assert list(run(compute, 5)[-1].costs) == list(range(1, 9)) and [gamma for gamma, *_ in asked] == [5]
    asked.clear()
    run(compute, 5, temperature=0.5)
    assert len(asked) == 8 and {temperature for _, temperature, _ in asked} == {0.5}


def test_costs_are_really_measured(model, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(_speculative_compute, "_BUDGET_S", 0.0)
    monkeypatch.setattr(_speculative_compute, "_RUN_S", 0.005)
    monkeypatch.setattr(_speculative_compute, "MOST_DRAFTED", 2)
    compute = SpeculativeCompute(Targets(model, CPU), PROMPTS)
    last = run(compute, 2, proposer="int4 copy")[-1]
    found = last.costs[2]
    assert found.step_s > 0 and found.draft_cost > 0.1 and found.verify_cost > 0.3
    assert last.model() == pytest.approx(last.formula() / (2 * found.draft_cost + found.verify_cost))


def test_the_prompt_is_a_user_s_turn(model):
    last = run(SpeculativeCompute(Targets(model, CPU), PROMPTS), 0, prompt="no_repeats")[-1]
    ids = prompt_ids(model.tokenizer, "xyz")
    assert last.prompt_text == "xyz" and last.prompt_tokens == ids.shape[1] == 3
