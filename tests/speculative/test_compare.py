"""Methods in turns on one set of prompts: order, medians, ratios, and outputs that differ."""

from __future__ import annotations

import pytest
import torch

from labkit.engine.decode import Decoder
from labkit.models import tiny_model
from labkit.speculative.compare import Run, compare_methods, first_difference, logit_noise
from labkit.speculative.stats import SpeculativeStats

TARGET = Decoder(tiny_model())
PROMPTS = [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])]


class Scripted:
    """A method whose runs take set times: `seconds` by prompt, one a repeat; the first call warms up."""

    def __init__(self, name: str, log: list[str], seconds: dict[int, list[float]], wrong: int | None = None) -> None:
        self.name, self.log, self.seconds, self.wrong = name, log, seconds, wrong
        self.warm = False

    def __call__(self, prompt: torch.Tensor) -> Run:
        self.log.append(f"{self.name}{prompt.shape[1]}")
        tokens = TARGET.generate(prompt, max_new_tokens=6).sequences.clone()
        if self.wrong is not None:
            tokens[0, prompt.shape[1] + self.wrong] = (tokens[0, prompt.shape[1] + self.wrong] + 1) % 256
        took = self.seconds[prompt.shape[1]].pop(0) if self.warm else 99.0
        self.warm = True
        return Run(tokens, took, SpeculativeStats(8, 4, 3, 2, 2, 6) if self.name == "b" else None)


def compared(wrong: int | None = None) -> tuple[object, list[str]]:
    log: list[str] = []
    a = Scripted("a", log, {3: [2.0, 9.0, 3.0], 2: [1.0, 1.0, 1.0]})
    b = Scripted("b", log, {3: [1.0, 1.5, 8.0], 2: [2.0, 2.0, 2.0]}, wrong)
    return compare_methods({"a": a, "b": b}, PROMPTS, repeats=3, target=TARGET), log


def test_methods_take_turns_after_a_call_to_warm_up() -> None:
    _, log = compared()
    assert log == ["a3", "b3", *["a3", "b3"] * 3, *["a2", "b2"] * 3]


def test_medians_by_prompt_then_ratios() -> None:
    result, _ = compared()
    assert result.of("a").seconds == (3.0, 1.0) and result.of("b").seconds == (1.5, 2.0)
    assert result.ratios("b") == pytest.approx((2.0, 0.5))
    assert result.ratio("b") == pytest.approx(4.0 / 3.5)
    assert result.ratio("a", over="b") == pytest.approx(3.5 / 4.0)
    assert result.of("b").new_tokens == (6, 6)
    with pytest.raises(ValueError, match="name: got 'c'"):
        result.of("c")


def test_counts_are_those_of_one_pass_over_the_prompts() -> None:
    result, _ = compared()
    assert result.of("a").stats is None
    assert result.of("b").stats.n_emitted == 12 and result.of("b").stats.tokens_per_target_call == 3.0


def test_the_table_has_a_line_a_method_and_says_where_outputs_differ() -> None:
    lines = repr(compared()[0]).splitlines()
    assert lines[2].split()[:3] == ["a", "3", "1.00x"] and "2 of 2" in lines[2]
    assert "1.14x" in lines[3] and "0.50x" in lines[3] and "3.00" in lines[3] and "75%" in lines[3]
    wrong = compared(wrong=2)[0]
    assert wrong.of("b").unequal == 2 and wrong.of("a").unequal == 0
    assert [found.position for found in wrong.of("b").differences] == [5, 4]
    assert "0 of 2, 2 differ" in repr(wrong) and "<td" in wrong._repr_html_()


def test_a_repeat_that_differs_counts_too() -> None:
    calls = []

    def unsteady(prompt: torch.Tensor) -> Run:
        calls.append(0)
        tokens = TARGET.generate(prompt, max_new_tokens=4).sequences.clone()
        tokens[0, -1] = (tokens[0, -1] + (len(calls) == 3)) % 256
        return Run(tokens, 1.0)

    assert compare_methods({"a": unsteady}, PROMPTS[:1], repeats=3, target=TARGET).of("a").unequal == 1


def test_a_difference_says_where_and_how_far_apart_the_logits_are() -> None:
    made = TARGET.generate(PROMPTS[0], max_new_tokens=20).sequences
    assert first_difference(TARGET, made, made.clone()) is None
    other = made.clone()
    logits = TARGET.model(made[:, :15]).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert best == int(made[0, 15])
    other[0, 15] = second
    found = first_difference(TARGET, made, other)
    assert (found.position, found.tokens) == (15, (best, second))
    assert found.gap == pytest.approx(float(logits[best] - logits[second]), abs=1e-4)
    assert 0 < found.noise < 1e-3 and not found.within_noise
    # The gap is to the token that was chosen, not to the second best.
    other[0, 15] = int(logits.argmin())
    assert first_difference(TARGET, made, other).gap == pytest.approx(float(logits.max() - logits.min()), abs=1e-4)


def test_a_tie_is_within_noise_and_an_early_end_is_not() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[9] = model.lm_head.weight.sum(0) * 0
    decoder = Decoder(model)
    a, b = torch.tensor([[1, 2, 3, 7]]), torch.tensor([[1, 2, 3, 9]])
    logits = model(a[:, :3]).logits[0, -1]
    assert first_difference(decoder, a, b).gap == pytest.approx(float(logits.max()), abs=1e-4)
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[9] = 10 * model.lm_head.weight[int(logits.argmax())]
    tied = first_difference(decoder, a, b)
    assert tied.gap == 0 and tied.within_noise
    early = first_difference(TARGET, a, a[:, :3])
    assert early.position == 3 and early.tokens == (7, None) and not early.within_noise


def test_noise_is_what_a_step_of_many_tokens_rounds_differently() -> None:
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    noise, last = logit_noise(TARGET, tokens)
    torch.testing.assert_close(last, TARGET.model(tokens).logits[0, -1], atol=1e-4, rtol=1e-4)
    coarse, _ = logit_noise(Decoder(tiny_model().bfloat16()), tokens)
    assert 0 < noise < 1e-3 < coarse < 1


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="methods"):
        compare_methods({}, PROMPTS, target=TARGET)
    with pytest.raises(ValueError, match="prompts"):
        compare_methods({"a": print}, [], target=TARGET)
    with pytest.raises(ValueError, match="repeats"):
        compare_methods({"a": print}, PROMPTS, 0, target=TARGET)
    with pytest.raises(ValueError, match="after the same prompt"):
        first_difference(TARGET, PROMPTS[0], PROMPTS[1])
    with pytest.raises(ValueError, match="a: got '2 rows'"):
        first_difference(TARGET, torch.ones(2, 3, dtype=torch.int64), PROMPTS[0])
