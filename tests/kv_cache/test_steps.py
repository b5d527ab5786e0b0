"""What no cache may take for a step: a part of one, rows or a dtype of another, more layers; and what a tree leaves."""

import pickle

import pytest
import torch

from labkit.engine import Decoder
from labkit.kv_cache import (
    HeavyHitterCache,
    PagedKVCache,
    PagedQuantizedCache,
    QuantizedCache,
    SinkCache,
    SnapKVCache,
)
from labkit.kv_cache.steps import chain_length
from labkit.models import tiny_model
from labkit.quantization import RTNConfig, quantize_
from tests.kv_cache.paging import model, prompt


def _paged(config):
    return PagedKVCache(config, num_blocks=64, block_size=4, dtype=torch.float32, device="cpu")


def _paged_quantized(config, residual_length=4):
    options = {"residual_length": residual_length, "dtype": torch.float32, "device": "cpu"}
    return PagedQuantizedCache(config, 8, num_blocks=64, block_size=4, **options)


MAKERS = {
    "quantized": lambda: QuantizedCache(model().config, 8, q_group_size=4, residual_length=4),
    "sinks": lambda: SinkCache(model().config, window_length=12, num_sink_tokens=2, equal_lengths=True),
    "heavy_hitters": lambda: HeavyHitterCache(model(), budget=12),
    "snapkv": lambda: SnapKVCache(model(), budget=12, window=4),
    "paged": lambda: _paged(model().config),
    "paged_quantized": lambda: _paged_quantized(model().config),
}
OF_A_CONFIG = ("quantized", "sinks", "paged", "paged_quantized")
every_cache = pytest.mark.parametrize("name", MAKERS)


class _Interrupt(BaseException):
    pass


def _interrupt(*args: object) -> None:
    raise _Interrupt


@torch.no_grad()
def logits(cache, tokens, of=None):
    return (of or model())(tokens, past_key_values=cache).logits


def interrupted(cache, tokens):
    """A step that the first layer has taken and the last has not."""
    handle = model().model.layers[1].register_forward_pre_hook(_interrupt)
    try:
        with pytest.raises(_Interrupt):
            logits(cache, tokens)
    finally:
        handle.remove()


@every_cache
@pytest.mark.parametrize("past", [0, 21])
def test_no_step_goes_on_from_half_of_one(name, past):
    cache, tokens = MAKERS[name](), prompt(2, 30)
    if past:
        logits(cache, tokens[:, :past])
    interrupted(cache, tokens[:, past : past + 1])
    with pytest.raises(ValueError, match="in the first layer and .* in the last.*reset"):
        logits(cache, tokens[:, past + 1 : past + 2])
    cache.reset()
    assert torch.equal(logits(cache, tokens), logits(MAKERS[name](), tokens))


def test_decoder_forgets_half_a_step_of_transformers():
    cache, tokens = MAKERS["quantized"](), prompt(2, 30)
    logits(cache, tokens[:, :21])
    interrupted(cache, tokens[:, 21:22])
    whole = MAKERS["quantized"]()
    logits(whole, tokens[:, :21])
    ours = Decoder(model(), cache=cache).forward(tokens[:, 21:])
    assert torch.equal(ours, Decoder(model(), cache=whole).forward(tokens[:, 21:]))


@every_cache
def test_other_rows_are_refused_and_change_nothing(name):
    cache, same, tokens = MAKERS[name](), MAKERS[name](), prompt(2, 30)
    for each in (cache, same):
        logits(each, tokens[:, :21])
    with pytest.raises(ValueError, match="3 rows.*takes 2 rows"):
        logits(cache, prompt(3, 2))
    assert torch.equal(logits(cache, tokens[:, 21:]), logits(same, tokens[:, 21:]))


@pytest.mark.parametrize("name", OF_A_CONFIG)
def test_another_dtype_is_refused(name):
    cache, tokens = MAKERS[name](), prompt(1, 30)
    logits(cache, tokens[:, :21])
    with pytest.raises(ValueError, match="bfloat16"):
        logits(cache, tokens[:, 21:], tiny_model().to(torch.bfloat16))


@pytest.mark.parametrize("name", OF_A_CONFIG)
def test_a_model_of_another_depth_is_refused(name):
    deeper, flatter = (tiny_model(num_hidden_layers=layers) for layers in (3, 1))
    with pytest.raises(ValueError, match="past_key_values: got 'layer 2'; takes a model of 2 layers"):
        logits(MAKERS[name](), prompt(1, 9), deeper)
    cache = MAKERS[name]()
    logits(cache, prompt(1, 9), flatter)
    with pytest.raises(ValueError, match="9 tokens in the first layer and 0 in the last"):
        logits(cache, prompt(1, 1), flatter)


@pytest.mark.parametrize("name", ["quantized", "paged", "paged_quantized"])
def test_what_was_rounded_or_put_in_blocks_keeps_no_graph_alive(name):
    learning, cache = tiny_model().requires_grad_(True), MAKERS[name]()
    for start in range(0, 30, 3):
        assert learning(prompt(1, 30)[:, start : start + 3], past_key_values=cache).logits.requires_grad
    if name == "quantized":
        layer = cache.layers[0]
        held = [*layer.old_keys.tensors.values(), *layer.old_values.tensors.values()]
    elif name == "paged":
        held = [cache.storage.keys, cache.storage.values]
    else:
        held = [*cache.storage.parts(), cache.layers[0].keys, cache.layers[0].values]
    assert len(held) > 1 and not any(tensor.requires_grad for tensor in held)


@pytest.mark.parametrize("name", ["heavy_hitters", "snapkv"])
def test_a_watched_cache_says_why_it_is_not_pickled(name):
    with pytest.raises(NotImplementedError, match="copy.deepcopy"):
        pickle.dumps(MAKERS[name]())


@pytest.mark.parametrize("make", [HeavyHitterCache, SnapKVCache])
def test_a_model_that_was_changed_after_its_cache_is_refused(make):
    changed = tiny_model()
    cache = make(changed, budget=40)
    quantize_(changed, RTNConfig(bits=4, group_size=16), progress=False)
    with pytest.raises(ValueError, match="make a new cache"):
        logits(cache, prompt(1, 9), changed)
    assert cache.nbytes == 0
    assert torch.equal(logits(make(changed, budget=40), prompt(1, 9), changed), changed(prompt(1, 9)).logits)


@pytest.mark.parametrize("make", [_paged, lambda config: _paged_quantized(config, residual_length=0)])
@pytest.mark.parametrize("past", [0, 6])
def test_a_branch_is_never_found_as_the_beginning_of_a_text(make, past):
    cache, tokens = make(model().config), prompt(1, 30)
    decoder, tree = Decoder(model(), cache=cache), torch.eye(9, dtype=torch.bool)
    tree[:, 0] = True  # eight branches of one token
    if past:
        decoder.forward(tokens[:, :past])
    decoder.forward(tokens[:, past : past + 9], tree_mask=tree)
    decoder.forward(prompt(1, 8, seed=1))
    decoder.reset()
    # The root and the first branch are a text; the second branch is none.
    assert cache.begin(tokens) == (past + 2) // 4 * 4


def test_a_chain_given_as_a_tree_is_a_text():
    cache, tokens = _paged(model().config), prompt(1, 30)
    decoder = Decoder(model(), cache=cache)
    decoder.forward(tokens[:, :6])
    decoder.forward(tokens[:, 6:15], tree_mask=torch.ones(9, 9, dtype=torch.bool).tril())
    decoder.forward(tokens[:, 15:21])
    assert cache.begin(tokens) == 20


def test_a_text_goes_on_from_the_branch_that_was_kept():
    cache, tokens = _paged(model().config), prompt(1, 30)
    decoder, tree = Decoder(model(), cache=cache), torch.ones(4, 4, dtype=torch.bool).tril()
    tree[3, 2] = False  # a chain of three, and another third token
    decoder.forward(tokens[:, :6])
    decoder.forward(tokens[:, 6:10], tree_mask=tree)
    decoder.crop(9)
    decoder.forward(tokens[:, 9:21])
    assert cache.begin(tokens) == 20
    ours = Decoder(model(), cache=cache).generate(tokens, max_new_tokens=5).sequences
    assert torch.equal(ours, Decoder(model()).generate(tokens, max_new_tokens=5).sequences)


def test_a_class_is_no_cache_to_decode_over():
    with pytest.raises(ValueError, match="the class PagedKVCache"):
        Decoder(model(), cache=PagedKVCache)


def test_a_chain_ends_at_the_first_token_that_skips_one():
    tree = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert [chain_length(mask) for mask in (tree, tree[:1, :1], torch.ones(3, 3).tril().bool())] == [1, 1, 3]
