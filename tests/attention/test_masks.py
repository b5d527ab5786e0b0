"""The mask function tells what `transformers` asks for, or refuses it in a sentence that names what can do it."""

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers import masking_utils as hf

from labkit.attention.masks import everything, flash_mask, hides_nothing
from labkit.attention.registration import flash_attention_forward
from tests.attention.families import BART, DECODERS, pair, tokens


def full(mask, causal: bool, batch: int, q_len: int, kv_len: int) -> torch.Tensor:
    """What `labkit_flash` makes of a mask: bool (batch, q_len, kv_len)."""
    if mask.ndim == 4:
        assert mask.shape[1:3] == (1, 1)
        mask, causal = mask[:, 0, 0], False
    n_keys = mask.shape[1]
    sees = torch.zeros(batch, q_len, kv_len, dtype=torch.bool)
    places = torch.arange(q_len)[:, None] + n_keys - q_len
    sees[:, :, :n_keys] = (torch.arange(n_keys) <= places) if causal else True
    sees[:, :, :n_keys] &= mask[:, None]
    return sees


SIZES = [
    (5, 5, 0, 0),
    (1, 9, 8, 0),
    (3, 9, 6, 0),
    (4, 20, 0, 0),
    (4, 20, 7, 0),
    (1, 20, 7, 0),
    (3, 9, 16, 10),
    (1, 1, 0, 0),
]


@pytest.mark.parametrize("padding", [None, "left", "right", "holes", "short", "long"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_mask_that_sdpa_gets(sizes, causal, padding):
    q_len, kv_len, q_offset, kv_offset = sizes
    length = kv_len + kv_offset
    mask = None if padding is None else torch.ones(2, length, dtype=torch.bool)
    if padding == "left":
        mask[0, : length // 2] = False
    elif padding == "right":
        mask[1, length // 2 :] = False
    elif padding == "holes":
        mask[0, ::3] = False
    elif padding == "short":
        mask = mask[:, : q_offset + q_len]
    elif padding == "long":
        mask = torch.nn.functional.pad(mask, (0, 3), value=True)
    function = hf.causal_mask_function if causal else hf.bidirectional_mask_function
    asked = {"batch_size": 2, "q_length": q_len, "kv_length": kv_len, "kv_offset": kv_offset, "attention_mask": mask}
    expected = hf.sdpa_mask(q_offset=q_offset, mask_function=function, allow_is_causal_skip=False, **asked)
    for offset in (q_offset, torch.tensor(q_offset)):
        ours = flash_mask(q_offset=offset, mask_function=function, **asked)
        assert torch.equal(full(ours, causal, 2, q_len, kv_len), expected[:, 0])
        assert ours.untyped_storage().nbytes() <= 2 * (length + 3)


def test_a_count_on_the_gpu_is_not_read_for_one_query(monkeypatch):
    """As under torch.compile, where reading it would break the graph."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    left = torch.ones(2, 20, dtype=torch.bool)
    left[1, :3] = False
    offset = torch.tensor(7)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("it was read"))
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: pytest.fail("it was read"))
    ours = flash_mask(2, 1, 20, q_offset=offset, attention_mask=left)
    monkeypatch.undo()
    assert ours.shape == (2, 20) and ours.sum(1).tolist() == [8, 5]
    assert flash_mask(2, 1, 20, q_offset=offset).sum(1).tolist() == [8, 8]


def test_a_mask_that_hides_nothing_is_one_byte_and_known_without_looking():
    mask = everything(3, 1000, "cpu")
    assert mask.all() and mask.shape == (3, 1000) and mask.untyped_storage().nbytes() == 1
    assert hides_nothing(mask) and not hides_nothing(mask.contiguous())
    assert not hides_nothing(torch.tensor(False).expand(2, 1))
    rows = torch.tensor([[True], [False]]).expand(2, 6)  # one value for all keys of a row, and it hides them
    for function in (hf.causal_mask_function, hf.bidirectional_mask_function):
        ours = flash_mask(2, 6, 6, mask_function=function, attention_mask=rows)
        assert not hides_nothing(ours) and ours.sum().item() == 6
    for mask in (None, torch.ones(2, 5, dtype=torch.bool)):
        assert hides_nothing(flash_mask(2, 5, 5, attention_mask=mask))


def own(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx <= q_idx


def lookalike(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx < q_idx


PACKED = hf.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2]]))
REFUSED = {
    "window": (hf.sliding_window_causal_mask_function(5), "sliding window of 5 cuts 6 keys"),
    "two-sided window": (hf.sliding_window_bidirectional_mask_function(3), "sliding window of 3 cuts 6 keys"),
    "chunks": (hf.chunked_causal_mask_function(64, torch.zeros(1)), "in chunks"),
    "packed": (hf.and_masks(hf.causal_mask_function, PACKED), "packed into one row"),
    "packed and a wide window": (hf.and_masks(hf.sliding_window_causal_mask_function(50), PACKED), "packed into one"),
    "or": (hf.or_masks(hf.causal_mask_function, own), "joined by `or`"),
    "own": (own, "own is not supported"),
    "and own": (hf.and_masks(hf.causal_mask_function, lookalike), "own is not supported"),
    "own, deep down": (hf.and_masks(hf.causal_mask_function, hf.and_masks(own)), "own is not supported"),
    "padding by hand": (hf.padding_mask_function(torch.ones(1, 6)), "own is not supported"),
    "shifted": (hf.add_offsets_to_mask_function(hf.causal_mask_function, 1, 0), "own is not supported"),
    "a lambda": (lambda *indices: indices[3] <= indices[2], "own is not supported"),
    "no function": (torch.nn.Identity(), "own is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name):
    function, says = REFUSED[name]
    with pytest.raises(ValueError, match=f"labkit_flash: .*{says}.*; use attn_implementation='sdpa'$"):
        flash_mask(1, 6, 6, mask_function=function)


def test_windows_that_hide_nothing_are_the_plain_mask():
    one_way = flash_mask(1, 6, 6, mask_function=hf.sliding_window_causal_mask_function(6))
    assert one_way.shape == (1, 6) and hides_nothing(one_way)
    both_ways = flash_mask(1, 6, 6, mask_function=hf.sliding_window_bidirectional_mask_function(6))
    assert both_ways.shape == (1, 1, 1, 6) and both_ways.all()
    nested = hf.and_masks(hf.and_masks(hf.causal_mask_function), hf.sliding_window_overlay(9))
    assert hides_nothing(flash_mask(1, 6, 6, mask_function=nested))
    with pytest.raises(ValueError, match="of 9 cuts 10 keys"):  # the cache has dropped 4 already
        flash_mask(1, 1, 6, q_offset=9, kv_offset=4, mask_function=nested)


def test_a_mask_to_be_changed_by_the_model_is_refused():
    with pytest.raises(ValueError, match="wants the whole"):
        flash_mask(1, 6, 6, allow_is_causal_skip=False)
    with pytest.raises(ValueError, match="wants the whole"):
        flash_mask(1, 6, 6, mask_function=hf.bidirectional_mask_function, allow_is_bidirectional_skip=False)
    with pytest.raises(ValueError, match="stand past the 6 keys"):
        flash_mask(1, 3, 6, q_offset=7)
    with pytest.raises(ValueError, match=r"mask of shape \(1, 1, 6\)"):
        flash_mask(1, 6, 6, attention_mask=torch.ones(1, 1, 6))


def test_one_row_for_all_queries_is_not_causal_whatever_the_module_says():
    q = torch.randn(2, 2, 5, 8)
    module = torch.nn.Module()
    module.is_causal = True
    seen = torch.tensor([[True] * 5, [True, False, True, True, True]])
    for mask in (seen[:, None, None], everything(2, 5, "cpu")[:, None, None]):
        out, _ = flash_attention_forward(module, q, q, q, mask)
        exact = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
        torch.testing.assert_close(out.transpose(1, 2), exact)


# In a model


@pytest.fixture(scope="module")
def llama():
    return pair(DECODERS["llama"])[0]


def test_packed_sequences_in_a_model(llama):
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0]])
    with pytest.raises(ValueError, match="packed into one row are not kept apart"):
        llama(tokens(1, 8), position_ids=positions, use_cache=False)
    with pytest.raises(ValueError, match="packed into one row are not kept apart"):
        llama(tokens(1, 8), cu_seq_lens_q=torch.tensor([0, 3, 8]), cu_seq_lens_k=torch.tensor([0, 3, 8]))


@pytest.mark.parametrize("cache", [None, DynamicCache, StaticCache])
def test_a_window_in_a_model_that_cuts(cache):
    family = ("mistral", DECODERS["mistral"][1] | {"sliding_window": 12})
    flash, eager = pair(family)
    options = {StaticCache: {"max_cache_len": 40}}.get(cache, {})
    made = {} if cache is None else {"past_key_values": cache(config=flash.config, **options)}
    with torch.no_grad():
        short = flash(tokens(2, 12), **made).logits
        torch.testing.assert_close(short, eager(tokens(2, 12)).logits, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="sliding window of 12 cuts .*use attn_implementation='sdpa'"):
            flash(tokens(2, 13) if cache is None else tokens(2, 1), **made)


def test_a_mask_given_by_hand(llama):
    bias = torch.zeros(1, 1, 8, 8).masked_fill(~torch.ones(8, 8).tril().bool(), -1e9)
    for mask in (bias, bias == 0):
        with pytest.raises(ValueError, match=r"\(1, 1, 8, 8\).* is not supported, but a \(batch, length\) one"):
            llama(tokens(1, 8), attention_mask=mask)


def test_dropout_while_training():
    flash = pair(DECODERS["llama"], attention_dropout=0.1)[0]
    flash(tokens(1, 8))
    with pytest.raises(ValueError, match=r"dropout of attention weights \(0.1\).*model.eval\(\)"):
        flash.train()(tokens(1, 8))


def test_attention_weights(llama):
    with pytest.raises(ValueError, match="weights, which are never made; use attn_implementation='eager'"):
        llama(tokens(1, 8), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        pair(BART)[0](tokens(1, 8), output_attentions=True)


def test_models_with_soft_caps_and_sinks():
    gemma = ("gemma2", DECODERS["llama"][1] | {"sliding_window": 64})
    with pytest.raises(ValueError, match="soft-capped scores are not supported"):
        pair(gemma)[0](tokens(1, 8))
    with pytest.raises(ValueError, match="position is not supported"):
        q = torch.randn(1, 2, 3, 8)
        flash_attention_forward(torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(1, 2, 3, 3))
    with pytest.raises(ValueError, match="sinks that the model has learned"):
        flash_attention_forward(torch.nn.Module(), q, q, q, None, s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="the mask is of 5 keys and the cache gave 3"):
        flash_attention_forward(torch.nn.Module(), q, q, q, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="a sliding window of 2 cuts 3 keys"):
        flash_attention_forward(torch.nn.Module(), q, q, q, None, sliding_window=2)
