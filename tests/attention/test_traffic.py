"""Counting what attention computes and moves, against PyTorch's own counter, a walk by hand, and the allocator."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit.attention.traffic import (
    AttentionShape,
    attention_flops,
    flash_cost,
    flash_extra_bytes,
    least_cost,
    standard_costs,
    standard_extra_bytes,
)
from labkit.kernels.flash_attention.tiles import tiles


def shape(q_len: int = 64, kv_len: int = 64, *, causal: bool = False, kv_heads: int = 2) -> AttentionShape:
    return AttentionShape(2, 4, kv_heads, q_len, kv_len, 16, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 9), (9, 3), (1, 7), (7, 1)])
def test_pairs_that_are_seen(q_len: int, kv_len: int, causal: bool) -> None:
    sees = torch.ones(q_len, kv_len).tril(kv_len - q_len if causal else kv_len + q_len)
    found = shape(q_len, kv_len, causal=causal)
    assert found.seen_pairs == 8 * int(sees.sum())
    assert attention_flops(found) == 4 * 16 * found.seen_pairs


def test_flops_are_those_that_pytorch_counts() -> None:
    q, k, v = (torch.randn(2, 4, 64, 16) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        (q @ k.mT).softmax(-1) @ v
    costs = standard_costs(shape(), "float32")
    assert sum(c.matmul_flops for c in costs) == counter.get_total_flops() == attention_flops(shape())
    # A causal mask spares standard attention nothing.
    assert standard_costs(shape(causal=True), "float32") == costs


def test_bytes_of_the_three_standard_ops() -> None:
    q, kv, matrix = 2 * 4 * 64 * 16, 2 * 4 * 64 * 16, 2 * 4 * 64 * 64
    scores, softmax, output = standard_costs(shape(), torch.bfloat16)
    assert scores.bytes == output.bytes == 2 * (q + kv + matrix)
    assert softmax.bytes == 2 * 2 * matrix


def test_bytes_of_tiles() -> None:
    """Two blocks of 32 queries: K and V twice for each of the four query heads; causal, the first stops half way."""
    q, kv_a_head, rows = 2 * 4 * 64 * 16, 2 * 64 * 16, 2 * 4 * 64
    ends = 2 * (2 * q) + 4 * rows
    assert flash_cost(shape(), "float16", (32, 32)).bytes == ends + 2 * (8 * 2 * kv_a_head)
    assert flash_cost(shape(causal=True), "float16", (32, 32)).bytes == ends + 2 * (8 * 1.5 * kv_a_head)
    # Who reads which keys does not depend on how many at a time.
    assert flash_cost(shape(), "float16", (32, 8)) == flash_cost(shape(), "float16", (32, 64))
    # A ragged end: 64 = 48 + 16.
    assert flash_cost(shape(), "float16", (48, 32)).bytes == flash_cost(shape(), "float16", (32, 32)).bytes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 64), (61, 67), (9, 70), (70, 9)])
@pytest.mark.parametrize("blocks", [(16, 16), (7, 12), (100, 3)])
def test_tiles_are_those_that_the_algorithm_visits(q_len: int, kv_len: int, blocks: tuple, causal: bool) -> None:
    """By walking over them, as the kernels do."""
    walk = list(tiles(q_len, kv_len, blocks, causal))
    pairs = 8 * sum((t.q_stop - t.q_start) * (t.k_stop - t.k_start) for t in walk)
    found = flash_cost(shape(q_len, kv_len, causal=causal), "float16", blocks)
    assert found.matmul_flops == 4 * 16 * pairs
    assert found.kv_bytes == 2 * 8 * 2 * 16 * sum(t.k_stop - t.k_start for t in walk)


def test_nothing_goes_below_the_least() -> None:
    """One block of all queries, one head for each KV head: each tensor once."""
    whole = shape(kv_heads=4)
    least = least_cost(whole, "float16")
    flash = flash_cost(whole, "float16", (64, 64))
    assert flash.bytes - least.bytes == flash_extra_bytes(whole) and flash.flops == least.flops
    assert least_cost(shape(kv_heads=1), "float16").bytes == 2 * (2 * 2 * 4 * 64 * 16 + 2 * 2 * 64 * 16)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_query_moves_the_same_either_way(kv_heads: int) -> None:
    """There is no matrix to save, only a row of scores; GQA is counted alike in both."""
    one = AttentionShape(1, 4, kv_heads, 1, 8192, 128, True)
    standard = sum(cost.bytes for cost in standard_costs(one, "float16"))
    assert 1 < standard / flash_cost(one, "float16", (128, 128)).bytes < 1.02


def test_tiles_compute_no_less() -> None:
    """Not causal the same products; causal whole tiles, between half of the matrix and all of it."""
    assert flash_cost(shape(), "float32", (16, 16)).matmul_flops == attention_flops(shape())
    causal = shape(causal=True)
    found = [flash_cost(causal, "float32", (block, block)).matmul_flops for block in (1, 16, 32, 64)]
    assert found == sorted(found) and found[0] == attention_flops(causal) and found[-1] == attention_flops(shape())


@pytest.mark.parametrize("length", [256, 512])
def test_extra_bytes_grow_as_said(length: int) -> None:
    once, twice = shape(length, length), shape(2 * length, 2 * length)
    assert standard_extra_bytes(twice, "bfloat16") == 4 * standard_extra_bytes(once, "bfloat16")
    assert flash_extra_bytes(twice) == 2 * flash_extra_bytes(once) == 2 * 2 * 4 * length * 4
    assert standard_extra_bytes(once, "bfloat16") == 2 * 2 * once.matrix_elements


def test_what_makes_no_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="num_key_value_heads: got 3; takes a number that divides 4"):
        shape(kv_heads=3)
    with pytest.raises(ValueError, match="q_len: got 0"):
        shape(q_len=0)
    for cost in (standard_costs, least_cost):
        with pytest.raises(ValueError, match="dtype: got 'int4'; takes one of whole bytes"):
            cost(shape(), "int4")
    for blocks in ((0, 16), (16, 0), (-1, 4), 16, (16, 16, 16)):
        with pytest.raises(ValueError, match="block_sizes: got"):
            flash_cost(shape(), "float16", blocks)
        with pytest.raises(ValueError, match="block_sizes: got"):
            list(tiles(8, 8, blocks, True))
    with pytest.raises(ValueError, match="causal: got None; takes True or False"):
        shape(causal=None)
