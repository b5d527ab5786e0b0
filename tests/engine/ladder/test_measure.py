"""A ladder measured, kept, and read as it is."""

from dataclasses import replace

import pytest
import torch

from labkit.engine.ladder import RUNGS, measure_ladder, read_ladder, recorded_ladders, write_ladder
from labkit.engine.ladder.stack import Stack
from labkit.measure import Label, Timing
from labkit.models import tiny_model
from labkit.speculative import PromptLookup

NEW = 6
IDS = torch.randint(256, (64,), generator=torch.Generator().manual_seed(0))
PROMPTS = [torch.tensor([[1, 2, 3, 4] * 4]), torch.tensor([[7, 8, 9] * 5 + [1]])]


@pytest.fixture(scope="module")
def ladder():
    return measure_ladder(
        tiny_model(),
        prompts=PROMPTS,
        proposer=PromptLookup(),
        also={"as it comes": ["attention"]},
        max_new_tokens=NEW,
        repeats=2,
        eval_ids=IDS,
        context_length=32,
        read_bandwidth=1e9,
        tell=lambda text: None,
    )


def test_a_step_for_the_baseline_and_each_rung(ladder):
    assert [step.rungs for step in ladder.steps] == [tuple(RUNGS)[:n] for n in range(len(RUNGS) + 1)]
    assert [step.title for step in ladder.steps[1:]] == [rung.title for rung in RUNGS.values()]
    assert [step.title for step in ladder.also] == ["as it comes"]
    assert all(step.tpot.n == 2 and step.tpot.median > 0 and step.ttft.median > 0 for step in ladder.measured())


def test_bytes_quality_and_ceiling_are_the_stacks(ladder):
    base, int4, kv = ladder.baseline, ladder.of("int4"), ladder.of("quantized_kv")
    assert int4.weight_bytes < base.weight_bytes / 2
    assert ladder.of("attention").perplexity == ladder.of("int8_head").perplexity
    assert ladder.of("speculation").perplexity == kv.perplexity
    assert ladder.of("step").perplexity == base.perplexity != int4.perplexity
    assert base.ceiling == pytest.approx(1e9 / base.step_bytes)
    drafting = ladder.of("speculation")
    assert drafting.ceiling == pytest.approx(drafting.tokens_per_call * 1e9 / drafting.step_bytes)
    assert drafting.tokens_per_call >= 1 and ladder.of("step").tokens_per_call == 1


def test_gains_multiply_to_the_whole(ladder):
    product = 1.0
    for step in ladder.measured():
        product *= ladder.gain(step)
    assert product == pytest.approx(ladder.speedup(ladder.top))
    assert ladder.loss(ladder.baseline) == 0


def test_what_does_not_go_on_is_left_out_and_the_rest_goes_on():
    found = measure_ladder(
        tiny_model(),
        ["speculation", "step", "int4", "int8"],
        prompts=PROMPTS[:1],
        max_new_tokens=3,
        repeats=1,
        proposer=PromptLookup(),
        tell=lambda text: None,
    )
    assert [bool(step.refused) for step in found.steps] == [False, True, False, False, True]
    assert found.top.rungs == ("step", "int4")
    assert "left out: the matrices are at 4 bits already" in repr(found)
    assert found.of("int4").perplexity is None and found.of("int4").ceiling is None


def test_turns_alternate(monkeypatch):
    order = []
    plain = Stack.generate

    def spied(self, ids, *, max_new_tokens):
        order.append((self.rungs, ids.shape[1]))
        return plain(self, ids, max_new_tokens=max_new_tokens)

    monkeypatch.setattr(Stack, "generate", spied)
    monkeypatch.setattr(Stack, "peak_bytes", lambda self, ids, *, max_new_tokens: 1)
    measure_ladder(tiny_model(), ["step"], prompts=PROMPTS, max_new_tokens=2, repeats=2, tell=lambda text: None)
    assert order[2:] == [((), 16), (("step",), 16)] * 2 * len(PROMPTS)


def test_the_table_has_a_line_for_each(ladder):
    lines = repr(ladder).splitlines()
    assert len(lines) == 2 + len(ladder.steps) + 1
    assert "1.00x" in lines[2] and lines[-1].startswith("as it comes")


def test_measurements_carry_their_rungs(ladder):
    found = [m for m in ladder.measurements() if m.name == "ladder tokens per second"]
    assert [m.params["rungs"] for m in found][:3] == [[], ["step"], ["step", "bfloat16"]]
    assert found[1].value == pytest.approx(ladder.steps[1].tokens_per_second)
    assert {m.label for m in found} == {Label.MEASURED}


def test_a_ladder_is_kept_whole_and_read_as_recorded(ladder, tmp_path):
    path = tmp_path / "ladders.json"
    assert recorded_ladders(path) == {}
    refused = replace(ladder.steps[-1], refused="for a reason", ttft=None, tpot=None)
    kept = replace(ladder, steps=(*ladder.steps, refused))
    write_ladder("one", kept, {"machine": "m", "date": "d"}, path)
    write_ladder("two", ladder, {}, path)
    found = recorded_ladders(path)
    assert list(found) == ["one", "two"]
    assert found["one"] == replace(kept, label=Label.RECORDED, where={"machine": "m", "date": "d"})
    assert isinstance(found["one"].baseline.tpot, Timing)
    assert {m.label for m in found["two"].measurements()} == {Label.RECORDED}
    with pytest.raises(KeyError):
        read_ladder({})


@pytest.mark.parametrize("text", ["{", "[1]", '{"one": {}}', '{"one": 3}', '{"one": {"steps": [{}], "also": []}}'])
def test_a_file_that_holds_no_ladders_is_named(tmp_path, text):
    path = tmp_path / "ladders.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^path: got {path}"):
        recorded_ladders(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": []},
        {"prompts": None},
        {"prompts": [torch.zeros(2, 3, dtype=torch.int64)]},
        {"prompts": [torch.arange(5)]},
        {"prompts": [[1, 2, 3]]},
        {"repeats": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": 10**9},
        {"read_bandwidth": 0.0},
        {"read_bandwidth": float("nan")},
        {"context_length": 1000, "eval_ids": IDS},
        {"also": {"x": ["speculation"]}},
        {"also": {"int4": ["step"]}},
        {"also": [["step"]]},
        {"rungs": ["x"]},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_refused_before_anything_runs(wrong, monkeypatch):
    monkeypatch.setattr(Stack, "generate", lambda *_, **__: pytest.fail("it ran"))
    options = {"rungs": ["step"], "prompts": PROMPTS} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong)) if "speculation" not in str(wrong) else "rungs"):
        measure_ladder(tiny_model(), options.pop("rungs"), **options)


def test_each_step_is_told_as_it_is_complete():
    told = []
    options = {"max_new_tokens": 2, "repeats": 1, "tell": lambda text: None}
    found = measure_ladder(tiny_model(), ["step"], prompts=PROMPTS, on_step=told.append, **options)
    assert told == list(found.steps)
    assert found.prompt_tokens == 16 and found.fastest in found.steps


def test_a_drafter_is_made_ready_once_for_each_stack():
    class Counting(PromptLookup):
        targets = []

        def begin(self, target, *more):
            if target is not getattr(self, "last", None):
                self.targets.append(target)
            self.last = target
            super().begin(target, *more)

    sets = {"a": ["step", "speculation"], "b": ["step", "bfloat16", "speculation"]}
    options = {"max_new_tokens": 3, "repeats": 2, "also": sets, "tell": lambda text: None}
    measure_ladder(tiny_model(), [], prompts=PROMPTS, proposer=Counting(), **options)
    # Once while timed and once more for the peak, whose stack begins with no decoder; never back and forth.
    assert len(Counting.targets) == 2 * len(sets)
