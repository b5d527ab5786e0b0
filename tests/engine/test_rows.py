"""Rows of different lengths: each is what it would be alone."""

import itertools

import pytest
import torch
from transformers import LlamaForCausalLM

from labkit.engine import Decoder, StaticKVCache, op_times
from labkit.kv_cache import PagedKVCache, QuantizedCache
from labkit.models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# 0 has children 1 and 2; 1 has child 3.
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    shape = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    return tiny_model(vocab_size=128, max_position_embeddings=600, **shape)


def random_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(128, (batch, length))


def held_by(model: LlamaForCausalLM, prompts: torch.Tensor, lengths: list[int]) -> Decoder:
    """A decoder that held whole prompts and was cropped to a length a row."""
    decoder = Decoder(model)
    decoder.forward(prompts)
    decoder.crop(lengths)
    return decoder


def alone(model: LlamaForCausalLM, prompt: torch.Tensor, length: int) -> Decoder:
    """A decoder of one row that never held more."""
    decoder = Decoder(model)
    if length:
        decoder.forward(prompt[None, :length])
    return decoder


@pytest.mark.parametrize("lengths", [[9, 30, 17], [30, 1, 29], [0, 12, 30]], ids=str)
@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("tree", [False, True])
def test_each_row_is_what_it_is_alone(model, lengths: list[int], q_len: int, tree: bool) -> None:
    prompts, new, after = random_tokens(3, 30), random_tokens(3, q_len), random_tokens(3, 3)
    mask = TREE[:q_len, :q_len] if tree else None
    decoder = held_by(model, prompts, lengths)
    assert decoder.lengths == lengths and decoder.length == max(lengths)
    logits, hidden = decoder.forward(new, tree_mask=mask, return_hidden=True)
    last = decoder.forward(after, logits_to_keep=2)
    assert decoder.lengths == [length + q_len + 3 for length in lengths]
    for row, length in enumerate(lengths):
        one = alone(model, prompts[row], length)
        expected, expected_hidden = one.forward(new[row : row + 1], tree_mask=mask, return_hidden=True)
        torch.testing.assert_close(logits[row : row + 1], expected, **CLOSE)
        torch.testing.assert_close(hidden[row : row + 1], expected_hidden, **CLOSE)
        torch.testing.assert_close(last[row : row + 1], one.forward(after[row : row + 1])[:, -2:], **CLOSE)


def test_rows_are_what_transformers_makes_of_padded_ones(model: LlamaForCausalLM) -> None:
    prompts, lengths, new = random_tokens(3, 20), [6, 20, 13], random_tokens(3, 4)
    got = held_by(model, prompts, lengths).forward(new)
    padded = [torch.cat((row[:length], more)) for row, length, more in zip(prompts, lengths, new, strict=True)]
    ids, mask = (torch.zeros(3, 24, dtype=torch.long) for _ in range(2))
    for row, text in enumerate(padded):
        ids[row, 24 - len(text) :], mask[row, 24 - len(text) :] = text, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits[:, -4:]
    torch.testing.assert_close(got, expected, **CLOSE)


def test_drafts_verified_and_rejected_by_row_give_the_tokens_of_plain_decoding(model: LlamaForCausalLM) -> None:
    """What speculation does: four tokens at a time, of which each row takes as many as are right, and one more."""
    prompts, new = random_tokens(3, 11), 24
    expected = [Decoder(model).generate(row[None], max_new_tokens=new).sequences[0].tolist() for row in prompts]
    rows = prompts.tolist()
    decoder = Decoder(model)
    decoder.forward(prompts[:, :-1])
    for right in itertools.cycle([[0, 3, 1], [2, 0, 3], [3, 3, 0]]):
        done = [len(row) - 11 for row in rows]
        if min(done) >= new:
            break
        fed = torch.zeros(3, 4, dtype=torch.long)
        for row, (text, taken) in enumerate(zip(rows, right, strict=True)):
            truth = (expected[row] + [0] * 9)[len(text) : len(text) + taken]
            draft = truth + [(expected[row] + [0] * 9)[len(text) + taken] ^ 1] * (3 - taken)
            fed[row] = torch.tensor([text[-1], *draft])
        greedy = decoder.forward(fed).argmax(-1).tolist()
        for row, taken in enumerate(right):
            rows[row] += greedy[row][: taken + 1]
        decoder.crop([len(row) - 1 for row in rows])
    assert [row[: 11 + new] for row in rows] == expected


def test_a_cache_that_grows_keeps_every_row(model: LlamaForCausalLM) -> None:
    prompts, new = random_tokens(2, 250), random_tokens(2, 40)
    decoder = held_by(model, prompts, [250, 40])
    small = decoder.cache.max_length
    got = decoder.forward(new)
    assert decoder.cache.max_length > small and decoder.lengths == [290, 80]
    for row, length in enumerate((250, 40)):
        expected = alone(model, prompts[row], length).forward(new[row : row + 1])
        torch.testing.assert_close(got[row : row + 1], expected, **CLOSE)


def test_the_longest_row_meets_the_models_end_and_no_row_changes(model: LlamaForCausalLM) -> None:
    decoder = held_by(model, random_tokens(2, 598), [598, 20])
    with pytest.raises(ValueError, match="max_length: got 601; takes an integer from 1 to 600"):
        decoder.forward(random_tokens(2, 3))
    assert decoder.lengths == [598, 20]
    decoder.forward(random_tokens(2, 2))
    assert decoder.lengths == [600, 22]


@pytest.mark.parametrize("at", ["embed", "kv_write", "down_proj", "lm_head"])
def test_a_step_given_up_leaves_each_row_its_length(model: LlamaForCausalLM, at: str) -> None:
    prompts, new = random_tokens(2, 20), random_tokens(2, 3)
    decoder = held_by(model, prompts, [20, 7])

    def stop(op: str) -> None:
        if op == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.forward(new, tree_mask=TREE[:3, :3], mark=stop)
    # Nor does its mask outlive it.
    assert decoder.lengths == [20, 7]
    torch.testing.assert_close(decoder.forward(new), held_by(model, prompts, [20, 7]).forward(new))


def test_one_number_cuts_the_rows_that_are_longer(model: LlamaForCausalLM) -> None:
    decoder = held_by(model, random_tokens(3, 20), [20, 5, 9])
    decoder.crop(9)
    assert (decoder.length, decoder.lengths) == (9, [9, 5, 9])
    decoder.crop(torch.tensor([5, 5, 5]))
    assert (decoder.length, decoder.lengths) == (5, [5, 5, 5])
    assert not decoder.cache.ragged
    decoder.forward(random_tokens(3, 2))
    assert decoder.lengths == [7, 7, 7]
    decoder.crop((0, 3, 0))
    decoder.reset()
    assert (decoder.length, decoder.lengths) == (0, [0, 0, 0])
    decoder.crop([])  # an empty cache has no rows to count
    assert decoder.length == 0


def test_what_makes_a_cache_anew_makes_its_rows_equal(model: LlamaForCausalLM) -> None:
    decoder, prompts = held_by(model, random_tokens(2, 20), [20, 5]), random_tokens(2, 9)
    decoder.fill_cache(2, 12)
    assert decoder.lengths == [12, 12]
    decoder.crop([3, 12])
    expected = Decoder(model).generate(prompts, max_new_tokens=8).sequences
    assert torch.equal(decoder.generate(prompts, max_new_tokens=8).sequences, expected)


def test_clocking_the_ops_of_a_step_leaves_each_row_its_length(model: LlamaForCausalLM) -> None:
    decoder = held_by(model, random_tokens(2, 20), [20, 5])
    op_times(decoder, random_tokens(2, 2), repeats=2)
    assert decoder.lengths == [20, 5]
    empty = Decoder(model)
    op_times(empty, random_tokens(2, 2), repeats=2)
    assert empty.length == 0


def caches(model: LlamaForCausalLM) -> list[object]:
    paged = PagedKVCache(model.config, num_blocks=20, block_size=8, dtype=torch.float32)
    return [None, QuantizedCache(model.config, 4, 12, 16), paged]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_equal_lengths_in_any_form_are_one_length_on_every_cache(model: LlamaForCausalLM, which: int) -> None:
    prompts, new = random_tokens(2, 20), random_tokens(2, 3)
    decoders = [Decoder(model, cache=caches(model)[which]) for _ in range(4)]
    for decoder, length in zip(decoders, (15, [15, 15], (15, 15), torch.tensor([15, 15])), strict=True):
        decoder.forward(prompts)
        decoder.crop(length)
        assert decoder.length == 15 and decoder.lengths == [15, 15]
    first, *others = [decoder.forward(new) for decoder in decoders]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("which", [1, 2])
def test_other_caches_refuse_rows_of_different_lengths(model: LlamaForCausalLM, which: int) -> None:
    decoder = Decoder(model, cache=caches(model)[which])
    decoder.forward(random_tokens(2, 20))
    name = type(decoder.cache).__name__
    with pytest.raises(ValueError, match=rf"length: got 'rows of \[15, 16\] tokens'.*{name}.*need a StaticKVCache"):
        decoder.crop([15, 16])
    assert decoder.length == 20


@pytest.mark.parametrize(
    ("length", "why"),
    [
        ([5], r"length: got '1 lengths'; .*each of the 2 held"),
        ([5, 21], r"length\[1\]: got 21; takes an integer from 0 to 20"),
        ([15, 5], r"length\[0\]: got 15; takes an integer from 0 to 9"),
        ([5, -1], r"length\[1\]: got -1"),
        ([5, 2.0], r"length\[1\]: got 2.0"),
        ("55", "length: got '55'"),
        (torch.tensor([5.0, 5.0]), "length: got 'torch.float32'"),
        (torch.tensor(5), "length: got .*1 dimensions"),
        (21, "length: got 21; takes an integer from 0 to 20"),
    ],
    ids=str,
)
def test_what_is_no_length_is_refused(model: LlamaForCausalLM, length: object, why: str) -> None:
    decoder = held_by(model, random_tokens(2, 20), [9, 20])
    with pytest.raises(ValueError, match=why):
        decoder.crop(length)
    assert decoder.lengths == [9, 20]


def test_an_empty_decoder_has_nothing_to_crop(model: LlamaForCausalLM) -> None:
    decoder = Decoder(model)
    decoder.crop([0, 0, 0])
    assert decoder.lengths == [] and decoder.length == 0
    with pytest.raises(ValueError, match=r"length\[1\]: got 1; takes an integer from 0 to 0"):
        decoder.crop([0, 1])


def test_a_given_cache_tells_its_rows(model: LlamaForCausalLM) -> None:
    cache = StaticKVCache(model.config, 2, 64, dtype=torch.float32, device="cpu")
    decoder = Decoder(model, cache=cache)
    decoder.forward(random_tokens(2, 10))
    decoder.crop([10, 4])
    assert cache.lengths == [10, 4] and cache.length == 10 and cache.ragged
    cache.lengths.append(3)
    assert decoder.lengths == [10, 4]
