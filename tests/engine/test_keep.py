"""`Decoder.keep`: after a tree, what is left is as if its path alone had been fed."""

import pytest
import torch
from transformers import LlamaForCausalLM

from labkit.engine import Decoder, StaticKVCache
from labkit.kv_cache import PagedKVCache, PagedQuantizedCache, QuantizedCache
from labkit.models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
# Of each node its parent, ancestors first. The root is the last verified token.
PARENTS = [-1, 0, 0, 1, 2, 2, 4, 5]
PATHS = [[], [0], [0, 2], [0, 1, 3], [0, 2, 5], [0, 2, 4, 6], [0, 2, 5, 7]]


def tree_mask() -> torch.Tensor:
    mask = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    shape = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    return tiny_model(vocab_size=128, max_position_embeddings=600, **shape)


def random_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(128, (batch, length))


def new_cache(model: LlamaForCausalLM, name: str) -> object:
    return {
        "static": lambda: None,
        "quantized, all recent": lambda: QuantizedCache(model.config, 4, 16, 64),
        "quantized": lambda: QuantizedCache(model.config, 4, 16, 0),
    }[name]()


NAMES = ["static", "quantized, all recent", "quantized"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_a_path_kept_of_a_tree_is_that_path_fed_alone(model: LlamaForCausalLM, name: str, path: list[int]) -> None:
    past, tree, after = random_tokens(1, 37), random_tokens(1, len(PARENTS)), random_tokens(1, 3)
    decoder, plain = (Decoder(model, cache=new_cache(model, name)) for _ in range(2))
    for one in (decoder, plain):
        one.forward(past)
    decoder.forward(tree, tree_mask=tree_mask())
    decoder.keep(37, [path])
    if path:
        plain.forward(tree[:, path])
    assert decoder.length == plain.length == 37 + len(path)
    # A text goes on after it, and another tree.
    torch.testing.assert_close(decoder.forward(after), plain.forward(after), **CLOSE)
    got, expected = (one.forward(tree, tree_mask=tree_mask()) for one in (decoder, plain))
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_the_start_may_stand_within_the_step(model: LlamaForCausalLM, name: str) -> None:
    """The root kept anyway, and the path counted from the token after it."""
    past, tree, after = random_tokens(1, 20), random_tokens(1, len(PARENTS)), random_tokens(1, 2)
    decoders = [Decoder(model, cache=new_cache(model, name)) for _ in range(2)]
    for decoder, (start, path) in zip(decoders, ((20, [0, 2, 5, 7]), (21, [1, 4, 6])), strict=True):
        decoder.forward(past)
        decoder.forward(tree, tree_mask=tree_mask())
        decoder.keep([start], (tuple(path),))
    assert torch.equal(*(decoder.forward(after) for decoder in decoders))


@pytest.mark.parametrize("name", NAMES)
def test_rows_keep_different_paths(model: LlamaForCausalLM, name: str) -> None:
    past, tree, after = random_tokens(3, 37), random_tokens(3, len(PARENTS)), random_tokens(3, 3)
    paths = [[0, 1, 3], [0, 2, 5], [0, 2, 4]]
    decoder = Decoder(model, cache=new_cache(model, name))
    decoder.forward(past)
    decoder.forward(tree, tree_mask=tree_mask())
    decoder.keep(37, paths)
    assert decoder.lengths == [40, 40, 40]
    got = decoder.forward(after)
    for row, path in enumerate(paths):
        alone = Decoder(model, cache=new_cache(model, name))
        alone.forward(past[row : row + 1])
        alone.forward(tree[row : row + 1, path])
        torch.testing.assert_close(got[row : row + 1], alone.forward(after[row : row + 1]), **CLOSE)


def test_static_rows_of_different_lengths_keep_paths_of_different_lengths(model: LlamaForCausalLM) -> None:
    past, tree, after = random_tokens(4, 30), random_tokens(4, len(PARENTS)), random_tokens(4, 3)
    lengths, paths = [12, 30, 1, 17], [[0, 2, 5, 7], [0], [], [0, 1, 3]]
    decoder = Decoder(model)
    decoder.forward(past)
    decoder.crop(lengths)
    decoder.forward(tree, tree_mask=tree_mask())
    decoder.keep(lengths, paths)
    assert decoder.lengths == [16, 31, 1, 20]
    got = decoder.forward(after)
    for row, (length, path) in enumerate(zip(lengths, paths, strict=True)):
        alone = Decoder(model)
        alone.forward(past[row : row + 1, :length])
        if path:
            alone.forward(tree[row : row + 1, path])
        torch.testing.assert_close(got[row : row + 1], alone.forward(after[row : row + 1]), **CLOSE)


def test_quantized_rows_keep_one_length(model: LlamaForCausalLM) -> None:
    decoder = Decoder(model, cache=QuantizedCache(model.config, 4, 16, 16))
    decoder.forward(random_tokens(2, 20))
    decoder.forward(random_tokens(2, len(PARENTS)), tree_mask=tree_mask())
    with pytest.raises(ValueError, match=r"paths: got 'rows of \[22, 21\] tokens'.*one length.*QuantizedCache"):
        decoder.keep(20, [[0, 2], [0]])
    assert decoder.length == 20 + len(PARENTS)
    decoder.keep([20, 21], [[0, 2, 5], [1, 4]])  # the same number of each
    assert decoder.lengths == [23, 23]


def test_nothing_kept_is_an_empty_cache(model: LlamaForCausalLM) -> None:
    for name in ("static", "quantized, all recent"):
        decoder, other = (Decoder(model, cache=new_cache(model, name)) for _ in range(2))
        decoder.forward(random_tokens(2, 4))
        decoder.keep(0, [[], []])
        assert decoder.length == 0
        prompt = random_tokens(1, 5)
        assert torch.equal(decoder.forward(prompt), other.forward(prompt))


def test_what_is_in_codes_is_not_kept_in_part(model: LlamaForCausalLM) -> None:
    decoder = Decoder(model, cache=QuantizedCache(model.config, 4, 16, 0))
    decoder.forward(random_tokens(1, 40))
    with pytest.raises(ValueError, match="start: got 31; takes at least 32: .*in codes"):
        decoder.keep(31, [[1, 3]])
    assert decoder.length == 40
    decoder.keep(32, [[1, 3]])
    assert decoder.length == 34


@pytest.mark.parametrize("kind", [PagedKVCache, PagedQuantizedCache])
def test_a_cache_of_blocks_refuses_by_name(model: LlamaForCausalLM, kind: type) -> None:
    decoder = Decoder(model, cache=kind(model.config, num_blocks=20, block_size=16, dtype=torch.float32))
    decoder.forward(random_tokens(1, 20))
    with pytest.raises(ValueError, match=f"cache: got '{kind.__name__}'; takes a StaticKVCache or a QuantizedCache"):
        decoder.keep(18, [[1]])
    assert decoder.length == 20


@pytest.mark.parametrize(
    ("start", "paths", "why"),
    [
        (18, [[0]], "paths: got '1 paths'; takes one for each of the 2 rows"),
        (18, [[0], [2]], r"paths\[1\]: got 2; takes an integer from 0 to 1"),
        (18, [[1, 0], [0]], r"paths\[0\]: got \[1, 0\]; takes indices that ascend"),
        (18, [[0, 0], [0]], r"paths\[0\]: got \[0, 0\]; takes indices that ascend"),
        (18, [[0], [-1]], r"paths\[1\]: got -1"),
        (18, [[0], 1], r"paths\[1\]: got 1; takes a sequence"),
        (18, None, "paths: got 'NoneType'"),
        (21, [[], []], "start: got 21; takes an integer from 0 to 20"),
        ([18], [[0], [0]], "start: got '1 lengths'"),
    ],
    ids=str,
)
def test_what_is_no_path_is_refused(model: LlamaForCausalLM, start: object, paths: object, why: str) -> None:
    decoder = Decoder(model)
    decoder.forward(random_tokens(2, 20))
    with pytest.raises(ValueError, match=why):
        decoder.keep(start, paths)
    assert decoder.lengths == [20, 20]


def test_a_static_keep_that_is_interrupted_holds_only_what_is_whole(monkeypatch, model: LlamaForCausalLM) -> None:
    past, tree, after = random_tokens(1, 20), random_tokens(1, len(PARENTS)), random_tokens(1, 2)
    decoder, plain = Decoder(model), Decoder(model)
    for one in (decoder, plain):
        one.forward(past)
    decoder.forward(tree, tree_mask=tree_mask())
    calls = []

    def stop(cache: StaticKVCache, lengths: list[int]) -> None:
        calls.append(lengths)
        if len(calls) == 2:  # keys and values have moved, and are not counted yet
            raise KeyboardInterrupt
        original(cache, lengths)

    original = StaticKVCache._set_lengths
    monkeypatch.setattr(StaticKVCache, "_set_lengths", stop)
    with pytest.raises(KeyboardInterrupt):
        decoder.keep(20, [[0, 2, 5]])
    monkeypatch.undo()
    assert decoder.lengths == [20]
    torch.testing.assert_close(decoder.forward(after), plain.forward(after), **CLOSE)
