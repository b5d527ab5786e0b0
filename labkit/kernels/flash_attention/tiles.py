"""The tiles of the score matrix that FlashAttention visits, and those that the causal mask spares it."""

from collections.abc import Iterator
from dataclasses import dataclass

from labkit import _check


@dataclass(frozen=True)
class Tile:
    """Queries q_start to q_stop against keys k_start to k_stop; `partial` where the causal mask cuts through it."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    partial: bool


def check_block_sizes(block_sizes: object) -> tuple[int, int]:
    """As two numbers of at least 1: queries and keys of a tile."""
    pair = isinstance(block_sizes, tuple | list) and len(block_sizes) == 2
    _check.require(pair, "block_sizes", block_sizes, "(block_q, block_k), queries and keys of a tile")
    return tuple(_check.integer("block_sizes", size, 1) for size in block_sizes)


def query_blocks(q_len: int, kv_len: int, block_q: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """Each block of queries: its first, one past its last, and how many keys from the start its last query sees.

    Causal, query i stands at place i + kv_len - q_len.
    """
    for q_start in range(0, q_len, block_q):
        q_stop = min(q_start + block_q, q_len)
        yield q_start, q_stop, max(0, q_stop + kv_len - q_len) if causal else kv_len


def tile_count(q_len: int, kv_len: int, block_sizes: tuple[int, int], causal: bool) -> int:
    """How many `tiles` visits."""
    block_q, block_k = check_block_sizes(block_sizes)
    return sum(-(-seen // block_k) for _, _, seen in query_blocks(q_len, kv_len, block_q, causal))


def tiles(q_len: int, kv_len: int, block_sizes: tuple[int, int], causal: bool) -> Iterator[Tile]:
    """The tiles of `block_sizes` (queries, keys) in the order of the forward pass: along the keys, then down.

    Causal, tiles that lie wholly past their last query's place are left out. The last tile of either axis is as long
    as what is left.
    """
    block_q, block_k = check_block_sizes(block_sizes)
    offset = kv_len - q_len
    for q_start, q_stop, seen in query_blocks(q_len, kv_len, block_q, causal):
        for k_start in range(0, seen, block_k):
            k_stop = min(k_start + block_k, kv_len)
            yield Tile(q_start, q_stop, k_start, k_stop, causal and k_stop - 1 > q_start + offset)
