"""The table of methods and budgets: each point is what its parts measure, as it firms up."""

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.eviction import EVICTION_METHODS, eviction_cache, eviction_point
from labkit.kv_cache.heavy_hitters import HeavyHitterCache
from labkit.kv_cache.sinks import SinkCache
from labkit.kv_cache.snapkv import SnapKVCache
from labkit.models import tiny_model
from tests.kv_cache.test_needle import Bytes


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=1024)


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (1, 130))


def test_a_method_is_its_cache_at_that_size(model):
    made = {method: eviction_cache(model, method, 20)() for method in EVICTION_METHODS}
    assert [type(cache) for cache in made.values()] == [
        DynamicCache,
        SinkCache,
        SinkCache,
        HeavyHitterCache,
        SnapKVCache,
    ]
    assert [(made[m].window_length, made[m].num_sink_tokens) for m in ("window", "sinks")] == [(20, 0), (20, 4)]
    assert (made["heavy_hitters"].budget, made["snapkv"].budget) == (20, 20)
    for method, too_small in {"window": 0, "sinks": 4, "heavy_hitters": 0, "snapkv": 7}.items():
        with pytest.raises(ValueError, match="n_tokens: got"):
            eviction_cache(model, method, too_small)
    with pytest.raises(ValueError, match="method: got 'snap'; takes one of .*did you mean snapkv"):
        eviction_cache(model, "snap", 20)


@pytest.mark.parametrize("method", EVICTION_METHODS)
def test_a_point_is_the_perplexity_and_the_needles_of_its_cache(model, tokens, method):
    options = {"context_length": 60, "chunk": 16, "n_needles": 2, "needle_length": 400}
    prompt = 50 if method == "snapkv" else 0
    points = list(eviction_point(model, Bytes(), method, 0.4, tokens, prompt_length=prompt, **options))
    held = 24 - (9 if method == "snapkv" else 0)
    expected = cached_perplexity(model, tokens, 60, eviction_cache(model, method, held), chunk=16, prompt_length=prompt)
    last = points[-1]
    assert (last.method, last.budget, last.needles_tried) == (method, 0.4, 2)
    assert last.perplexity == pytest.approx(expected, rel=1e-6)
    assert last.scored == (20 if method == "snapkv" else 118)
    per_token = 2 * 2 * (2 * 16 * 4)
    at_end = {"full": 59, "window": 24, "sinks": 24, "heavy_hitters": 24, "snapkv": 24}[method] * per_token
    extra = {"sinks": 4 * 2 * 2 * 16 * 4, "heavy_hitters": 24 * 4 * 8, "snapkv": 24 * 4 * 4}.get(method, 0)
    assert last.nbytes == at_end + extra
    assert [p.scored for p in points] == sorted(p.scored for p in points)
    assert points[0].scored == (1 if method == "snapkv" else 16)
    assert [p.needles_tried for p in points][-3:] == [0, 1, 2]


def test_without_a_prompt_snapkv_has_no_perplexity(model, tokens):
    points = list(eviction_point(model, Bytes(), "snapkv", 0.5, tokens, n_needles=1, needle_length=400))
    assert [(p.perplexity, p.needles_tried) for p in points] == [(None, 1)]


def test_wrong_arguments_are_refused_at_the_call(model, tokens):
    for name, change in {
        "method": {"method": "lru"},
        "budget": {"budget": 0.0},
        "n_needles": {"n_needles": -1},
        "n_tokens": {"budget": 0.01},
        "context_length": {"context_length": 500},
    }.items():
        arguments = {"method": "sinks", "budget": 0.5, "token_ids": tokens, "context_length": 60} | change
        with pytest.raises(ValueError, match=f"^{name}: got"):
            eviction_point(model, Bytes(), **arguments)


@pytest.mark.slow
def test_at_a_quarter_of_the_context_attention_chooses_better_than_a_window(default_model):
    from labkit.corpora import load_text
    from labkit.kv_cache.needle import find_needles, needle_prompts

    tokens = default_model.tokenizer(load_text(), return_tensors="pt").input_ids[:, :640]
    window, heavy = (
        cached_perplexity(default_model, tokens, 640, eviction_cache(default_model, method, 160))
        for method in ("window", "heavy_hitters")
    )
    assert heavy < 0.8 * window
    prompts = needle_prompts(default_model, n=10, context_length=256)
    window, voted = (
        find_needles(default_model, prompts, eviction_cache(default_model, method, 63)).found
        for method in ("window", "snapkv")
    )
    assert voted >= window + 4
