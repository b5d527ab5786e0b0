"""A step of `Decoder` over a quantized or paged cache never makes one layer's keys whole in full precision."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaForCausalLM

from labkit.engine import Decoder
from labkit.kernels import kv_quantize
from labkit.kv_cache import PagedKVCache, PagedQuantizedCache, QuantizedCache
from labkit.kv_cache.sizing import quantized_tokens
from labkit.models import tiny_model

LENGTH = 600


class LargestFloat(TorchDispatchMode):
    """Elements of the largest floating-point tensor that any op made, and what op it was; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for value in tree_leaves(out):
            if not isinstance(value, torch.Tensor) or value.untyped_storage().data_ptr() in given:
                continue
            if value.is_floating_point() and value.numel() > self.elements:
                self.elements, self.op = value.numel(), str(func)
        return out


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Keys of one layer at LENGTH tokens are far larger than anything else in a step."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256}
    return tiny_model(hidden_size=128, intermediate_size=128, max_position_embeddings=2048, **shape)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 200, (1, length), generator=torch.Generator().manual_seed(0))


def one_layer(model: LlamaForCausalLM) -> int:
    return model.config.num_key_value_heads * model.config.head_dim * LENGTH


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("new", [1, 4])
def test_a_quantized_cache_is_read_where_it_lies(model: LlamaForCausalLM, nbits: int, new: int) -> None:
    decoder = Decoder(model, cache=QuantizedCache(model.config, nbits, 16, 16))
    decoder.forward(prompt(LENGTH))
    decoder.forward(prompt(new))  # the first step of so many rows measures which matmul is faster
    with LargestFloat() as seen:
        decoder.forward(prompt(new))
    assert 0 < seen.elements < one_layer(model), seen.op


@pytest.mark.parametrize("kind", [PagedKVCache, PagedQuantizedCache])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("new", [1, 4])
def test_a_paged_cache_is_read_through_its_table(model, kind: type, block_size: int, new: int) -> None:
    cache = kind(model.config, num_blocks=1024 // block_size, block_size=block_size, dtype=torch.float32)
    decoder = Decoder(model, cache=cache)
    decoder.forward(prompt(LENGTH))
    decoder.forward(prompt(new))
    with LargestFloat() as seen:
        decoder.forward(prompt(new))
    assert 0 < seen.elements < one_layer(model), seen.op


def test_the_proof_would_see_a_cache_that_gathers(model: LlamaForCausalLM) -> None:
    """`transformers` is given one layer dequantized, and this finds it."""
    cache = QuantizedCache(model.config, 4, 16, 16)
    with torch.no_grad():
        model(prompt(LENGTH), past_key_values=cache)
        with LargestFloat() as seen:
            model(prompt(1), past_key_values=cache)
    assert seen.elements >= one_layer(model)


def test_incremental_decoding_equals_one_pass(model: LlamaForCausalLM) -> None:
    """Token 0 included: from the first token on, one at a time, and all at once."""
    ids = prompt(40)
    with torch.no_grad():
        whole = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    paged = PagedKVCache(model.config, num_blocks=8, block_size=8, dtype=torch.float32)
    for cache in (None, QuantizedCache(model.config, 8, 16, 64), paged):
        decoder = Decoder(model, cache=cache)
        steps = torch.cat([decoder.forward(ids[:, i : i + 1]) for i in range(40)], dim=1)
        torch.testing.assert_close(steps, whole, atol=2e-4, rtol=1e-4)


def caches(model: LlamaForCausalLM) -> dict[str, object]:
    paged = {"num_blocks": 40, "block_size": 16, "dtype": torch.float32}
    return {
        "quantized": QuantizedCache(model.config, 4, 16, 16),
        "paged": PagedKVCache(model.config, **paged),
        "paged, quantized": PagedQuantizedCache(model.config, 4, **paged),
    }


@pytest.mark.parametrize("name", ["quantized", "paged", "paged, quantized"])
def test_a_cache_can_be_filled_for_timing_again_and_again(model: LlamaForCausalLM, name: str) -> None:
    """What is put there never comes back as the prefix of a text, token 0 of the vocabulary included."""
    cache = caches(model)[name]
    decoder = Decoder(model, cache=cache)
    for batch, length in ((2, 40), (2, 40), (1, 70), (1, 0)):
        decoder.fill_cache(batch, length)
        assert decoder.length == length
        decoder.forward(torch.zeros(batch, 1, dtype=torch.long))
        assert decoder.length == length + 1
    zeros = torch.zeros(1, 48, dtype=torch.long)
    expected = Decoder(model, cache=caches(model)[name]).generate(zeros, max_new_tokens=8).sequences
    assert torch.equal(decoder.generate(zeros, max_new_tokens=8).sequences, expected)


@pytest.mark.parametrize("name", ["quantized", "paged", "paged, quantized"])
@pytest.mark.parametrize("new", [1, 3])
def test_a_step_given_up_leaves_every_cache_as_it_was(model: LlamaForCausalLM, name: str, new: int) -> None:
    decoder = Decoder(model, cache=caches(model)[name])
    decoder.forward(prompt(70))
    expected = decoder.forward(prompt(new)).clone()
    decoder.crop(70)

    def stop(op: str) -> None:
        if op == "down_proj":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(prompt(new), mark=stop)
    assert decoder.length == 70
    torch.testing.assert_close(decoder.forward(prompt(new)), expected)


@pytest.mark.parametrize("name", ["quantized", "paged, quantized"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_step_given_up_while_it_quantizes_loses_no_token(monkeypatch, model: LlamaForCausalLM, name: str, at: int):
    """Keys and values of two layers are quantized in turn: whichever is interrupted."""
    ids = prompt(80)
    cache = caches(model)[name]
    decoder, other = (Decoder(model, cache=c) for c in (cache, caches(model)[name]))
    held = next(n for n in range(33, 80) if due(cache, n) > due(cache, n - 1))
    for one in (decoder, other):
        one.forward(ids[:, :held])
    done = []

    def stop(*args: object, **kwargs: object) -> object:
        done.append(kwargs["axis"])
        if len(done) == at + 1:
            raise KeyboardInterrupt
        return kv_quantize(*args, **kwargs)

    for module in ("quantized_layer", "quantized_blocks"):
        monkeypatch.setattr(f"labkit.kv_cache.{module}.kv_quantize", stop)
    with pytest.raises(KeyboardInterrupt):
        decoder.forward(ids[:, held : held + 1])
    assert decoder.length == held
    for token in ids[:, held:].split(1, dim=1):
        torch.testing.assert_close(decoder.forward(token), other.forward(token))


def due(cache: QuantizedCache | PagedQuantizedCache, settled: int) -> int:
    group = cache.q_group_size if isinstance(cache, QuantizedCache) else cache.manager.block_size
    return quantized_tokens(settled, group, cache.residual_length)
