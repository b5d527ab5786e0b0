"""SnapKV: what its last queries vote for, once, and what it does from then on."""

import copy
import threading

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache.snapkv import SnapKVCache, SnapKVLayer
from labkit.models import tiny_model
from tests.kv_cache.evicting_models import check_generate, check_two_calls, family, logits_in_steps, storage_bytes
from tests.kv_cache.masked_reference import by_kv_head, masked_step, one_layer


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def alive_as_voted(
    positions: torch.Tensor, votes: torch.Tensor, budget: int, window: int, kernel_size: int, pooling: str
) -> torch.Tensor:
    """The tokens at `positions (2, budget)` as `(2, n)` bool, once they are seen to be the window and the best voted.

    Scores are compared, not places: of neighbours that share one highest vote any may stay.
    """
    n = votes.shape[1]
    alive = torch.zeros(2, n, dtype=torch.bool)
    for head in range(2):
        scores = []
        for i in range(n - window):
            near = votes[head, max(0, i - kernel_size // 2) : min(n - window, i + kernel_size // 2 + 1)]
            scores.append(float(near.max() if pooling == "max" else near.mean()))
        kept = positions[head].tolist()
        assert kept == sorted(set(kept)) and kept[budget - window :] == list(range(n - window, n))
        best = sorted(scores, reverse=True)[: budget - window]
        assert sorted((scores[i] for i in kept[: budget - window]), reverse=True) == pytest.approx(best, abs=1e-5)
        alive[head, kept] = True
    return alive


@pytest.mark.parametrize("kernel_size, pooling", [(1, "max"), (5, "avg"), (3, "max")])
def test_outputs_and_tokens_kept_are_those_of_a_mask_over_the_whole_past(kernel_size, pooling):
    model, tokens = one_layer(), torch.randint(0, 256, (1, 60))
    cache = SnapKVCache(model, budget=14, window=6, kernel_size=kernel_size, pooling=pooling)
    whole, alive = DynamicCache(), torch.zeros(2, 0, dtype=torch.bool)
    expected, weights = masked_step(model, tokens[:, :40], whole, alive)
    assert torch.allclose(logits_in_steps(model, tokens[:, :40], cache, [40]), expected, atol=1e-4)
    alive = alive_as_voted(cache.positions(0)[0], by_kv_head(weights[:, -6:]), 14, 6, kernel_size, pooling)
    assert not torch.equal(*alive), "heads choose for themselves"
    for start, q_len in ((40, 1), (41, 1), (42, 5), (47, 13)):
        step = tokens[:, start : start + q_len]
        expected, _ = masked_step(model, step, whole, alive)
        assert torch.allclose(logits_in_steps(model, step, cache, [q_len]), expected, atol=1e-4)
        alive = torch.cat((alive, torch.ones(2, q_len, dtype=torch.bool)), 1)
    assert cache.held == 14 + 20 and cache.get_seq_length() == 60


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_token_is_not_kept_for_standing_beside_the_window(pooling):
    """The voters look mostly at themselves, and at token 3; token 9 is the window's neighbour and nothing else."""
    layer = SnapKVLayer(budget=5, window=2, kernel_size=3, pooling=pooling)
    keys = torch.zeros(1, 1, 12, 4)
    keys[0, 0, 3, 0], keys[0, 0, 10, 0] = 4.0, 6.0
    query = torch.zeros(1, 2, 12, 4)
    query[..., 0] = 1.0
    layer.watching = threading.get_ident()
    layer.update(keys, keys)
    layer.observe(query, 1.0)
    assert layer.positions.tolist() == [[[2, 3, 4, 10, 11]]]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_every_layer_keeps_what_the_model_says_it_looks_at(name):
    model, tokens = family(name), torch.randint(0, 256, (1, 40))
    cache = SnapKVCache(model, budget=12, window=4, kernel_size=1)
    logits_in_steps(model, tokens, cache, [40])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(tokens, output_attentions=True).attentions
    for layer, weights in zip(cache.layers, attentions, strict=True):
        alive_as_voted(layer.positions[0], by_kv_head(weights[0, :, -4:]), 12, 4, 1, "max")


@pytest.mark.parametrize("prompt", [5, 16, 17, 60])
def test_bytes_are_gone_and_known_beforehand(model, prompt):
    cache = SnapKVCache(model, budget=16, window=4)
    for n in (prompt, 1, 1, 7):
        logits_in_steps(model, torch.randint(0, 256, (1, n)), cache, [n])
        expected = cache.bytes_at(cache.get_seq_length(), prompt_length=prompt)
        assert storage_bytes(cache) == cache.nbytes == expected
    held = min(prompt, 16) + 9
    assert expected == 2 * 2 * held * (2 * 16 * 4 + 4)
    assert cache.layers[1].keys.shape == cache.layers[1].values.shape == (1, 2, held, 16)


@pytest.mark.parametrize("budget", [32, 500])
def test_a_budget_as_long_as_the_prompt_is_a_dynamic_cache(model, budget):
    check_generate(model, lambda: SnapKVCache(model, budget=budget), DynamicCache)


@pytest.mark.parametrize("budget", [8, 31, 100])
def test_a_second_call_goes_on_from_the_first(model, budget):
    check_two_calls(model, lambda: SnapKVCache(model, budget=budget, window=4))


def test_rows_padding_copies_and_resets(model):
    tokens, more, order = torch.randint(0, 256, (3, 30)), torch.randint(0, 256, (3, 6)), torch.tensor([1, 2, 2])
    cache, other = (SnapKVCache(model, budget=10, window=4) for _ in range(2))
    prompt = logits_in_steps(model, tokens, cache, [30])
    logits_in_steps(model, tokens[order], other, [30])
    cache.reorder_cache(order)
    copied = copy.deepcopy(cache)
    found = logits_in_steps(model, more, cache, [1])
    assert torch.allclose(found, logits_in_steps(model, more, other, [1]), atol=1e-4)
    assert torch.equal(found, logits_in_steps(model, more, copied, [1]))
    cache.reset()
    assert torch.equal(logits_in_steps(model, tokens, cache, [30]), prompt)
    assert cache.held == 10
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="attention_mask: got"):
        model(tokens, attention_mask=mask, past_key_values=SnapKVCache(model, budget=10, window=4))


def test_what_it_cannot_do_is_refused(model):
    cache = SnapKVCache(model, budget=40)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="tokens that were evicted cannot come back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="a SnapKVLayer in another model"):
        tiny_model()(torch.zeros(1, 3, dtype=torch.long), past_key_values=cache)
    for change in ({"budget": 31}, {"window": 0}, {"kernel_size": 4}, {"kernel_size": 0}, {"pooling": "mean"}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))}: got"):
            SnapKVCache(model, **{"budget": 40} | change)
