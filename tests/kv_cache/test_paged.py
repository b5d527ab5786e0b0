"""Keys and values in blocks give what they give in one piece, through `transformers` and through `Decoder`."""

import pytest
import torch
from transformers import DynamicCache

from labkit.engine import Decoder
from labkit.kv_cache.blocks import OutOfBlocks
from labkit.kv_cache.paged import PagedKVCache
from labkit.kv_cache.paged_storage import paged_cache_bytes
from labkit.models import tiny_model
from tests.kv_cache.paging import NEW, Largest, generated, model, prompt, same_generation, scattered


def paged(num_blocks: int = 64, block_size: int = 4, **options) -> PagedKVCache:
    options = {"dtype": torch.float32, "device": "cpu"} | options
    return PagedKVCache(model().config, num_blocks=num_blocks, block_size=block_size, **options)


# Through transformers


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("batch", [1, 3])
def test_generate_gives_what_a_dynamic_cache_gives(block_size, batch):
    input_ids = prompt(batch)
    ours = generated(paged(128, block_size), input_ids)
    same_generation(ours, generated(DynamicCache(config=model().config), input_ids))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_generate_from_prompts_around_a_block(length):
    same_generation(generated(paged(), prompt(2, length)), generated(DynamicCache(), prompt(2, length)))


def test_padding_on_the_left_changes_no_row():
    input_ids, mask = prompt(3), torch.ones(3, 21, dtype=torch.int64)
    for row, padding in enumerate((0, 5, 9)):
        input_ids[row, :padding], mask[row, :padding] = 0, 0
    ours = generated(paged(), input_ids, attention_mask=mask)
    same_generation(ours, generated(DynamicCache(), input_ids, attention_mask=mask))
    alone = generated(paged(), input_ids[2:, 9:])
    assert torch.equal(ours.sequences[2, 21:], alone.sequences[0, 12:])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_share_blocks_and_give_what_a_dynamic_cache_gives(block_size):
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 16}
    cache = paged(160, block_size)
    ours = generated(cache, prompt(), **options)
    assert torch.equal(ours.sequences, generated(DynamicCache(), prompt(), **options).sequences)
    assert cache.manager.snapshot().shared


def test_assisted_decoding_crops_and_gives_the_same():
    assistant = tiny_model(num_hidden_layers=1)
    cache, crops = paged(), []
    crop = cache.crop
    cache.crop = lambda count: (crops.append(count), crop(count))
    options = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "max_new_tokens": 20}
    assistant.generation_config.update(**{k: options.pop(k) for k in list(options)[:2]})
    ours = generated(cache, prompt(), assistant_model=assistant, **options)
    assert min(crops) < 0
    assert torch.equal(ours.sequences, generated(DynamicCache(), prompt(), **options).sequences)


@pytest.mark.parametrize(("crop", "kept"), [(-4, 17), (-5, 16), (0, 21), (16, 16), (-21, 0), (30, 21), (-30, 0)])
def test_crop_by_number_removed_or_kept(crop, kept):
    cache, full = paged(), prompt(2, 30)
    with torch.no_grad():
        whole = model()(full).logits
        model()(full[:, :21], past_key_values=cache)
        cache.crop(crop)
        assert [layer.get_seq_length() for layer in cache.layers] == [kept, kept]
        assert cache.manager.num_used_blocks == 2 * -(-kept // 4)
        torch.testing.assert_close(
            model()(full[:, kept:], past_key_values=cache).logits, whole[:, kept:], rtol=1e-4, atol=1e-4
        )


def test_token_by_token_is_one_forward_pass():
    cache, full = paged(), prompt(2)
    with torch.no_grad():
        steps = [model()(full[:, t : t + 1], past_key_values=cache).logits for t in range(21)]
        torch.testing.assert_close(torch.cat(steps, dim=1), model()(full).logits, rtol=1e-4, atol=1e-4)


def test_samples_of_one_prompt_share_it_until_they_differ():
    cache, continued = paged(), prompt(3, 8, seed=1)
    with torch.no_grad():
        model()(prompt(1, 21), past_key_values=cache)
        used = cache.manager.num_used_blocks
        cache.batch_repeat_interleave(3)
        assert (cache.batch, cache.manager.num_used_blocks) == (3, used)
        ours = torch.cat([model()(continued[:, t : t + 1], past_key_values=cache).logits for t in range(8)], dim=1)
        whole = model()(torch.cat((prompt(1, 21).expand(3, -1), continued), dim=1)).logits
        torch.testing.assert_close(ours, whole[:, 21:], rtol=1e-4, atol=1e-4)
        # Five blocks are full and shared; of the rest each row has its own.
        assert cache.manager.num_used_blocks == 5 + 3 * 3
        cache.batch_select_indices(torch.tensor([2, 0, 1]))
        cache.batch_select_indices(torch.tensor([True, True, False]))
        assert cache.batch == 2 and cache.manager.num_used_blocks == 5 + 2 * 3
        after = model()(continued[[2, 0], :1], past_key_values=cache).logits
        again = torch.cat((prompt(1, 21).expand(3, -1), continued, continued[:, :1]), dim=1)[[2, 0]]
        torch.testing.assert_close(after[:, -1], model()(again).logits[:, -1], rtol=1e-4, atol=1e-4)


# Through Decoder


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_decoder_gives_what_a_static_cache_gives(block_size, batch):
    input_ids = prompt(batch)
    cache = paged(160, block_size)
    ours = Decoder(model(), cache=cache).generate(input_ids, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(input_ids, max_new_tokens=NEW).sequences)
    # The last token was sampled, and never put in.
    assert cache.length == 21 + NEW - 1
    assert cache.manager.num_used_blocks <= batch * -(-cache.length // block_size)


def test_decoder_gives_the_logits_of_one_forward_pass():
    full, decoder = prompt(2, 40), Decoder(model(), cache=paged())
    whole = model()(full).logits
    parts = [decoder.forward(part) for part in full.split([9, 1, 1, 7, 1, 16, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)
    decoder.crop(11)
    torch.testing.assert_close(decoder.forward(full[:, 11:]), whole[:, 11:], rtol=1e-4, atol=1e-4)
    decoder.reset()
    torch.testing.assert_close(decoder.forward(full[:1]), whole[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("past", [0, 6])
def test_a_tree_of_tokens_sees_its_own_branch(past):
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    ours, theirs = Decoder(model(), cache=paged()), Decoder(model())
    for decoder in (ours, theirs):
        if past:
            decoder.forward(prompt(1, past))
    tokens = prompt(1, 4, seed=2)
    torch.testing.assert_close(
        ours.forward(tokens, tree_mask=tree), theirs.forward(tokens, tree_mask=tree), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("length", "at_hand"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (40, 32)])
def test_a_known_beginning_is_not_computed_again(length, at_hand):
    cache, full = paged(block_size=16), prompt(1, 40)
    decoder = Decoder(model(), cache=cache)
    decoder.generate(full, max_new_tokens=1)
    before = cache.storage.keys.clone()
    computed = []
    decoder.forward, forward = (
        lambda tokens, **o: (computed.append(tokens.shape[1]), forward(tokens, **o))[1],
        decoder.forward,
    )
    ours = decoder.generate(full[:, :length], max_new_tokens=NEW)
    assert computed[0] == length - at_hand
    assert torch.equal(ours.sequences, Decoder(model()).generate(full[:, :length], max_new_tokens=NEW).sequences)
    # Nobody wrote to what was shared.
    known = cache.manager.block_table(cache.rows[0])[: at_hand // 16]
    assert torch.equal(cache.storage.keys[:, known], before[:, known])


def test_rows_start_after_what_all_of_them_have():
    cache, full = paged(), prompt(2, 21)
    decoder = Decoder(model(), cache=cache)
    decoder.generate(full[:1], max_new_tokens=1)
    assert cache.begin(full) == 0
    decoder.generate(full, max_new_tokens=1)
    other = full.clone()
    other[1, 13:] = 7
    assert cache.begin(other) == 12
    ours = decoder.generate(other, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(other, max_new_tokens=NEW).sequences)


def test_what_follows_a_crop_lies_where_the_manager_says():
    cache, full = paged(), prompt(2, 21)
    decoder = Decoder(model(), cache=cache)
    decoder.forward(full)
    decoder.crop(13)
    full[:, 13:] = prompt(2, 8, seed=4)
    decoder.forward(full[:, 13:])
    assert cache.begin(full) == 20
    ours = decoder.generate(full, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(full, max_new_tokens=NEW).sequences)


def test_equal_rows_do_not_take_each_others_unwritten_blocks():
    cache, full = paged(), prompt(1, 21).repeat(3, 1)
    ours = Decoder(model(), cache=cache).generate(full, max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(full, max_new_tokens=NEW).sequences)


def test_a_step_that_fails_leaves_nothing_behind():
    cache, full = paged(), prompt(1, 21)
    decoder = Decoder(model(), cache=cache)

    def fail(name):
        if name == "mlp_residual":  # the first layer is written, the second is not
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(full, mark=fail)
    assert (cache.length, cache.manager.num_used_blocks, cache.begin(full)) == (0, 0, 0)
    decoder.forward(full[:, :10])
    with pytest.raises(KeyboardInterrupt):
        decoder.forward(full[:, 10:14] + 1 & 255, mark=fail)
    ours = decoder.forward(full[:, 10:])
    torch.testing.assert_close(ours, model()(full).logits[:, 10:], rtol=1e-4, atol=1e-4)
    # The prefix cache knows the tokens that came, not those that failed.
    assert cache.begin(full) == 20


def test_a_step_given_up_without_a_word_is_forgotten_by_the_next():
    cache, full = paged(), prompt(1, 21)
    decoder = Decoder(model(), cache=cache)
    decoder.forward(full[:, :10])
    cache.extend(full[:, :11])
    torch.testing.assert_close(decoder.forward(full[:, 10:]), model()(full).logits[:, 10:], rtol=1e-4, atol=1e-4)
    assert cache.begin(full) == 20


def test_no_prefix_cache_where_none_is_wanted():
    cache = paged(prefix_caching=False)
    Decoder(model(), cache=cache).generate(prompt(), max_new_tokens=1)
    assert cache.begin(prompt()) == 0


def test_a_cache_goes_from_transformers_to_decoder_but_not_back():
    cache, full = paged(), prompt(1, 21)
    with torch.no_grad():
        model()(full[:, :9], past_key_values=cache)
    decoder = Decoder(model(), cache=cache)
    torch.testing.assert_close(decoder.forward(full[:, 9:]), model()(full).logits[:, 9:], rtol=1e-4, atol=1e-4)
    decoder.generate(full, max_new_tokens=1)
    with torch.no_grad(), pytest.raises(ValueError, match="past_key_values: got '21 tokens of a Decoder'"):
        model()(full[:, :1], past_key_values=cache)
    cache.reset()
    same_generation(generated(cache, full), generated(DynamicCache(), full))


# Memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_predicted_are_bytes_allocated(dtype):
    cache = PagedKVCache(model().config, num_blocks=10, block_size=16, dtype=dtype, device="cpu")
    kept = [cache.storage.keys, cache.storage.values]
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    assert allocated == cache.nbytes == paged_cache_bytes(model().config, dtype, num_blocks=10, block_size=16)
    assert allocated == 10 * 16 * 2 * 2 * 2 * 16 * dtype.itemsize  # K and V, layers, heads, head_dim
    cache.begin(prompt(2))
    cache.extend(prompt(2))
    options = {"num_blocks": 10, "block_size": 16, "batch": 2, "seq_len": 21}
    assert cache.nbytes == paged_cache_bytes(model().config, dtype, **options) == allocated + 2 * 2 * 4


def test_block_order_changes_nothing():
    input_ids = prompt(3)
    straight, mixed = paged(), scattered(paged())
    a, b = (generated(cache, input_ids) for cache in (straight, mixed))
    tables = [[cache.manager.block_table(row) for row in cache.rows] for cache in (straight, mixed)]
    assert tables[0] != tables[1] and sorted(tables[1][0]) != list(range(min(tables[1][0]), max(tables[1][0]) + 1))
    assert torch.equal(a.sequences, b.sequences)
    assert all(torch.equal(x, y) for x, y in zip(a.logits, b.logits, strict=True))
    decoders = [Decoder(model(), cache=cache) for cache in (paged(), scattered(paged(), seed=3))]
    for part in input_ids.split([13, 1, 7], dim=1):
        assert torch.equal(*(decoder.forward(part) for decoder in decoders))


@pytest.mark.parametrize(("batch", "block_size"), [(1, 16), (2, 4), (1, 128)])
def test_a_decoder_step_never_gathers_a_layer(batch, block_size):
    length = 400
    cache = paged(8 * 128, block_size) if block_size < 128 else paged(8, block_size)
    decoder = Decoder(model(), cache=cache)
    decoder.forward(prompt(batch, length), logits_to_keep=1)
    one_layer = batch * 2 * length * 16
    with Largest(cache.storage.keys, cache.storage.values, *model().parameters()) as largest:
        decoder.forward(prompt(batch, 1))
    assert 0 < largest.elements < one_layer
    # and the test would see one that did:
    with Largest(cache.storage.keys, cache.storage.values) as largest, torch.no_grad():
        cache.storage.gather(0, cache._table, length)
    assert largest.elements >= one_layer


def test_running_out_of_blocks_is_refused_and_the_cache_serves_again():
    cache, input_ids = paged(num_blocks=14), prompt(2)
    with pytest.raises(OutOfBlocks, match="2 more blocks of 4 tokens are needed and 0 of 14 are free"):
        generated(cache, input_ids)
    assert cache.length == 28  # every step that had room
    cache.reset()
    assert cache.manager.num_free_blocks == 14
    short = {"max_new_tokens": 8}
    same_generation(generated(cache, input_ids, **short), generated(DynamicCache(), input_ids, **short))
    decoder = Decoder(model(), cache=cache)
    with pytest.raises(OutOfBlocks):
        decoder.generate(input_ids, max_new_tokens=NEW)
    with pytest.raises(OutOfBlocks):
        decoder.forward(input_ids[:, :9])
    # It goes on from where it was, too.
    decoder.crop(21)
    whole = model()(torch.cat((input_ids, input_ids[:, :7]), dim=1)).logits
    torch.testing.assert_close(decoder.forward(input_ids[:, :7]), whole[:, 21:], rtol=1e-4, atol=1e-4)
    ours = decoder.generate(input_ids, max_new_tokens=8).sequences
    assert torch.equal(ours, Decoder(model()).generate(input_ids, max_new_tokens=8).sequences)


def test_freed_memory_of_another_text_is_never_read():
    cache = paged(num_blocks=16, prefix_caching=False)
    decoder = Decoder(model(), cache=cache)
    decoder.generate(prompt(1, 50, seed=5), max_new_tokens=1)
    cache.storage.keys.fill_(float("nan"))
    cache.storage.values.fill_(float("nan"))
    ours = decoder.generate(prompt(), max_new_tokens=NEW)
    assert torch.equal(ours.sequences, Decoder(model()).generate(prompt(), max_new_tokens=NEW).sequences)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_blocks": 0}, "num_blocks: got 0"),
        ({"num_blocks": 10**9}, "num_blocks: got 1000000000; takes at most .* GB would be needed"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"device": "nowhere"}, "device: got 'nowhere'"),
        ({"prefix_caching": None}, "prefix_caching: got None"),
    ],
)
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        paged(**({"num_blocks": 4} | options))


def test_keys_of_another_model_are_refused():
    with pytest.raises(ValueError, match="config: got"):
        PagedKVCache(None, num_blocks=1, dtype="float32")
    with torch.no_grad(), pytest.raises(ValueError, match="keys: got .*torch.float32 on cpu"):
        model()(prompt(), past_key_values=paged(dtype="bfloat16"))
    with torch.no_grad(), pytest.raises(ValueError, match=r"keys: got 'shape \(1, 4, 21, 16\)'"):
        tiny_model(num_key_value_heads=4)(prompt(), past_key_values=paged())
    with torch.no_grad(), pytest.raises(ValueError, match="keys: got '2 rows'"):
        cache = paged()
        model()(prompt(1), past_key_values=cache)
        model()(prompt(2), past_key_values=cache)
