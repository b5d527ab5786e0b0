"""What the check of `block_allocator` knows of a learner's allocator: an account of its own, from what comes back.

The tables that the allocator returns say which blocks are owned, so a leak shows as a refusal while blocks must be
free, and a block owned twice as one block in two tables.
"""

from dataclasses import dataclass, field

from labkit.exercises._exercise import Failed, NotAttempted, expect

_REFUSED = object()


@dataclass
class Account:
    """A learner's allocator; of each sequence its block table, its length in tokens, and the very object that came back
    as its table; whether a call was refused since the last that was not."""

    pool: object
    num_blocks: int
    block_size: int
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    returned: dict[int, object] = field(default_factory=dict)
    refused: bool = False
    answered: bool = False

    @property
    def used(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    @property
    def free(self) -> int:
        return self.num_blocks - len(self.used)

    def state(self) -> str:
        """What the blocks are doing, for a message."""
        owned = "; ".join(f"sequence {s}: {self.lengths[s]} tokens in {self.tables[s]}" for s in self.tables)
        return f"before it: {self.num_blocks} blocks of {self.block_size}, {self.free} free ({owned or 'no sequence'})"

    def _call(self, name: str, *arguments: int) -> object:
        """What a method returns, `_REFUSED` for a MemoryError; any other error is a fault."""
        method = getattr(self.pool, name, None)
        expect(callable(method), f"BlockAllocator should have a method {name}")
        text = _written(name, arguments)
        try:
            return method(*arguments)
        except MemoryError:
            return _REFUSED
        except NotImplementedError:
            if self.answered:
                raise Failed(f"{text} is not written yet") from None
            raise NotAttempted from None
        except Exception as error:
            where = f"{text} raised {type(error).__name__}: {error}; {self.state()}"
            raise Failed(f"{where}. Too few free blocks are a MemoryError") from error

    def _table(self, name: str, *arguments: int, owner: int, needs: int) -> list[int] | None:
        """The block table of `owner` that a call returns, in form; None where it refused, rightly."""
        value, text = self._call(name, *arguments), _written(name, arguments)
        taking = f"takes {needs} new of {self.free} free blocks"
        if value is _REFUSED:
            why = "are blocks lost when a sequence is freed, refused or copied?"
            expect(needs > self.free, f"{text} raised MemoryError, and {taking}; {self.state()}: {why}")
            self.refused = True
            return None
        if value is None or value is Ellipsis:
            if not self.answered:
                raise NotAttempted
            raise Failed(f"{text} returned nothing: return the block table of the sequence")
        self.answered = True
        why = ". A call that is refused changes nothing, the length neither" if self.refused else ""
        expect(needs <= self.free, f"{text} {taking}: raise a MemoryError; {self.state()}{why}")
        table = self._in_form(text, value)
        for other, kept in self.returned.items():
            whole = other == owner or list(kept) == self.tables[other]
            expect(whole, f"{text} changed the table of sequence {other} too: are the two tables one list?")
        self.returned[owner], self.refused = value, False
        return table

    def _in_form(self, text: str, value: object) -> list[int]:
        """A list of blocks that there are, each once."""
        listed = isinstance(value, list | tuple) and all(type(block) is int for block in value)
        expect(listed, f"{text} should return the block table, a list of block numbers; got {value!r:.80}")
        table, told = list(value), f"{text} returned {list(value)}"
        real = all(0 <= block < self.num_blocks for block in table)
        expect(real, f"{told}: the blocks are 0 to {self.num_blocks - 1}")
        expect(len(set(table)) == len(table), f"{told}: one block stands in the table twice; {self.state()}")
        return table

    def _expect_unowned(self, text: str, blocks: list[int]) -> None:
        taken = sorted(set(blocks) & self.used)
        expect(not taken, f"{text} gave out block {taken}, which a sequence still owns; {self.state()}")

    def allocate(self, seq: int, tokens: int) -> None:
        """As many new blocks as the tokens need."""
        needs, text = -(-tokens // self.block_size), f"allocate({seq}, {tokens})"
        table = self._table("allocate", seq, tokens, owner=seq, needs=needs)
        if table is None:
            return
        blocks = f"{needs} block{'s' * (needs > 1)} of {self.block_size}"
        expect(len(table) == needs, f"{text}: {tokens} tokens take {blocks}; yours takes {len(table)}")
        self._expect_unowned(text, table)
        self.tables[seq], self.lengths[seq] = table, tokens

    def append(self, seq: int) -> None:
        """A full last block is followed by a new one; a shared one with room left is replaced by a copy of its own."""
        old = self.tables[seq]
        full = self.lengths[seq] % self.block_size == 0
        shared = not full and any(old[-1] in table for other, table in self.tables.items() if other != seq)
        table = self._table("append", seq, owner=seq, needs=int(full or shared))
        if table is None:
            return
        told = f"append({seq}) turned {old} into {table}; {self.state()}"
        why = "the last block is full, so a new one follows" if full else "the last block has room: no new one follows"
        expect(len(table) == len(old) + full, f"{told}: {why}")
        kept = old if full else old[:-1]
        expect(table[: len(kept)] == kept, f"{told}: the blocks before stay where they are, and in order")
        if shared:
            other = "copy on write: the last block is shared, so this sequence needs one of its own to write to"
            expect(table[-1] != old[-1], f"{told}: {other}")
        if full or shared:
            self._expect_unowned(f"append({seq})", table[-1:])
        else:
            alone = "the last block has room and is this sequence's alone, so nothing changes"
            expect(table == old, f"{told}: {alone}: is its count lowered when another sequence copies or frees it?")
        self.tables[seq], self.lengths[seq] = table, self.lengths[seq] + 1

    def fork(self, seq: int, new: int) -> None:
        """The new sequence has the same blocks, and none is taken."""
        table = self._table("fork", seq, new, owner=new, needs=0)
        same = f"fork({seq}, {new}) returned {table}; the two share all blocks at first; {self.state()}"
        expect(table == self.tables[seq], same)
        self.tables[new], self.lengths[new] = table, self.lengths[seq]

    def release(self, seq: int) -> None:
        """`free` of the learner's allocator."""
        refused = self._call("free", seq) is _REFUSED
        expect(not refused, f"free({seq}) raised MemoryError; {self.state()}")
        del self.tables[seq], self.lengths[seq], self.returned[seq]

    def expect_whole(self) -> None:
        """All sequences go, and one takes every block: not one is lost, and there is not one more."""
        for seq in list(self.tables):
            self.release(seq)
        self.allocate(-1, self.num_blocks * self.block_size)
        self.append(-1)
        self.release(-1)


def _written(name: str, arguments: tuple[int, ...]) -> str:
    return f"{name}({', '.join(map(str, arguments))})"
