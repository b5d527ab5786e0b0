"""PagedAttention's bookkeeping: block tables, copy on write, a prefix cache. Numbers only; no tensor is touched."""

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from numbers import Integral

from labkit import _check
from labkit.kv_cache.block_pool import BlockPool, OutOfBlocks
from labkit.kv_cache.block_table import BlockTable, Snapshot, blocks_needed, filled_slots, find_prefix, token_ids

__all__ = ["BlockManager", "OutOfBlocks", "Snapshot"]

Copies = list[tuple[int, int]]


class BlockManager:
    """Deals out `num_blocks` blocks of `block_size` tokens (Kwon et al., 2023, "PagedAttention", section 4).

    A sequence is made from its token ids, or from their number alone, which leaves it out of the prefix cache. Blocks
    enter the prefix cache by `commit`, once their keys and values are written. A block is found by the SHA-256 of its
    ids and of the key of the block before it, so that equal keys mean equal prefixes. Freed blocks stay there until
    they are needed, least recently used first.
    watermark: what `can_allocate` leaves free for running sequences to grow into: a share of the blocks (a float up to
    1), or a number of them (an int).
    Errors: ValueError for wrong arguments; OutOfBlocks, with everything as it was, where the blocks do not suffice.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, watermark: float | int = 0.0, prefix_caching: bool = True
    ) -> None:
        self._pool = BlockPool(num_blocks)
        self.num_blocks = self._pool.num_blocks
        self.block_size = _check.integer("block_size", block_size, 1)
        _check.require(isinstance(prefix_caching, bool), "prefix_caching", prefix_caching, "True or False")
        self.prefix_caching = prefix_caching
        if isinstance(watermark, Integral):
            self.reserved_blocks = _check.integer("watermark", watermark, 0, num_blocks)
        else:
            self.reserved_blocks = math.ceil(_check.number("watermark", watermark, 0, 1) * num_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._names = itertools.count()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence uses; those that the prefix cache still knows are among them."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that the prefix cache knows, in use or free."""
        return self._pool.num_known

    @property
    def slots_allocated(self) -> int:
        """Slots of the blocks in use."""
        return self.num_used_blocks * self.block_size

    @property
    def tokens_held(self) -> int:
        """Slots that hold a token of some sequence; one that is shared counts once."""
        return filled_slots(self._tables.values(), self._pool, self.block_size)

    @property
    def utilization(self) -> float:
        """Tokens held over slots allocated; 1 where nothing is allocated."""
        return self.tokens_held / self.slots_allocated if self.num_used_blocks else 1.0

    @property
    def waste(self) -> float:
        """The share of allocated slots that hold no token."""
        return 1.0 - self.utilization

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of all sequences, oldest first."""
        return tuple(self._tables)

    def references(self, block: int) -> int:
        """How many sequences' tables hold this block."""
        return self._pool.references(_check.integer("block", block, 0, self.num_blocks - 1))

    def num_tokens(self, sequence: int) -> int:
        return self._at(sequence).length

    def num_written(self, sequence: int) -> int:
        """How many of the first tokens have their keys and values: those found in the prefix cache or committed."""
        return self._at(sequence).written

    def block_table(self, sequence: int) -> list[int]:
        """Block ids of a sequence; token t lies in block `table[t // block_size]`."""
        return list(self._at(sequence).blocks)

    def slot_mapping(self, sequence: int, begin: int = 0, end: int | None = None) -> list[int]:
        """Slots `block * block_size + offset` of the tokens from `begin` to `end`, by default all of them."""
        table, size = self._at(sequence), self.block_size
        end = _check.integer("end", table.length if end is None else end, 0, table.length)
        begin = _check.integer("begin", begin, 0, end)
        return [table.blocks[t // size] * size + t % size for t in range(begin, end)]

    def snapshot(self) -> Snapshot:
        """All tables as they are now."""
        return Snapshot.of(self._tables, self._pool, self.block_size)

    def match(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's first tokens the prefix cache holds: whole blocks, and at most `len(prompt) - 1`.

        A prompt that is held wholly gives up its last block: what the last token gives rise to is wanted, so it has to
        be computed, and it must not be written into a block that others read.
        """
        return len(self._matching(token_ids(prompt))) * self.block_size

    def can_allocate(self, prompt: Sequence[int] | int) -> bool:
        """Whether `allocate` would succeed and leave the watermark's reserve free."""
        return self._new_table(prompt)[1] + self.reserved_blocks <= self.num_free_blocks

    def allocate(self, prompt: Sequence[int] | int) -> int:
        """A sequence with room for the whole prompt; returns its id. What the prefix cache holds is shared.

        `num_written` tells how many tokens that is. The watermark is `can_allocate`'s: this takes the last block too.
        """
        table, needed = self._new_table(prompt)
        self._require_free(needed)
        self._pool.share(table.blocks)
        table.blocks += self._pool.take(table.missing(0))
        return self._add(table)

    def attach(self, prompt: Sequence[int], num_cached: int | None = None) -> int:
        """A sequence of the first `num_cached` tokens of a prompt, from the prefix cache; by default of all it has.

        Takes no block that is not there; `append` adds the rest. Errors: ValueError for more tokens than `match` finds,
        or for a part of a block.
        """
        ids, size = token_ids(prompt), self.block_size
        found = self._matching(ids)
        cached = len(found) * size
        if num_cached is not None:
            cached = _check.integer("num_cached", num_cached, 0, cached)
        _check.require(cached % size == 0, "num_cached", num_cached, f"whole blocks of {size} tokens")
        blocks = found[: cached // size]
        self._pool.share(blocks)
        return self._add(BlockTable(size, cached, cached, blocks, ids[:cached]))

    def fork(self, sequence: int) -> int:
        """A second sequence of the same tokens in the same blocks; either copies a shared last block to go on."""
        table = self._at(sequence)
        self._pool.share(table.blocks)
        return self._add(table.copy())

    def append(self, sequence: int, tokens: Sequence[int] | int) -> Copies:
        """Room for more tokens; returns the copies `(source, destination)` to make before they are written."""
        return self.append_all({sequence: tokens})

    def append_all(self, tokens: Mapping[int, Sequence[int] | int]) -> Copies:
        """`append` for several sequences: for all of them or, with OutOfBlocks, for none.

        tokens: ids, or their number for a sequence that was made from a number. A last block that is shared and not
        full is copied for this sequence, in whole; no destination is a source.
        """
        added = {name: self._added(self._at(name), new) for name, new in tokens.items()}
        counts = [(self._tables[name], count) for name, (count, _) in added.items()]
        self._require_free(blocks_needed(counts, self._pool))
        copies = []
        for name, (count, ids) in added.items():
            table = self._tables[name]
            if table.writes_into_last(count):
                copies += self._own_last_block(table)
            table.blocks += self._pool.take(table.missing(count))
            table.length += count
            if ids is not None:
                table.ids += ids
        return copies

    def commit(self, sequence: int, length: int | None = None) -> None:
        """Keys and values of the first `length` tokens (all by default) are written: full blocks may be shared."""
        table = self._at(sequence)
        length = table.length if length is None else length
        table.written = _check.integer("length", length, table.written, table.length)
        if self.prefix_caching:
            for block, key in table.new_keys():
                self._pool.remember(block, key)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from `length` on. A block cut in two is still known whole, until it is written to."""
        table = self._at(sequence)
        self._pool.release(table.cut(_check.integer("length", length, 0, table.length)))

    def free(self, sequence: int) -> None:
        """Give a sequence up. Its committed blocks are found by their prefix until they are needed for others."""
        self._pool.release(self._at(sequence).blocks)
        del self._tables[sequence]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, as when the model has changed. Errors: ValueError while there are sequences."""
        _check.require(not self._tables, "sequences", self.sequences, "none: free them first")
        self._pool.forget_all()

    def _at(self, sequence: int) -> BlockTable:
        known = isinstance(sequence, Integral) and sequence in self._tables
        _check.require(known, "sequence", sequence, "a sequence that was allocated and not freed")
        return self._tables[sequence]

    def _add(self, table: BlockTable) -> int:
        name = next(self._names)
        self._tables[name] = table
        return name

    def _matching(self, ids: array) -> list[int]:
        return find_prefix(self._pool, ids, self.block_size) if self.prefix_caching else []

    def _new_table(self, prompt: Sequence[int] | int) -> tuple[BlockTable, int]:
        """A prompt's table with the blocks that are known so far, and how many free blocks it would use up."""
        ids = None if isinstance(prompt, Integral) else token_ids(prompt)
        length = _check.integer("prompt", prompt, 0) if ids is None else len(ids)
        found = [] if ids is None else self._matching(ids)
        table = BlockTable(self.block_size, length, len(found) * self.block_size, found, ids)
        return table, table.missing(0) + self._pool.free_among(found)

    def _added(self, table: BlockTable, tokens: Sequence[int] | int) -> tuple[int, array | None]:
        """The number of tokens to append, and their ids."""
        if isinstance(tokens, Integral):
            _check.require(table.ids is None, "tokens", tokens, "ids, since the sequence was made from ids")
            return _check.integer("tokens", tokens, 0), None
        _check.require(table.ids is not None, "tokens", tokens, "a number, since the sequence was made from one")
        ids = token_ids(tokens)
        return len(ids), ids

    def _require_free(self, needed: int) -> None:
        if needed > self.num_free_blocks:
            had = f"{self.num_free_blocks} of {self.num_blocks} are free"
            wanted = f"{self.block_size} tokens is" if needed == 1 else f"{self.block_size} tokens are"
            raise OutOfBlocks(f"{needed} more block{'s' * (needed != 1)} of {wanted} needed and {had}")

    def _own_last_block(self, table: BlockTable) -> Copies:
        """Make the last block of a sequence its own, so that it can be written to."""
        last = table.blocks[-1]
        if self._pool.references(last) == 1:
            self._pool.forget(last)
            return []
        (table.blocks[-1],) = self._pool.take(1)
        self._pool.release([last])
        return [(last, table.blocks[-1])]
