"""Perplexity through a cache: `labkit.quality`'s own where nothing is forgotten, and what a cache forgets shows."""

import math

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache.evaluation import cached_perplexity, cached_perplexity_stream
from labkit.kv_cache.sinks import SinkCache
from labkit.models import tiny_model
from labkit.quality import perplexity


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (101,))


@pytest.mark.parametrize("chunk", [1, 3, 32, 33, 500])
@pytest.mark.parametrize("context_length", [2, 33, 50])
def test_a_cache_that_forgets_nothing_gives_the_models_perplexity(model, tokens, chunk, context_length):
    expected = perplexity(model, tokens, context_length)
    found = cached_perplexity(model, tokens, context_length, DynamicCache, chunk=chunk)
    assert found == pytest.approx(expected, rel=1e-5)


def test_after_a_prompt_only_what_follows_it_is_scored(model, tokens):
    with torch.no_grad():
        windows = tokens[:100].view(2, 50)
        logits = model(windows).logits[:, 19:-1]
    losses = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), windows[:, 20:].reshape(-1))
    found = list(cached_perplexity_stream(model, tokens, 50, DynamicCache, chunk=7, prompt_length=20))
    assert found[-1] == (60, pytest.approx(math.exp(losses), rel=1e-5))


def test_each_query_reads_what_the_cache_kept(model, tokens):
    """A window of one token leaves every token to itself: the perplexity of a model that sees nothing else."""
    with torch.no_grad():
        at = torch.arange(100)[:, None] % 50
        logits = model(tokens[:100, None], position_ids=at).logits[:, 0]
    scored = torch.cat((torch.arange(0, 49), torch.arange(50, 99)))
    losses = torch.nn.functional.cross_entropy(logits[scored], tokens[scored + 1])
    found = cached_perplexity(
        model, tokens, 50, lambda: SinkCache(model.config, window_length=1, num_sink_tokens=0), chunk=1
    )
    assert found == pytest.approx(math.exp(losses), rel=1e-5)


def test_the_stream_counts_every_scored_token_and_ends_at_the_value(model, tokens):
    items = list(cached_perplexity_stream(model, tokens, 50, DynamicCache, chunk=20))
    assert [scored for scored, _ in items] == [20, 40, 49, 69, 89, 98]
    assert items[-1][1] == cached_perplexity(model, tokens, 50, DynamicCache, chunk=20)
    with torch.no_grad():
        logits = model(tokens[None, :20]).logits[0]
    first = torch.nn.functional.cross_entropy(logits, tokens[1:21])
    assert items[0][1] == pytest.approx(math.exp(first), rel=1e-5)


def test_gradients_are_as_they_were_between_two_items(model, tokens):
    stream = cached_perplexity_stream(model, tokens, 50, DynamicCache)
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert torch.is_grad_enabled()


def test_wrong_arguments_are_refused_at_the_call(model, tokens):
    shared = DynamicCache()
    with pytest.raises(ValueError, match=r"make_cache: got .*tokens.*; takes a function that makes a new"):
        list(cached_perplexity_stream(model, tokens, 50, lambda: shared))
    for name, change in {
        "chunk": {"chunk": 0},
        "prompt_length": {"prompt_length": 50},
        "make_cache": {"make_cache": DynamicCache()},
        "context_length": {"context_length": 102},
        "token_ids": {"token_ids": tokens + 256},
    }.items():
        arguments = {"token_ids": tokens, "context_length": 50, "make_cache": DynamicCache} | change
        with pytest.raises(ValueError, match=f"^{name}: got"):
            cached_perplexity_stream(model, **arguments)
    with pytest.raises(ValueError, match="make_cache: got 'list'"):
        cached_perplexity(model, tokens, 50, list)
