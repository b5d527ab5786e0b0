"""Blocks that are counted: who uses which, which are free, and which hold a prefix that is known already."""

from collections import OrderedDict
from collections.abc import Iterable

from labkit import _check


class OutOfBlocks(RuntimeError):
    """There are not enough free blocks. Raised before anything has changed."""


class BlockPool:
    """`num_blocks` block ids with reference counts and a prefix cache (Kwon et al., 2023, sections 4.3 and 4.4).

    A block is free when no sequence refers to it. A free block whose content has a key is still found by that key,
    until it is handed out again: blocks without a key go first, then the one that was used least recently.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = _check.integer("num_blocks", num_blocks, 1)
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free and unknown; block 0 is handed out first
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and known, least recently used first
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, known content or not."""
        return len(self._blank) + len(self._idle)

    @property
    def num_known(self) -> int:
        """Blocks in the prefix cache, in use or free."""
        return len(self._keys)

    def references(self, block: int) -> int:
        """How many sequences' tables hold this block."""
        return self._references[block]

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free: taking them lowers what is left for others."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, count: int) -> list[int]:
        """`count` blocks for one owner each; their old content is forgotten. Errors: OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks are needed and {self.num_free} of {self.num_blocks} are free")
        taken = [self._blank.pop() for _ in range(min(count, len(self._blank)))]
        while len(taken) < count:
            block, _ = self._idle.popitem(last=False)
            self.forget(block)
            taken.append(block)
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; free blocks of the prefix cache come back into use."""
        for block in blocks:
            self._references[block] += 1
            if self._references[block] == 1:
                del self._idle[block]

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each.

        They go from the last to the first, so that of a prefix its end is lost before its beginning: without the
        beginning the end could not be found.
        """
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def find(self, key: bytes) -> int | None:
        """The block whose content has this key."""
        return self._by_key.get(key)

    def remember(self, block: int, key: bytes) -> None:
        """Find this block, which is in use, by `key` from now on; where another holds the same, that one stays."""
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> None:
        """The content is about to change: nobody may find it any more."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._by_key[key]

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks in use stay in use."""
        self._blank.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._keys.clear()
