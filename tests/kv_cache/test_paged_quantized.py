"""Blocks of codes give what the quantized cache in one piece gives, and take the bytes that they should."""

import pytest
import torch
from transformers import DynamicCache

from labkit.engine import Decoder
from labkit.kv_cache.blocks import OutOfBlocks
from labkit.kv_cache.interface import StepInput
from labkit.kv_cache.paged_quantized import PagedQuantizedCache
from labkit.kv_cache.quantized import QuantizedCache
from labkit.kv_cache.quantized_blocks import paged_quantized_bytes
from tests.kv_cache.paging import NEW, Largest, generated, model, prompt, same_generation, scattered

SIZE = 16  # a block, a group of keys, and a head's width


def paged(nbits: int = 4, num_blocks: int = 32, residual_length: int = 8, **options) -> PagedQuantizedCache:
    options = {"dtype": torch.float32, "device": "cpu", "block_size": SIZE} | options
    return PagedQuantizedCache(model().config, nbits, num_blocks=num_blocks, residual_length=residual_length, **options)


def whole(nbits: int = 4, residual_length: int = 8) -> QuantizedCache:
    return QuantizedCache(model().config, nbits=nbits, q_group_size=SIZE, residual_length=residual_length)


def close(a, b, tolerance=1e-3):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_state(ours: PagedQuantizedCache, theirs: QuantizedCache):
    """The same tokens quantized, to the same codes; the same tokens recent."""
    for layer_idx, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        assert a.n_quantized == b.n_quantized
        assert a.held == b.get_seq_length()
        if a.held > a.n_quantized:
            close(a.keys, b.keys)
        if a.n_quantized:
            for mine, other in zip(ours._old(layer_idx, 0, a.n_quantized), (b.old_keys, b.old_values), strict=True):
                close(mine, other.dequantize(torch.float32), 0.1)


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_gives_what_one_piece_gives(nbits, batch):
    ours, theirs = paged(nbits), whole(nbits)
    input_ids = prompt(batch, 45)
    same_generation(generated(ours, input_ids), generated(theirs, input_ids))
    same_state(ours, theirs)
    assert ours.manager.num_used_blocks == batch * ours.layers[0].n_quantized // SIZE > 0


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_decoder_gives_what_one_piece_gives(nbits, batch):
    full = prompt(batch, 70)
    ours, theirs = (Decoder(model(), cache=cache) for cache in (paged(nbits), whole(nbits)))
    for part in full.split([1, 30, 1, 1, 20, 1, 16], dim=1):
        close(ours.forward(part), theirs.forward(part))
    same_state(ours.cache, theirs.cache)
    for length in (66, 50, 37, 16, 5):
        ours.crop(length)
        theirs.crop(length)
        same_state(ours.cache, theirs.cache)
        close(ours.forward(full[:, length : length + 3]), theirs.forward(full[:, length : length + 3]), 1e-2)
        ours.crop(length)
        theirs.crop(length)


def test_a_window_longer_than_the_text_changes_nothing():
    input_ids = prompt(2, 45)
    same_generation(generated(paged(2, residual_length=100), input_ids), generated(DynamicCache(), input_ids))
    ours = Decoder(model(), cache=paged(2, residual_length=100)).generate(input_ids, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(input_ids, max_new_tokens=NEW).sequences)


def test_rows_go_their_own_ways():
    ours, theirs = paged(), whole()
    with torch.no_grad():
        for cache in (ours, theirs):
            model()(prompt(2, 45), past_key_values=cache)
            cache.reorder_cache(torch.tensor([1, 1, 0]))
        used = ours.manager.num_used_blocks
        assert used == 4 and ours.manager.snapshot().shared
        for step in prompt(3, 20, seed=1).split(1, dim=1):
            close(model()(step, past_key_values=ours).logits, model()(step, past_key_values=theirs).logits)
    same_state(ours, theirs)
    assert ours.manager.num_used_blocks == 4 + 3


def test_beams_give_what_one_piece_gives():
    options = {"num_beams": 3, "max_new_tokens": 20}
    ours, theirs = (generated(cache, prompt(1, 45), **options).sequences for cache in (paged(8), whole(8)))
    assert torch.equal(ours, theirs)


def test_a_known_beginning_is_not_computed_again():
    cache, full = paged(8), prompt(2, 60)
    decoder = Decoder(model(), cache=cache)
    decoder.generate(full, max_new_tokens=1)
    codes = [part.clone() for part in cache.storage.parts()]
    at_hand = cache.begin(full)
    assert at_hand == 48 and [layer.n_quantized for layer in cache.layers] == [48, 48]
    logits = decoder.forward(full[:, at_hand:])
    assert all(torch.equal(a, b) for a, b in zip(codes, cache.storage.parts(), strict=True))
    theirs = Decoder(model(), cache=whole(8))
    theirs.forward(full[:, :57])
    assert theirs.cache.layers[0].n_quantized == 48
    theirs.crop(48)
    close(logits, theirs.forward(full[:, 48:]), 1e-2)
    # What came after is another text's: only the blocks before it are found.
    other = full.clone()
    other[:, 20:] = 3
    assert cache.begin(other) == 16


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_predicted_are_bytes_allocated(nbits, dtype):
    cache = paged(nbits, num_blocks=10, dtype=dtype)
    allocated = sum(part.untyped_storage().nbytes() for part in cache.storage.parts())
    predicted = paged_quantized_bytes(model().config, nbits=nbits, num_blocks=10, block_size=SIZE)
    # K and V of 2 layers and 2 heads: codes of 16 numbers a token, and two numbers of 16 bits for each 16 codes.
    assert allocated == cache.nbytes == predicted == 10 * SIZE * 8 * (16 * nbits // 8 + 4)


@pytest.mark.parametrize("nbits", [8, 4])
def test_a_decoder_step_never_makes_a_layer_of_full_precision(nbits):
    cache, length = paged(nbits), 400
    decoder = Decoder(model(), cache=cache)
    decoder.forward(prompt(1, length), logits_to_keep=1)
    assert cache.layers[0].n_quantized == 384 and cache.layers[0].keys.untyped_storage().nbytes() == 2 * 16 * 16 * 4
    with Largest(*model().parameters()) as largest:
        decoder.forward(prompt(1, 1))
    assert 0 < largest.elements < 2 * length * 16


def test_block_order_changes_nothing():
    decoders = [Decoder(model(), cache=cache) for cache in (paged(), scattered(paged()))]
    for part in prompt(2, 70).split([50, 1, 19], dim=1):
        assert torch.equal(*(decoder.forward(part) for decoder in decoders))
    tables = [[cache.manager.block_table(row) for row in cache.rows] for cache in (d.cache for d in decoders)]
    assert tables[0] != tables[1]


def test_running_out_of_blocks_is_refused_and_the_cache_serves_again():
    # Without a prefix cache, whose rounded beginning would give other tokens than a prompt of full precision.
    cache, input_ids = paged(num_blocks=4, prefix_caching=False), prompt(2, 45)
    decoder = Decoder(model(), cache=cache)
    with pytest.raises(OutOfBlocks):
        decoder.generate(input_ids, max_new_tokens=30)
    assert cache.length == 56  # the third block of each row would be due at 48 settled tokens and a window of 8
    with pytest.raises(OutOfBlocks):
        decoder.forward(input_ids[:, :1])
    theirs = Decoder(model(), cache=whole())
    decoder.crop(45)
    theirs.forward(input_ids)
    close(decoder.forward(input_ids[:, :7]), theirs.forward(input_ids[:, :7]), 1e-2)
    assert torch.equal(
        decoder.generate(input_ids, max_new_tokens=8).sequences, theirs.generate(input_ids, max_new_tokens=8).sequences
    )


@pytest.mark.parametrize("past", [0, 40])
def test_a_step_that_fails_leaves_nothing_behind(past):
    full = prompt(1, 70)
    ours, theirs = (Decoder(model(), cache=cache) for cache in (paged(), whole()))

    def fail(name):
        if name == "mlp_residual":  # the first layer is written, the second is not
            raise KeyboardInterrupt

    for decoder in (ours, theirs):
        if past:
            decoder.forward(full[:, :past])
    with pytest.raises(KeyboardInterrupt):
        ours.forward(full[:, : 70 - past] + 1 & 255, mark=fail)
    assert ours.length == past
    for part in full[:, past:].split([20, 1, 70 - past - 21], dim=1):
        close(ours.forward(part), theirs.forward(part))
    same_state(ours.cache, theirs.cache)
    assert ours.cache.begin(full) == {0: 0, 40: 48}[past]


def test_a_step_given_up_without_a_word_is_forgotten_by_the_next():
    full = prompt(1, 60)
    ours, theirs = (Decoder(model(), cache=cache) for cache in (paged(), whole()))
    for decoder in (ours, theirs):
        decoder.forward(full[:, :40])
    ours.cache.extend(full[:, :5])
    states = torch.ones(1, 2, 5, 16)
    at = StepInput(torch.arange(40, 45), states, states, 45, None, True)
    ours.cache.write(0, states, states, at)
    close(ours.forward(full[:, 40:]), theirs.forward(full[:, 40:]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nbits": 3}, "nbits: got 3"),
        ({"residual_length": -1}, "residual_length: got -1"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"num_blocks": 10**9}, "num_blocks: got 1000000000; takes at most"),
    ],
)
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        paged(**options)
