"""QuantizedCache: small for real, exact where it claims to be, through `transformers` and through `Decoder`."""

import itertools

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.utils import logging

from labkit.engine import Decoder
from labkit.kv_cache import QuantizedCache, bytes_per_token, quantized_cache_bytes
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.memory import cache_nbytes
from labkit.models import tiny_model
from labkit.quality import sqnr_db


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """4 query heads and 2 KV heads of 32, so that groups of 16 and of 32 divide a head."""
    return tiny_model(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)


def prompt(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 200, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(model: LlamaForCausalLM, ids: torch.Tensor, cache: object, new: int = 24, **options: object) -> list:
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, past_key_values=cache, **options).tolist()


def logits_by_step(model: LlamaForCausalLM, ids: torch.Tensor, cache: object, first: int, chunk: int = 1):
    """Logits of a prefill of `first` tokens and then of `chunk` at a time, `(batch, seq_len, vocab)`."""
    starts = [0, *range(first, ids.shape[1], chunk), ids.shape[1]]
    with torch.no_grad():
        steps = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(starts)]
    return torch.cat(steps, dim=1)


# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("nbits", [8, 4, 2])
def test_a_residual_longer_than_the_text_is_a_dynamic_cache(model: LlamaForCausalLM, nbits: int) -> None:
    ids = prompt(20)
    cache = QuantizedCache(model.config, nbits, 16, residual_length=100)
    expected = logits_by_step(model, ids, DynamicCache(config=model.config), first=12)
    assert torch.equal(logits_by_step(model, ids, cache, first=12), expected)
    assert cache.layers[0].n_quantized == 0
    fresh = [QuantizedCache(model.config, nbits, 16, 100), DynamicCache(config=model.config)]
    assert generated(model, ids, fresh[0]) == generated(model, ids, fresh[1])


def test_the_first_prompt_reads_its_own_keys_unrounded(model: LlamaForCausalLM) -> None:
    ids = prompt(70)
    with torch.no_grad():
        whole = model(ids).logits
        through = model(ids, past_key_values=QuantizedCache(model.config, 2, 16, 0)).logits
    assert torch.equal(whole, through)


@pytest.mark.parametrize(("first", "chunk"), [(1, 1), (40, 1), (40, 7), (16, 16), (33, 33)])
def test_decoder_reads_what_transformers_is_given(model: LlamaForCausalLM, first: int, chunk: int) -> None:
    """The same cache, once dequantized for `transformers` and once read from its codes: token 0 included."""
    ids = prompt(90, batch=2)
    expected = logits_by_step(model, ids, QuantizedCache(model.config, 4, 16, 16), first, chunk)
    decoder = Decoder(model, cache=QuantizedCache(model.config, 4, 16, 16))
    starts = [0, *range(first, 90, chunk), 90]
    steps = [decoder.forward(ids[:, a:b]) for a, b in itertools.pairwise(starts)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=2e-4, rtol=1e-4)
    assert decoder.length == 90


@pytest.mark.parametrize(("nbits", "least"), [(8, 35.0), (4, 15.0), (2, 3.0)])
def test_what_is_kept_is_near_what_came(model: LlamaForCausalLM, nbits: int, least: float) -> None:
    """About 6 dB a bit, and closer to it than with another axis would be by chance."""
    cache, exact = QuantizedCache(model.config, nbits, 16, 0), DynamicCache(config=model.config)
    ids = prompt(96)
    with torch.no_grad():
        model(ids, past_key_values=exact)
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)  # a second step reads the codes
    layer = cache.layers[1]
    for old, states in ((layer.old_keys, exact.layers[1].keys), (layer.old_values, exact.layers[1].values)):
        kept = old.dequantize(torch.float32)
        assert kept.shape[2] >= 80
        assert sqnr_db(states[:, :, : kept.shape[2]], kept) > least


def test_keys_share_scales_along_tokens_and_values_along_channels(model: LlamaForCausalLM) -> None:
    """A key channel that is large at every token costs the other channels nothing; a large value token likewise."""
    cache = QuantizedCache(model.config, 2, 16, 0)
    keys, values = torch.rand(1, 2, 33, 32), torch.rand(1, 2, 33, 32)
    keys[..., 5] += 100
    values[:, :, 7] += 100
    cache.update(keys, values, 0)
    old_keys = cache.layers[0].old_keys.dequantize(torch.float32)
    old_values = cache.layers[0].old_values.dequantize(torch.float32)
    others = [c for c in range(32) if c != 5]
    assert (old_keys - keys[:, :, :32])[..., others].abs().max() < 0.25
    tokens = [t for t in range(32) if t != 7]
    assert (old_values - values[:, :, :32])[:, :, tokens].abs().max() < 0.25


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("residual", [0, 8, 32])
def test_predicted_bytes_are_those_allocated(model: LlamaForCausalLM, nbits: int, residual: int) -> None:
    model = model.to(torch.bfloat16)
    try:
        cache = QuantizedCache(model.config, nbits, 16, residual)
        options = {"nbits": nbits, "q_group_size": 16, "residual_length": residual}
        with torch.no_grad():
            for length, ids in [(50, prompt(50, batch=3))] + [(50 + n, prompt(1, batch=3)) for n in range(1, 40)]:
                model(ids, past_key_values=cache)
                assert cache.nbytes == quantized_cache_bytes(model.config, 3, length, torch.bfloat16, **options)
                assert cache_nbytes(cache) == cache.nbytes
    finally:
        model.to(torch.float32)


def test_a_step_of_decoder_leaves_nothing_else_behind(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 4, 16, 16)
    decoder = Decoder(model, cache=cache)
    for ids in (prompt(60), prompt(1), prompt(5)):
        decoder.forward(ids)
        assert cache_nbytes(cache) == cache.nbytes


@pytest.mark.parametrize("wrong", [{"nbits": 3}, {"q_group_size": 24}, {"residual_length": -1}])
def test_no_bytes_are_predicted_of_a_cache_that_cannot_be(model: LlamaForCausalLM, wrong: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got"):
        quantized_cache_bytes(model.config, 1, 64, torch.float32, **wrong)


def test_bits_are_worth_what_they_say() -> None:
    config = tiny_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64).config
    full = bytes_per_token(config, "bfloat16") * 8192
    for nbits, share in ((8, 9 / 16), (4, 5 / 16), (2, 3 / 16)):
        settings = {"nbits": nbits, "q_group_size": 32, "residual_length": 0}
        got = quantized_cache_bytes(config, 1, 8193, "bfloat16", **settings) - full // 8192
        assert got == pytest.approx(full * share, rel=1e-3)


# ------------------------------------------------------------------ cropping


@pytest.mark.parametrize("back", [1, 5, 16])
def test_cropping_recent_tokens_leaves_no_trace(model: LlamaForCausalLM, back: int) -> None:
    """As speculation does: some tokens come together, and some of them are taken back."""
    ids, wrong = prompt(64), prompt(back, seed=9)
    with torch.no_grad():
        caches = [QuantizedCache(model.config, 4, 16, 16) for _ in range(2)]
        for cache in caches:
            model(ids, past_key_values=cache)
        model(wrong, past_key_values=caches[0])
        caches[0].crop(-back)
        steps = [model(prompt(1, seed=3), past_key_values=cache).logits for cache in caches]
    assert torch.equal(*steps)
    assert cache_nbytes(caches[0]) == cache_nbytes(caches[1])


@pytest.mark.parametrize("length", [63, 48, 33, 32, 31, 16, 1])
def test_cropping_into_codes_keeps_them_as_rounded(model: LlamaForCausalLM, length: int) -> None:
    cache = QuantizedCache(model.config, 4, 16, 0)
    with torch.no_grad():
        model(prompt(80, batch=2), past_key_values=cache)
        model(prompt(1, batch=2), past_key_values=cache)
    layer = cache.layers[0]
    before = layer._whole(layer.old_keys, layer.keys), layer._whole(layer.old_values, layer.values)
    cache.crop_to(length)
    assert cache.length == length and layer.n_quantized == length // 16 * 16
    after = layer._whole(layer.old_keys, layer.keys), layer._whole(layer.old_values, layer.values)
    for kept, whole in zip(after, before, strict=True):
        assert torch.equal(kept, whole[:, :, :length])
    assert cache_nbytes(cache) == cache.nbytes
    with torch.no_grad():
        model(prompt(40, batch=2), past_key_values=cache)
    assert cache.length == length + 40


def test_a_path_kept_of_a_tree_weighs_what_it_is(model: LlamaForCausalLM) -> None:
    """Recent tokens move, codes stay, and nothing of the other branches is left."""
    ids, tree = prompt(70, batch=2), prompt(3, batch=2, seed=4)
    caches = [QuantizedCache(model.config, 4, 16, 16) for _ in range(2)]
    branching, plain = (Decoder(model, cache=cache) for cache in caches)
    for decoder in (branching, plain):
        decoder.forward(ids)
    # Of the root two children: the first of them is wrong.
    branching.forward(tree, tree_mask=torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool())
    branching.keep(70, [[0, 2], [0, 2]])
    plain.forward(tree[:, [0, 2]])
    for got, expected in zip(*(cache.layers for cache in caches), strict=True):
        assert got.n_quantized == expected.n_quantized > 0
        torch.testing.assert_close(got.keys, expected.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(got.values, expected.values, rtol=1e-3, atol=1e-4)
    assert caches[0].nbytes == caches[1].nbytes == cache_nbytes(caches[0])


def test_crop_takes_both_forms_of_transformers(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 4, 16, 0)
    with torch.no_grad():
        model(prompt(40), past_key_values=cache)
    for given, length in ((0, 40), (-3, 37), (35, 35), (99, 35), (-35, 0)):
        cache.crop(given)
        assert cache.get_seq_length() == length
    assert cache.nbytes == 0


def test_assisted_generation_of_transformers_runs_over_it(model: LlamaForCausalLM) -> None:
    """It refuses a cache that cannot be cropped. Prompt lookup proposes, the quantized cache is taken back."""
    ids = prompt(12).repeat(1, 4)
    with_drafts = generated(model, ids, QuantizedCache(model.config, 8, 16, 64), prompt_lookup_num_tokens=4)
    assert with_drafts == generated(model, ids, QuantizedCache(model.config, 8, 16, 64))


def test_decoder_crops_and_branches(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 4, 16, 16)
    decoder = Decoder(model, cache=cache)
    decoder.forward(prompt(50))
    expected = decoder.forward(prompt(1, seed=5)).clone()
    decoder.crop(50)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    branches = decoder.forward(torch.cat((prompt(1, seed=5), prompt(2, seed=6)), dim=1), tree_mask=tree)
    torch.testing.assert_close(branches[:, :1], expected, atol=1e-4, rtol=1e-4)
    decoder.crop(51)
    second = decoder.forward(prompt(2, seed=6)[:, 1:])
    torch.testing.assert_close(branches[:, 2:], second, atol=1e-4, rtol=1e-4)


def test_a_step_that_fails_leaves_the_cache_as_it_was(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 4, 16, 16)
    decoder = Decoder(model, cache=cache)
    decoder.forward(prompt(50))
    expected = decoder.forward(prompt(1)).clone()
    decoder.crop(50)

    def stop(name: str) -> None:
        if name == "down_proj":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(prompt(1), mark=stop)
    assert decoder.length == 50 and {layer.get_seq_length() for layer in cache.layers} == {50}
    torch.testing.assert_close(decoder.forward(prompt(1)), expected)


# ------------------------------------------------------------------ batches


def test_padding_in_a_batch_changes_no_other_row(model: LlamaForCausalLM) -> None:
    long, short = prompt(60), prompt(43, seed=1)
    padded = torch.cat((torch.zeros(1, 17, dtype=torch.long), short), dim=1)
    batch = torch.cat((long, padded))
    mask = (torch.arange(60) >= torch.tensor([[0], [17]])).long()
    both = generated(model, batch, QuantizedCache(model.config, 8, 16, 16), attention_mask=mask)
    assert both[0] == generated(model, long, QuantizedCache(model.config, 8, 16, 16))[0]
    other = torch.cat((long, torch.cat((torch.full((1, 17), 7), short), dim=1)))
    again = generated(model, other, QuantizedCache(model.config, 8, 16, 16), attention_mask=mask)
    assert again[0] == both[0]
    exact = generated(model, batch, QuantizedCache(model.config, 8, 16, 200), attention_mask=mask)
    assert exact[1][17:] == generated(model, short, DynamicCache(config=model.config))[0]


def test_rows_can_be_chosen_repeated_and_reordered(model: LlamaForCausalLM) -> None:
    ids = prompt(50, batch=3)
    changes = {
        "batch_select_indices": (torch.tensor([2, 0]), [2, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "reorder_cache": (torch.tensor([1, 1, 0]), [1, 1, 0]),
    }
    for method, (argument, rows) in changes.items():
        with torch.no_grad():
            cache, whole = QuantizedCache(model.config, 4, 16, 16), QuantizedCache(model.config, 4, 16, 16)
            for held in (cache, whole):
                model(ids, past_key_values=held)
            getattr(cache, method)(argument)
            new = prompt(1, batch=3, seed=8)
            expected = model(new, past_key_values=whole).logits[rows]
            torch.testing.assert_close(model(new[rows], past_key_values=cache).logits, expected, atol=1e-5, rtol=1e-5)


def test_beam_search_runs_over_it(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 8, 16, 200)
    beams = generated(model, prompt(30), cache, num_beams=3)
    assert beams == generated(model, prompt(30), DynamicCache(config=model.config), num_beams=3)


def test_a_cache_serves_again_after_reset(model: LlamaForCausalLM) -> None:
    cache = QuantizedCache(model.config, 4, 16, 16)
    first = generated(model, prompt(40), cache)
    cache.reset()
    assert cache.nbytes == 0 and generated(model, prompt(40), cache) == first
    decoder = Decoder(model, cache=cache)
    runs = [decoder.generate(prompt(40), max_new_tokens=12).sequences.tolist() for _ in range(2)]
    assert runs[0] == runs[1]


def test_fewer_bits_lose_more(model: LlamaForCausalLM) -> None:
    ids = prompt(256)
    exact = cached_perplexity(model, ids, 128, lambda: DynamicCache(config=model.config), chunk=16)
    losses = [
        abs(
            cached_perplexity(model, ids, 128, lambda n=n: QuantizedCache(model.config, n, 16, 0), chunk=16) / exact - 1
        )
        for n in (8, 4, 2)
    ]
    assert losses[0] < losses[1] < losses[2]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"nbits": 3}, "nbits"),
        ({"q_group_size": 12}, "q_group_size"),
        ({"q_group_size": 0}, "q_group_size"),
        ({"residual_length": -1}, "residual_length"),
        ({"nbits": 4.0}, "nbits"),
    ],
)
def test_refuses_what_it_cannot_hold(model: LlamaForCausalLM, arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        QuantizedCache(model.config, **arguments)


def test_refuses_another_models_cache(model: LlamaForCausalLM) -> None:
    other = tiny_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="layers"):
        Decoder(model, cache=QuantizedCache(other.config, 4, 16))
    wider = tiny_model(hidden_size=128, num_attention_heads=4, num_key_value_heads=1, head_dim=32)
    with pytest.raises(ValueError, match="key_states"):
        Decoder(model, cache=QuantizedCache(wider.config, 4, 16)).forward(prompt(3))
    with pytest.raises(ValueError, match="config"):
        QuantizedCache(None)
    with pytest.raises(ValueError, match="cuda_graph"):
        Decoder(model, cache=QuantizedCache(model.config, 4, 16), cuda_graph=True)


logging.set_verbosity_error()
