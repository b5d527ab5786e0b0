"""One sequence's blocks and token ids, the keys of its prefixes, and pictures of all of them."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from labkit import _check

if TYPE_CHECKING:
    from labkit.kv_cache.block_pool import BlockPool


def token_ids(tokens: Sequence[int]) -> array:
    """Token ids as 64-bit integers. Errors: ValueError for anything else."""
    try:
        return array("q", tokens)
    except (TypeError, OverflowError):
        _check.require(False, "tokens", tokens, "token ids, integers of at most 64 bits")


def block_key(before: bytes, ids: array, number: int, block_size: int) -> bytes:
    """The key of a full block: SHA-256 of the key of the block before it, and of its own ids."""
    block = ids[number * block_size : (number + 1) * block_size]
    return hashlib.sha256(before + block.tobytes()).digest()


def find_prefix(pool: BlockPool, ids: array, block_size: int) -> list[int]:
    """Blocks of the prefix cache that hold the beginning of `ids`, its last token left out."""
    found, key = [], b""
    for number in range(max(0, len(ids) - 1) // block_size):
        key = block_key(key, ids, number, block_size)
        block = pool.find(key)
        if block is None:
            break
        found.append(block)
    return found


@dataclass(slots=True)
class BlockTable:
    """`length` tokens in `blocks`; of the first `written` the keys and values are there.

    `ids` is None where only the length is known. `keys` are those of the first full blocks, as far as needed so far.
    """

    block_size: int
    length: int
    written: int
    blocks: list[int]
    ids: array | None
    keys: list[bytes] = field(default_factory=list)

    def copy(self) -> BlockTable:
        """The same blocks, in lists of its own."""
        ids = None if self.ids is None else self.ids[:]
        return BlockTable(self.block_size, self.length, self.written, self.blocks[:], ids, self.keys[:])

    @property
    def last_fill(self) -> int:
        """Tokens in the last block; 0 without a block."""
        return (self.length - 1) % self.block_size + 1 if self.length else 0

    def missing(self, count: int) -> int:
        """Blocks to add for `count` more tokens."""
        return -(-(self.length + count) // self.block_size) - len(self.blocks)

    def writes_into_last(self, count: int) -> bool:
        """Whether `count` more tokens begin in a block that is there already."""
        return count > 0 and self.length % self.block_size > 0

    def cut(self, length: int) -> list[int]:
        """Forget the tokens from `length` on; returns the blocks that this leaves over."""
        self.length, self.written = length, min(self.written, length)
        kept = -(-length // self.block_size)
        over = self.blocks[kept:]
        del self.blocks[kept:], self.keys[length // self.block_size :]
        if self.ids is not None:
            del self.ids[length:]
        return over

    def new_keys(self) -> list[tuple[int, bytes]]:
        """Blocks that have become full and written since the last call, with their keys; none without ids."""
        known = len(self.keys)
        for number in range(known, self.written // self.block_size if self.ids is not None else 0):
            before = self.keys[-1] if self.keys else b""
            self.keys.append(block_key(before, self.ids, number, self.block_size))
        return list(zip(self.blocks[known : len(self.keys)], self.keys[known:], strict=True))


def filled_slots(tables: Iterable[BlockTable], pool: BlockPool, block_size: int) -> int:
    """Slots of the blocks in use that hold a token of some sequence; a slot that is shared counts once."""
    ends: dict[int, tuple[int, int]] = {}  # a last block: how many sequences end in it, the most that one has there
    for table in tables:
        if table.blocks:
            number, fill = ends.get(table.blocks[-1], (0, 0))
            ends[table.blocks[-1]] = number + 1, max(fill, table.last_fill)
    # A block that another sequence goes on from is full, wherever this one ends.
    empty = sum(block_size - fill for block, (number, fill) in ends.items() if number == pool.references(block))
    return (pool.num_blocks - pool.num_free) * block_size - empty


def blocks_needed(added: Iterable[tuple[BlockTable, int]], pool: BlockPool) -> int:
    """Free blocks that it takes to append so many tokens to each table, its copies on write included.

    Of the tables that share a last block and all go on, the last one need not copy it.
    """
    needed, owners = 0, {}
    for table, count in added:
        needed += table.missing(count)
        if table.writes_into_last(count):
            left = owners.get(table.blocks[-1], pool.references(table.blocks[-1]))
            needed += left > 1
            owners[table.blocks[-1]] = left - 1
    return needed


@dataclass(frozen=True)
class Snapshot:
    """Block tables at one moment: sequence to block ids, and to the tokens in its last block (0 without a block);
    blocks in use, and those of them that several sequences share."""

    block_size: int
    num_blocks: int
    tables: dict[int, tuple[int, ...]]
    last_fill: dict[int, int]
    used: frozenset[int]
    shared: frozenset[int]

    @classmethod
    def of(cls, tables: Mapping[int, BlockTable], pool: BlockPool, block_size: int) -> Snapshot:
        blocks = {name: tuple(table.blocks) for name, table in tables.items()}
        fills = {name: table.last_fill for name, table in tables.items()}
        used = frozenset(itertools.chain(*blocks.values()))
        shared = frozenset(block for block in used if pool.references(block) > 1)
        return cls(block_size, pool.num_blocks, blocks, fills, used, shared)
