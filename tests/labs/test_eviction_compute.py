import dataclasses
import math

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache import bytes_per_token
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.eviction import eviction_cache, prompt_budget
from labkit.kv_cache.needle import find_needles, needle_prompts
from labkit.labs import _eviction_compute, _eviction_steps
from labkit.labs._eviction_compute import EvictionCompute
from labkit.labs._eviction_result import BUDGETS, DEPTHS, METHODS, EvictionParams, EvictionResult, Kept, Span
from labkit.labs._eviction_steps import Remembered, kept_positions, look, snapkv_prompt
from labkit.labs._quantization_text import prepare
from labkit.labs._result import Progress
from labkit.measure import Label
from labkit.quality import perplexity
from tests.labs.eviction_fixtures import CPU, NEEDLE_LENGTH, compute_for, loaded, run

FORGETFUL = METHODS[1:]


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def prompts(model):
    return needle_prompts(model, n=5, context_length=NEEDLE_LENGTH, depths=DEPTHS)


@pytest.fixture
def compute(model) -> EvictionCompute:
    return compute_for(model)


def cache_after(model, prompt, method: str, budget: float):
    """The cache as the prompt but for its last token has gone in."""
    cache = eviction_cache(model, method, prompt_budget(prompt, budget))()
    with torch.no_grad():
        model.model.base_model(input_ids=prompt.input_ids[None, :-1], past_key_values=cache, use_cache=True)
    return cache


def test_what_is_kept_comes_first_and_each_result_holds_what_the_one_before_held(compute):
    steps = list(compute(EvictionParams("sinks", 0.25, 0.3, "tiny"), lambda: False))
    results = [step for step in steps if isinstance(step, EvictionResult)]
    known = [
        tuple(len(n.found) if n else 0 for n in (r.needles, r.full_needles)) + (r.quality.scored if r.quality else 0,)
        for r in results
    ]
    assert known[0] == (0, 0, 0) and known == sorted(known)
    assert known[1:6] == [(i, 0, 0) for i in range(1, 6)] and (5, 5, 0) in known and known[-1] == (5, 5, 511)
    chunks = [k[2] for k in known if k[2]]
    assert chunks == [*range(32, 511, 32), 511] and results[-1].quality.firm
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_bytes_are_counted_and_are_those_of_the_formula(model, prompts, method, budget):
    prompt = prompts[1]
    kept, seen = look(model, prompt, method, budget), len(prompt.input_ids) - 1
    token = bytes_per_token(model.model.config, model.model.dtype)
    assert token == 2 * 2 * 2 * 16 * 4
    held = seen if method == "full" or budget == 1 else round(budget * (seen + 1))
    assert (kept.held, len(kept.tokens), kept.full_bytes) == (held, seen, seen * token)
    cache = cache_after(model, prompt, method, budget)
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert kept.nbytes == sum({x.data_ptr(): x.nbytes for x in tensors}.values()) == kept.predicted
    sinks_again = 0 if held == seen else 4 * token // 2
    extra = {"sinks": sinks_again, "heavy_hitters": held * 2 * 2 * 8, "snapkv": held * 2 * 2 * 4}.get(method, 0)
    assert kept.bookkeeping == extra and kept.nbytes == held * token + extra


@pytest.mark.parametrize("method", METHODS)
def test_the_map_shows_the_tokens_whose_values_the_cache_has(model, prompts, method):
    """Values are not rotated: a token that is held has in the cache what it has in one of all tokens."""
    prompt = prompts[2]
    kept, cache = look(model, prompt, method, 0.25), cache_after(model, prompt, method, 0.25)
    full = cache_after(model, prompt, "full", 1.0)
    for i, row in enumerate(kept.heads):
        held, values = cache.layers[i].values[0].double(), full.layers[i].values[0].double()
        if i:  # in the first layer a byte has the same values wherever it stands
            there = (torch.cdist(values, held).min(dim=2).values < 1e-4).sum(dim=0)
            assert list(row) == there.tolist()
        at = kept_positions(cache, len(kept.tokens))[i]
        for head in range(2):
            torch.testing.assert_close(values[head, at[head]], held[head], rtol=0, atol=1e-5)


def test_a_window_holds_the_end_and_sinks_the_start_too(model, prompts):
    prompt = prompts[1]
    window, sinks = (look(model, prompt, method, 0.25) for method in ("window", "sinks"))
    assert prompt.depth == 0.3 and window.needle.start == prompt.fact_at >= 4
    seen, held = len(window.tokens), window.held
    assert window.heads[0] == (0,) * (seen - held) + (2,) * held
    assert sinks.heads[1] == (2,) * 4 + (0,) * (seen - held) + (2,) * (held - 4)
    for kept in (window, sinks):
        assert (kept.share(kept.needle), kept.share(kept.digits), kept.share(kept.question)) == (0, 0, 1)
    everything = look(model, prompt, "full", 0.25)
    assert everything.share(everything.digits) == 1 and everything.ratio == 1


def test_the_needle_its_number_and_the_question_are_where_the_text_has_them(model, prompts):
    for prompt in prompts:
        kept = look(model, prompt, "snapkv", 0.5)
        text = "".join(kept.tokens)
        assert text[kept.needle.start : kept.needle.end] == f" {prompt.fact}"
        assert text[kept.digits.start : kept.digits.end].strip() == kept.answer == prompt.fact[-5:-1]
        question = prompt.fact[: -len(" 1234.")]
        assert text[kept.question.start : kept.question.end] == f" {question}"[:-1] and kept.question.end == len(text)


def test_a_share_counts_layers_and_heads():
    size = Span(0, 1)
    kept = Kept(((3, 0, 1), (2, 0, 0)), ("a", "b", "c"), 3, size, size, size, 1, 6, 6, 8, 4, "1", "1", True)
    assert [kept.share(Span(i, i + 1)) for i in range(3)] == [5 / 6, 0, 1 / 6]
    assert kept.share(Span(0, 3)) == 1 / 3 and (kept.ratio, kept.bookkeeping) == (0.75, 2)


@pytest.mark.parametrize("method", METHODS)
def test_needles_are_found_prompt_by_prompt_as_find_needles_does(compute, prompts, model, method, monkeypatch):
    asked = []

    def fake(model, prompts, make_cache):
        cache = make_cache()
        asked.append((prompts[0].fact, type(cache).__name__, getattr(cache, "window_length", None)))
        # The real thing on an answer that this model gives, so that there is something to find.
        return find_needles(model, [answered(model, prompts[0])], make_cache)

    monkeypatch.setattr(_eviction_steps, "find_needles", fake)
    result = run(compute, method, 0.5)[-1]
    expected = [
        find_needles(
            model, [answered(model, prompt)], eviction_cache(model, method, round(0.5 * len(prompt.input_ids)))
        ).found
        == 1
        for prompt in prompts
    ]
    assert list(result.needles.found) == expected and result.full_needles.found == (True,) * 5
    assert result.needles.count == sum(expected) and result.needles.firm and result.depths == DEPTHS
    assert [a[0] for a in asked[:5]] == [p.fact for p in prompts]
    if method in ("window", "sinks"):
        assert [a[2] for a in asked[:5]] == [round(0.5 * len(p.input_ids)) for p in prompts]


def answered(model, prompt):
    """The prompt whose answer is what the model says when it reads all tokens."""
    ids = prompt.input_ids[None]
    with torch.no_grad():
        for _ in range(2):
            ids = torch.cat((ids, model.model(input_ids=ids).logits[:, -1:].argmax(-1)), dim=1)
    return dataclasses.replace(prompt, answer_ids=ids[0, -2:])


def test_what_the_model_says_is_what_it_goes_on_with(model, prompts):
    prompt = answered(model, prompts[3])
    # The spans are the real answer's.
    original = _eviction_steps._spans(prompts[3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_eviction_steps, "_spans", lambda _: original)
        kept = look(model, prompt, "full", 1.0)
        assert kept.found and kept.said == kept.answer
        assert not look(model, dataclasses.replace(prompt, answer_ids=prompt.answer_ids + 1), "full", 1.0).found


def test_the_whole_budget_has_room_for_the_answer_too(model, prompts):
    prompt = prompts[0]
    whole = torch.cat((prompt.input_ids, prompt.answer_ids))
    for method in FORGETFUL:
        cache = eviction_cache(model, method, prompt_budget(prompt, 1.0))()
        with torch.no_grad():
            for step in (whole[:-5], *whole[-5:].split(1)):
                model.model.base_model(input_ids=step[None], past_key_values=cache, use_cache=True)
        assert cache.held == len(whole) == len(prompt.input_ids) + 5, method


@pytest.mark.parametrize("method", FORGETFUL)
def test_at_the_whole_budget_nothing_is_forgotten(compute, method):
    result = run(compute, method, 1.0, 0.9)[-1]
    full = run(compute, "full", 1.0, 0.9)[-1]
    assert result.kept.heads == full.kept.heads and result.kept.said == full.kept.said
    assert result.quality.ratio == pytest.approx(1, rel=1e-5) and result.needles == result.full_needles


def test_perplexity_is_that_of_the_text_read_through_the_cache(compute, model):
    window = prepare(model, None).evaluation[:512]
    result = run(compute, "sinks", 0.125)[-1]
    expected = cached_perplexity(model, window, 512, eviction_cache(model, "sinks", 64), chunk=32)
    assert result.quality.perplexity == pytest.approx(expected, rel=1e-5)
    assert result.quality.baseline == pytest.approx(perplexity(model, window, 512), rel=1e-4)
    assert (result.quality.of, result.quality.prompt_length) == (511, 0)
    assert result.quality.ratio != pytest.approx(1, rel=1e-3)


def test_snapkv_is_scored_behind_prompts_beside_all_tokens_on_the_same(compute, model):
    windows = prepare(model, None).evaluation[: 4 * 512]
    result = run(compute, "snapkv", 0.25)[-1]
    quality = result.quality
    assert (quality.prompt_length, quality.of, quality.scored) == (488, 4 * 24, 4 * 24)
    made = {"snapkv": eviction_cache(model, "snapkv", 128 - 23), "full": DynamicCache}
    expected = [cached_perplexity(model, windows, 512, make, chunk=32, prompt_length=488) for make in made.values()]
    assert [quality.perplexity, quality.baseline] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("context", [64, 128, 512, 2048])
def test_every_budget_leaves_snapkv_room_for_its_voters(context):
    after = context - 1 - snapkv_prompt(context)
    assert after >= 1 and (context < 512 or after == round(context / 16) - 9)


def test_each_prompt_and_window_runs_once_for_a_method_and_budget(compute, monkeypatch):
    run(compute, "window", 0.25)
    calls = []
    for name in ("is_found", "eviction_point"):
        real = getattr(_eviction_compute, name)
        monkeypatch.setattr(
            _eviction_compute, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k)
        )
    again = run(compute, "window", 0.25, 0.9)
    assert calls == [] and again[1].needles.firm and again[1].full_needles.firm
    assert again[0].kept.needle.start > 100 and again[-1].quality.firm
    run(compute, "window", 0.5)
    assert calls == ["is_found"] * 5 + ["eviction_point"], "all tokens are not asked again"
    calls.clear()
    everything = run(compute, "full", 0.25)[-1]
    assert calls == [] and everything.needles == everything.full_needles and everything.quality.ratio == 1


def test_a_cancelled_setting_stops_and_what_it_measured_is_used_when_it_comes_back(compute):
    seen = []

    def cancelled() -> bool:
        return sum(isinstance(s, EvictionResult) for s in seen) >= 3

    for step in compute(EvictionParams("window", 0.25, 0.1, "tiny"), cancelled):
        seen.append(step)
    results = [s for s in seen if isinstance(s, EvictionResult)]
    assert len(results) == 3 and results[-1].needles.tried == 2 and results[-1].quality is None
    assert [r.needles.tried for r in run(compute, "window", 0.25) if r.needles][0] == 3


def test_remembered_items_are_computed_once_and_again_after_an_error():
    made = []

    def stream():
        for i in range(3):
            made.append(i)
            if len(made) == 2:
                raise RuntimeError("out of memory")
            yield i

    items = Remembered(stream, lambda item: item == 2)
    assert items[0] == 0
    with pytest.raises(RuntimeError):
        items[1]
    assert items[1] == 1 and items[0] == 0 and made == [0, 1, 0, 1]


def test_gradients_stay_on_and_no_cache_outlives_its_setting():
    model = loaded()
    compute = compute_for(model)
    for method in ("snapkv", "heavy_hitters"):
        for step in compute(EvictionParams(method, 0.25, 0.1, "tiny"), lambda: False):
            assert torch.is_grad_enabled(), step
    attention = model.model.model.layers[0].self_attn
    # A cache takes its hooks with it when it goes.
    assert not attention._forward_hooks and not attention._forward_pre_hooks


def test_the_ledger_has_each_figure_with_its_parameters_and_label(compute):
    result = run(compute, "heavy_hitters", 0.25, 0.5)[-1]
    lines = {m.name.removeprefix("eviction_lab."): m for m in result.measurements()}
    params = {"method": "heavy_hitters", "budget": 0.25, "depth": 0.5, "model": "tiny"}
    assert all(m.params == params and m.dtype == "float32" for m in lines.values())
    labels = {name: m.label for name, m in lines.items()}
    assert labels.pop("full_bytes") == Label.MODELLED and set(labels.values()) == {Label.MEASURED}
    kept = result.kept
    assert lines["cache_bytes"].value == kept.nbytes and lines["held"].value == kept.held
    assert lines["digits_kept"].value == kept.share(kept.digits)
    assert lines["needles_found"].shapes == {"prompts": [5, 5]}
    assert (lines["perplexity"].value, lines["full_perplexity"].value) == (
        result.quality.perplexity,
        result.quality.baseline,
    )
    rows = {row["quantity"]: row for row in result.rows()}
    assert rows["cache_bytes"] == params | {
        "quantity": "cache_bytes",
        "value": kept.nbytes,
        "unit": "bytes",
        "label": "MEASURED",
    }
    # A perplexity that overflows is no ledger line, and stops no other.
    endless = dataclasses.replace(result, quality=dataclasses.replace(result.quality, perplexity=math.inf))
    assert "perplexity" not in {m.name.removeprefix("eviction_lab.") for m in endless.measurements()}


def test_bad_parameters_are_named():
    for change, name in (({"method": "lru"}, "method"), ({"budget": 0.3}, "budget"), ({"depth": 2}, "depth")):
        with pytest.raises(ValueError, match=f"^{name}: got .*; takes one of"):
            EvictionParams(**({"method": "window", "budget": 0.25, "depth": 0.1} | change))
    assert EvictionParams("full", 0.25).held == 1 and EvictionParams("window", 0.25).held == 0.25


def test_a_model_without_a_tokenizer_is_refused():
    bare = dataclasses.replace(loaded(), tokenizer=None)
    with pytest.raises(ValueError, match="^model: got 'a model without a tokenizer'"):
        list(EvictionCompute(bare, CPU)(EvictionParams("window", 0.25, 0.1, "tiny"), lambda: False))
