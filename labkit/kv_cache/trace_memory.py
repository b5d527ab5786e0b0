"""Three ways to give requests memory: blocks as they grow, the longest text for each, or its prompt and the most it may
add. What they share is what a server's loop asks of them."""

from typing import Protocol

from labkit import _check
from labkit.kv_cache.blocks import BlockManager


class Memory(Protocol):
    """`tokens_held` of `slots_allocated`; a request is admitted, grows, and is released by its handle."""

    @property
    def tokens_held(self) -> int: ...

    @property
    def slots_allocated(self) -> int: ...

    def check(self, prompt: int, new: int) -> None:
        """Refuse a request that could not be finished if it were alone."""

    def can_admit(self, request: int, prompt: int, done: int) -> bool: ...

    def admit(self, request: int, prompt: int, done: int) -> int:
        """A handle for a request with `done` new tokens already, which it had before it was preempted."""

    def grow(self, handle: int, count: int) -> None:
        """`count` tokens more. Errors: OutOfBlocks, with nothing changed."""

    def release(self, handle: int) -> None: ...


class PagedMemory:
    """A `BlockManager`. With `shared_prefix` every prompt begins with that many tokens that all have in common."""

    def __init__(self, num_blocks: int, block_size: int, watermark: float | int, shared_prefix: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, watermark=watermark)
        self.shared_prefix = _check.integer("shared_prefix", shared_prefix, 0)

    @property
    def tokens_held(self) -> int:
        return self.manager.tokens_held

    @property
    def slots_allocated(self) -> int:
        return self.manager.slots_allocated

    def check(self, prompt: int, new: int) -> None:
        needed = -(-(prompt + new) // self.manager.block_size) + self.manager.reserved_blocks
        takes = f"at least {needed}, for a request of {prompt} and {new} tokens and the watermark"
        _check.require(needed <= self.manager.num_blocks, "num_blocks", self.manager.num_blocks, takes)

    def _prompt(self, request: int, length: int) -> int | list[int]:
        """Token ids that no other request has but for the shared prefix; only their number where none is shared."""
        if not self.shared_prefix:
            return length
        shared = min(length, self.shared_prefix)
        return [*range(shared), *range((request + 1) << 32, ((request + 1) << 32) + length - shared)]

    def can_admit(self, request: int, prompt: int, done: int) -> bool:
        return self.manager.can_allocate(self._prompt(request, prompt + done))

    def admit(self, request: int, prompt: int, done: int) -> int:
        sequence = self.manager.allocate(self._prompt(request, prompt + done))
        self.manager.commit(sequence)
        return sequence

    def grow(self, handle: int, count: int) -> None:
        # What it says nobody else says: any ids do that are no prompt's.
        self.manager.append(handle, [-1 - handle] * count if self.shared_prefix else count)

    def release(self, handle: int) -> None:
        self.manager.free(handle)


class ReservedMemory:
    """One piece for each request, as long as it could become; pieces fit without gaps, which flatters it.

    A piece is of `max_length` slots or, with `max_new`, of the prompt's length and `max_new` more.
    """

    def __init__(self, slots: int, max_length: int, max_new: int | None) -> None:
        self.slots = _check.integer("slots", slots, 1)
        self.max_length = _check.integer("max_length", max_length, 1)
        self.max_new = None if max_new is None else _check.integer("max_new", max_new, 1)
        self.tokens_held = self.slots_allocated = 0
        self._pieces: list[tuple[int, int]] = []  # slots and tokens, by handle

    def _size(self, prompt: int) -> int:
        return self.max_length if self.max_new is None else min(self.max_length, prompt + self.max_new)

    def check(self, prompt: int, new: int) -> None:
        takes = f"at least {prompt + new}, for a request of {prompt} and {new} tokens"
        _check.require(prompt + new <= self.max_length, "max_length", self.max_length, takes)
        _check.require(self.max_new is None or new <= self.max_new, "max_new", self.max_new, f"at least {new}")
        size = self._size(prompt)
        _check.require(size <= self.slots, "num_blocks", f"{self.slots} slots", f"at least {size} slots")

    def can_admit(self, request: int, prompt: int, done: int) -> bool:
        return self.slots_allocated + self._size(prompt) <= self.slots

    def admit(self, request: int, prompt: int, done: int) -> int:
        self._pieces.append((self._size(prompt), prompt + done))
        self.slots_allocated += self._size(prompt)
        self.tokens_held += prompt + done
        return len(self._pieces) - 1

    def grow(self, handle: int, count: int) -> None:
        size, tokens = self._pieces[handle]
        self._pieces[handle] = size, tokens + count
        self.tokens_held += count

    def release(self, handle: int) -> None:
        size, tokens = self._pieces[handle]
        self.slots_allocated -= size
        self.tokens_held -= tokens
