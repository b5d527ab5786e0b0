"""What attention computes and what it moves, by counting: with the matrix of scores in memory, and tile by tile.

Bytes are those between memory and the chip where no cache helps: an op reads its inputs once and writes its outputs
once (Dao et al. 2022, arXiv:2205.14135, section 3.2 and theorem 2). FLOPs: a multiply-add is two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labkit import _check
from labkit.kernels.flash_attention.tiles import check_block_sizes, query_blocks
from labkit.sizing import bits_per_element
from labkit.step_costs import OpCost

# Operations on a score: scale, maximum, subtract, exponential, sum, divide.
_SOFTMAX_FLOPS = 6
_STATISTIC_BYTES = 4  # float32


@dataclass(frozen=True)
class AttentionShape:
    """Attention of `(batch, num_attention_heads, q_len, head_dim)` to `(batch, num_key_value_heads, kv_len, head_dim)`;
    causal: query i stands at place i + kv_len - q_len."""

    batch: int
    num_attention_heads: int
    num_key_value_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    causal: bool

    def __post_init__(self) -> None:
        for name in ("batch", "num_attention_heads", "num_key_value_heads", "q_len", "kv_len", "head_dim"):
            _check.integer(name, getattr(self, name), 1)
        _check.require(isinstance(self.causal, bool), "causal", self.causal, "True or False")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        _check.require(heads % shared == 0, "num_key_value_heads", shared, f"a number that divides {heads}")

    @property
    def q_elements(self) -> int:
        """Elements of the queries, and of the output."""
        return self.batch * self.num_attention_heads * self.q_len * self.head_dim

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values together."""
        return 2 * self.batch * self.num_key_value_heads * self.kv_len * self.head_dim

    @property
    def matrix_elements(self) -> int:
        """Scores of all heads: the whole rectangle, also where the mask hides it."""
        return self.batch * self.num_attention_heads * self.q_len * self.kv_len

    @property
    def seen_pairs(self) -> int:
        """Pairs of a query and a key that it sees, over all heads."""
        if not self.causal:
            return self.matrix_elements
        # Query i sees the first i + offset + 1 keys; with more queries than keys, the first ones see none.
        offset = self.kv_len - self.q_len
        first, last = max(1, 1 + offset), self.kv_len
        return self.batch * self.num_attention_heads * (first + last) * (last - first + 1) // 2


def attention_flops(shape: AttentionShape) -> int:
    """FLOPs of the two products over the pairs that are seen: what a speed in FLOP/s is by custom counted with."""
    return 4 * shape.seen_pairs * shape.head_dim


def _element_bytes(dtype: torch.dtype | str) -> int:
    bits = bits_per_element("dtype", dtype)
    _check.require(bits % 8 == 0, "dtype", str(dtype), "one of whole bytes: attention computes in no other")
    return bits // 8


def standard_costs(shape: AttentionShape, dtype: torch.dtype | str) -> tuple[OpCost, ...]:
    """Three ops with the matrix in memory between them, in `dtype`: scores, softmax, output.

    Scores are computed everywhere, also where a causal mask hides them. Every query head reads its keys and its values,
    once each.
    """
    size = _element_bytes(dtype)
    matrix, kv = shape.matrix_elements, shape.batch * shape.num_attention_heads * shape.kv_len * shape.head_dim
    product = 2 * matrix * shape.head_dim
    return (
        _cost("scores", product, 0, size * kv, size * (shape.q_elements + matrix)),
        _cost("softmax", 0, _SOFTMAX_FLOPS * matrix, 0, size * 2 * matrix),
        _cost("output", product, 0, size * kv, size * (matrix + shape.q_elements)),
    )


def flash_cost(shape: AttentionShape, dtype: torch.dtype | str, block_sizes: tuple[int, int]) -> OpCost:
    """One pass over tiles of `block_sizes` (queries, keys): Q read once, K and V once for every block of queries of
    every head as far as its tiles reach, the output and one statistic a row written. Tiles are computed whole.
    """
    size = _element_bytes(dtype)
    heads = shape.batch * shape.num_attention_heads
    blocks = list(_blocks_of_queries(shape, block_sizes))
    pairs = heads * sum(queries * keys for queries, keys in blocks)
    read = heads * 2 * shape.head_dim * sum(keys for _, keys in blocks)
    statistics = heads * shape.q_len * _STATISTIC_BYTES
    product = 4 * pairs * shape.head_dim
    return _cost("flash", product, _SOFTMAX_FLOPS * pairs, size * read, size * 2 * shape.q_elements + statistics)


def _blocks_of_queries(shape: AttentionShape, block_sizes: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Of each block of queries, how many it has and how many keys lie in the tiles that it visits."""
    block_q, block_k = check_block_sizes(block_sizes)
    for start, stop, seen in query_blocks(shape.q_len, shape.kv_len, block_q, shape.causal):
        yield stop - start, min(shape.kv_len, -(-seen // block_k) * block_k)


def least_cost(shape: AttentionShape, dtype: torch.dtype | str) -> OpCost:
    """What no way of computing attention can go below: the pairs that are seen, and q, k, v and the output moved once.

    Near what a GPU moves between memory and the chip, where the L2 cache keeps K and V of the heads at work.
    """
    size = _element_bytes(dtype)
    work = attention_flops(shape), _SOFTMAX_FLOPS * shape.seen_pairs
    return _cost("least", *work, size * shape.kv_elements, size * 2 * shape.q_elements)


def standard_extra_bytes(shape: AttentionShape, dtype: torch.dtype | str) -> int:
    """Bytes beside q, k, v and the output at the highest point: scores and weights of all heads in `dtype`, both there
    while the one is made from the other."""
    return 2 * shape.matrix_elements * _element_bytes(dtype)


def flash_extra_bytes(shape: AttentionShape) -> int:
    """Bytes beside q, k, v and the output: one float32 statistic a row. Tiles live on the chip."""
    return shape.batch * shape.num_attention_heads * shape.q_len * _STATISTIC_BYTES


def _cost(name: str, matmul: int, other: int, kv: int, activations: int) -> OpCost:
    return OpCost(name, 1, matmul + other, 0, kv, activations, matmul)
