"""Whatever stands beside this package's quantized cache is named, and its bytes are counted alike."""

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache import QuantizedCache, bytes_per_token
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.memory import cache_nbytes
from labkit.kv_cache.peers import quantized_peers
from labkit.models import tiny_model


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64).to(torch.bfloat16)


def filled(model: torch.nn.Module, cache: object, length: int = 100) -> object:
    with torch.no_grad():
        for start in range(0, length, 20):
            model(torch.full((1, 20), start + 1), past_key_values=cache)
    return cache


def test_bytes_of_a_dynamic_cache_are_those_of_its_tokens(model):
    cache = filled(model, DynamicCache(config=model.config))
    assert cache_nbytes(cache) == 100 * bytes_per_token(model.config, torch.bfloat16)


def test_bytes_of_ours_are_what_it_says(model):
    cache = filled(model, QuantizedCache(model.config, 4, 32, 32))
    assert cache_nbytes(cache) == cache.nbytes > 0


def test_a_view_counts_with_all_that_it_keeps_alive(model):
    cache = filled(model, DynamicCache(config=model.config))
    whole = cache_nbytes(cache)
    cache.crop(-50)
    assert cache_nbytes(cache) == whole


def test_every_peer_runs_or_says_what_is_missing(model):
    peers = quantized_peers(model.config)
    assert [peer.name for peer in peers][:3] == ["labkit", "transformers, quanto", "transformers, hqq"]
    ids = torch.arange(1, 129)
    exact = cached_perplexity(model, ids, 128, lambda: DynamicCache(config=model.config), chunk=16)
    for peer in peers:
        if peer.make is None:
            assert "pip install" in peer.why or "no such backend" in peer.why
        else:
            assert cached_perplexity(model, ids, 128, peer.make, chunk=16) == pytest.approx(exact, rel=0.2)
