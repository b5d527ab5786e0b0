"""Sinks and window: StreamingLLM's positions against a cache that really renumbers, and bytes that are gone."""

import copy

import pytest
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.sinks import SinkCache
from labkit.models import tiny_model
from tests.kv_cache.evicting_models import check_generate, check_two_calls, family, logits_in_steps, storage_bytes


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def turned(rotary, x: torch.Tensor, at: torch.Tensor, back: bool) -> torch.Tensor:
    """Keys rotated to the positions `at`, or back from them."""
    cos, sin = rotary(x, at[None])
    cos, sin = (cos / rotary.attention_scaling, -sin / rotary.attention_scaling) if back else (cos, sin)
    cos = cos / rotary.attention_scaling if not back else cos
    sin = sin / rotary.attention_scaling if not back else sin
    half = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)
    return x * cos[:, None] + half * sin[:, None]


class Renumbering(DynamicLayer):
    """The paper's cache, written plainly: unrotated keys, numbered anew from 0 at every step."""

    def __init__(self, rotary, window: int, sinks: int) -> None:
        super().__init__()
        self.rotary, self.window, self.sinks, self.raw = rotary, window, sinks, None

    def drop(self, total: int) -> None:
        if self.raw is not None and self.raw.shape[2] > total:
            tail = self.raw.shape[2] - (total - self.sinks)
            cut = [torch.cat((x[:, :, : self.sinks], x[:, :, tail:]), 2) for x in (self.raw, self.values)]
            self.raw, self.values = cut

    def get_seq_length(self) -> int:
        return 0 if self.raw is None else self.raw.shape[2]

    def update(self, keys, values, *args, **kwargs):
        at = torch.arange(self.get_seq_length(), self.get_seq_length() + keys.shape[2])
        raw = turned(self.rotary, keys, at, back=True)
        self.raw = raw if self.raw is None else torch.cat((self.raw, raw), 2)
        self.values = values if self.values is None else torch.cat((self.values, values), 2)
        self.is_initialized = True
        rotated = turned(self.rotary, self.raw, torch.arange(self.raw.shape[2]), back=False)
        result = rotated, self.values
        self.drop(self.window)
        return result


@torch.no_grad()
def renumbered_logits(model, tokens: torch.Tensor, window: int, sinks: int, steps: list[int]) -> torch.Tensor:
    layers = [Renumbering(model.model.rotary_emb, window, sinks) for _ in range(model.config.num_hidden_layers)]
    cache, out, start = Cache(layers=layers), [], 0
    while start < tokens.shape[1]:
        length = steps[min(len(out), len(steps) - 1)]
        step = tokens[:, start : start + length]
        for layer in layers:
            layer.drop(max(window - step.shape[1], sinks))
        at = torch.arange(step.shape[1]) + layers[0].get_seq_length()
        out.append(model(step, past_key_values=cache, position_ids=at[None]).logits)
        start += length
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama3", "yarn"])
@pytest.mark.parametrize("steps", [[1], [5], [40, 1], [7, 30, 1, 3]])
def test_outputs_are_those_of_a_cache_that_numbers_its_tokens_anew(name, steps):
    model, tokens = family(name), torch.randint(0, 256, (1, 80))
    cache = SinkCache(model.config, window_length=16, num_sink_tokens=3)
    found = logits_in_steps(model, tokens, cache, steps)
    expected = renumbered_logits(model, tokens, 16, 3, steps)
    assert torch.allclose(found, expected, atol=2e-4), (found - expected).abs().max()
    assert (found - logits_in_steps(model, tokens, DynamicCache(), steps))[:, 40:].abs().max() > 0.1
    assert cache.get_seq_length() == 80 and cache.held == 16


@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_a_layer_reads_the_kept_tokens_as_if_there_were_no_others(sinks):
    """With one layer keys and values are each token's own, so the kept tokens alone, numbered from 0, say the same."""
    model, tokens = tiny_model(num_hidden_layers=1), torch.randint(0, 256, (1, 60))
    found = logits_in_steps(model, tokens, SinkCache(model.config, window_length=12, num_sink_tokens=sinks), [1])
    for end in (12, 13, 40, 60):
        kept = torch.cat((tokens[:, :sinks], tokens[:, end - 12 + sinks : end]), dim=1)
        with torch.no_grad():
            expected = model(kept, position_ids=torch.arange(12)[None]).logits[0, -1]
        assert torch.allclose(found[0, end - 1], expected, atol=1e-4)


def test_the_turn_gathers_no_rounding_in_sixteen_bits(model):
    low = copy.deepcopy(model).bfloat16()
    tokens = torch.randint(0, 256, (1, 400))
    cache = SinkCache(low.config, window_length=8, num_sink_tokens=4)
    logits_in_steps(low, tokens, cache, [1])
    layer = cache.layers[0]
    lengths = layer.keys[:, :, :4].float().norm(dim=-1) / layer.sink_keys.float().norm(dim=-1)
    assert (lengths - 1).abs().max() < 0.01
    fresh = SinkCache(low.config, window_length=8, num_sink_tokens=4)
    logits_in_steps(low, tokens, fresh, [396, 1])
    assert torch.equal(fresh.layers[0].keys[:, :, :4], layer.keys[:, :, :4])


def test_no_query_of_a_chunk_reads_more_than_the_window(model):
    """The last of a chunk sees what a token by itself would: a one-layer model tells them apart by nothing else."""
    one, tokens = tiny_model(num_hidden_layers=1), torch.randint(0, 256, (1, 64))
    caches = [SinkCache(one.config, window_length=16, num_sink_tokens=2) for _ in range(2)]
    single, chunked = (logits_in_steps(one, tokens, c, [step]) for c, step in zip(caches, (1, 8), strict=True))
    assert torch.allclose(single[:, 7::8], chunked[:, 7::8], atol=1e-4)
    assert not torch.allclose(single[:, 32:39], chunked[:, 32:39], atol=1e-2)


@pytest.mark.parametrize("steps", [[1], [6], [50, 1], [3, 40, 2]])
def test_bytes_are_gone_and_known_beforehand(model, steps):
    cache = SinkCache(model.config, window_length=16, num_sink_tokens=4)
    for n in (2, 14, 1, 40):
        logits_in_steps(model, torch.randint(0, 256, (1, n)), cache, steps)
        expected = cache.bytes_at(cache.get_seq_length())
        assert storage_bytes(cache) == cache.nbytes == expected
    assert expected == 2 * 2 * 16 * 4 * (2 * 16 + 4)
    assert SinkCache(model.config, window_length=16).bytes_at(9, batch=3, dtype=torch.bfloat16) == 2 * 3 * 2 * 9 * 64


def test_a_window_as_long_as_the_text_is_a_dynamic_cache(model):
    check_generate(model, lambda: SinkCache(model.config, window_length=34), DynamicCache)


@pytest.mark.parametrize("window", [8, 33, 100])
def test_a_second_call_goes_on_from_the_first(model, window):
    check_two_calls(model, lambda: SinkCache(model.config, window_length=window, num_sink_tokens=2))


def test_generate_takes_chunks_of_a_prompt(model):
    tokens = torch.randint(0, 256, (1, 50))
    cache, other = (SinkCache(model.config, window_length=16) for _ in range(2))
    found = model.generate(tokens, past_key_values=cache, max_new_tokens=5, do_sample=False, prefill_chunk_size=8)
    logits = logits_in_steps(model, found[:, :-1], other, [8, 8, 8, 8, 8, 8, 2, 1])
    assert found[0, 50:].tolist() == logits[0, 49:].argmax(-1).tolist()


def test_rows_of_equal_length_do_not_touch_each_other(model):
    tokens = torch.randint(0, 256, (3, 40))
    make = lambda: SinkCache(model.config, window_length=10, num_sink_tokens=2, equal_lengths=True)  # noqa: E731
    cache = make()
    found = logits_in_steps(model, tokens, cache, [20, 1])
    for row in range(3):
        alone = logits_in_steps(model, tokens[row : row + 1], make(), [20, 1])
        assert torch.allclose(found[row], alone[0], atol=1e-4)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    more = torch.randint(0, 256, (3, 4))
    reordered = make()
    logits_in_steps(model, tokens[order], reordered, [20, 1])
    assert torch.allclose(*(logits_in_steps(model, more, c, [1]) for c in (cache, reordered)), atol=1e-4)


def test_beams_through_a_window_as_long_as_the_text_are_those_of_a_dynamic_cache(model):
    tokens = torch.randint(0, 256, (1, 12))
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    cache = SinkCache(model.config, window_length=30, equal_lengths=True)
    found = model.generate(tokens, past_key_values=cache, **options)
    assert torch.equal(found, model.generate(tokens, past_key_values=DynamicCache(), **options))


def test_a_reset_cache_is_a_new_one(model):
    tokens = torch.randint(0, 256, (1, 30))
    cache = SinkCache(model.config, window_length=9)
    first = logits_in_steps(model, tokens, cache, [4])
    cache.reset()
    assert (cache.get_seq_length(), cache.held, cache.nbytes) == (0, 0, 0)
    assert torch.equal(logits_in_steps(model, tokens, cache, [4]), first)


def test_what_it_cannot_do_is_refused(model):
    with pytest.raises(ValueError, match=r"past_key_values: got 'SinkCache with 2 rows'; takes one row"):
        model(torch.zeros(2, 4, dtype=torch.long), past_key_values=SinkCache(model.config, window_length=8))
    cache = SinkCache(model.config, window_length=8)
    logits_in_steps(model, torch.zeros(1, 4, dtype=torch.long), cache, [4])
    assert not cache.is_croppable and not cache.is_compileable
    with pytest.raises(ValueError, match="tokens that were evicted cannot come back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="evicted|crop"):
        model.generate(
            torch.zeros(1, 4, dtype=torch.long), assistant_model=tiny_model(), past_key_values=cache, max_new_tokens=4
        )
    for change in ({"window_length": 4}, {"window_length": 0, "num_sink_tokens": 0}, {"num_sink_tokens": -1}):
        with pytest.raises(ValueError, match="window_length: got|num_sink_tokens: got"):
            SinkCache(model.config, **{"window_length": 8} | change)


def test_models_whose_positions_or_windows_do_not_suit_are_refused():
    dynamic = tiny_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match="config: got \"rope_type 'dynamic'\""):
        SinkCache(dynamic.config, window_length=8)
    sliding = family("qwen2").config
    sliding.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="full attention in every layer"):
        SinkCache(sliding, window_length=8)


@pytest.mark.slow
def test_four_sinks_hold_what_a_window_alone_loses(default_model):
    from labkit.corpora import load_text

    config = default_model.model.config
    tokens = default_model.tokenizer(load_text(), return_tensors="pt").input_ids[:, :640]
    full, window, sinks = (
        cached_perplexity(default_model, tokens, 640, make)
        for make in (
            DynamicCache,
            lambda: SinkCache(config, window_length=160, num_sink_tokens=0),
            lambda: SinkCache(config, window_length=160),
        )
    )
    assert sinks < 1.15 * full
    assert window > 1.5 * full
