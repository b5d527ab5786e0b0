"""Block tables against what a paged memory must hold: every sequence its own tokens, every block one purpose."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.kv_cache.blocks import BlockManager, OutOfBlocks

SIZE = 4


def manager(num_blocks: int = 8, block_size: int = SIZE, **options) -> BlockManager:
    return BlockManager(num_blocks, block_size, **options)


def computed(blocks: BlockManager, prompt) -> int:
    """A sequence whose keys and values are all written."""
    sequence = blocks.allocate(prompt)
    blocks.commit(sequence)
    return sequence


def state(blocks: BlockManager) -> tuple:
    written = {name: blocks.num_written(name) for name in blocks.sequences}
    return blocks.snapshot(), blocks.num_free_blocks, blocks.num_cached_blocks, written


class Memory:
    """What the owner of the tensors does, with each slot holding the whole prefix that its key and value stand for."""

    def __init__(self, block_size: int) -> None:
        self.block_size, self.slots = block_size, {}

    def copy(self, copies) -> None:
        read = {}
        for source, destination in copies:
            for offset in range(self.block_size):
                slot = destination * self.block_size + offset
                read[slot] = self.slots.get(source * self.block_size + offset)
        self.slots |= read

    def write(self, blocks: BlockManager, sequence: int, tokens) -> None:
        begin = blocks.num_written(sequence)
        for t, slot in enumerate(blocks.slot_mapping(sequence, begin), begin):
            self.slots[slot] = tuple(tokens[: t + 1])

    def read(self, blocks: BlockManager, sequence: int) -> list:
        return [self.slots.get(slot) for slot in blocks.slot_mapping(sequence, 0, blocks.num_written(sequence))]


few_tokens = st.lists(st.integers(0, 1), max_size=9)
pick = st.integers(0, 10**6)


class PagedMemory(RuleBasedStateMachine):
    """Random work on a small pool; the invariants hold after each step."""

    @initialize(num_blocks=st.integers(1, 7), block_size=st.integers(1, 4), prefix_caching=st.booleans())
    def make(self, num_blocks, block_size, prefix_caching):
        self.blocks = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self.memory, self.tokens, self.numbers = Memory(block_size), {}, {}

    def some(self, number: int) -> int:
        return list(self.tokens)[number % len(self.tokens)]

    def attempt(self, do, may_fail: bool | None = None):
        """Run `do`; if it finds too few blocks, all is as it was. `may_fail`: whether it must, where that is known."""
        before = state(self.blocks)
        try:
            result = do()
        except OutOfBlocks:
            assert state(self.blocks) == before
            assert may_fail is not False, "there were enough blocks"
            return None
        assert may_fail is not True, "there were too few blocks"
        return result

    def blocks_of(self, length: int) -> int:
        return -(-length // self.blocks.block_size)

    @rule(prompt=few_tokens, write=st.booleans())
    def allocate(self, prompt, write):
        found = self.blocks.match(prompt)
        assert found % self.blocks.block_size == 0 and found <= max(0, len(prompt) - 1)
        sequence = self.attempt(lambda: self.blocks.allocate(prompt), not self.blocks.can_allocate(prompt))
        fits = self.blocks_of(len(prompt)) - found // self.blocks.block_size <= self.blocks.num_free_blocks
        assert sequence is not None or not fits or found, "without a prefix, only the blocks count"
        if sequence is not None:
            assert self.blocks.num_written(sequence) == found
            self.tokens[sequence] = list(prompt)
            if write:
                self.write(sequence)

    @rule(prompt=few_tokens, whole=st.booleans())
    def attach(self, prompt, whole):
        cached = self.blocks.match(prompt) if whole else 0
        sequence = self.blocks.attach(prompt, cached)
        self.tokens[sequence] = list(prompt[:cached])

    @rule(length=st.integers(0, 9))
    def allocate_number(self, length):
        fails = self.blocks_of(length) > self.blocks.num_free_blocks
        sequence = self.attempt(lambda: self.blocks.allocate(length), fails)
        if sequence is not None:
            self.numbers[sequence] = length

    @precondition(lambda self: self.numbers)
    @rule(number=pick, count=st.integers(0, 5), free=st.booleans())
    def go_on_by_number(self, number, count, free):
        sequence = list(self.numbers)[number % len(self.numbers)]
        if free:
            self.blocks.free(sequence)
            del self.numbers[sequence]
        elif self.attempt(lambda: self.blocks.append(sequence, count)) is not None:
            self.numbers[sequence] += count

    @precondition(lambda self: self.tokens)
    @rule(number=pick, new=few_tokens, write=st.booleans())
    def append(self, number, new, write):
        sequence = self.some(number)
        length, table = len(self.tokens[sequence]), self.blocks.block_table(sequence)
        needed = self.blocks_of(length + len(new)) - len(table)
        if new and length % self.blocks.block_size:
            needed += self.blocks.references(table[-1]) > 1
        copies = self.attempt(lambda: self.blocks.append(sequence, new), needed > self.blocks.num_free_blocks)
        if copies is not None:
            self.memory.copy(copies)
            self.tokens[sequence] += new
            if write:
                self.write(sequence)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append_to_several(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True))
        new = {name: data.draw(few_tokens) for name in names}
        fails, one_by_one = False, copy.deepcopy(self.blocks)
        try:
            for name, tokens in new.items():
                one_by_one.append(name, tokens)
        except OutOfBlocks:
            fails = True
        copies = self.attempt(lambda: self.blocks.append_all(new), fails)
        if copies is not None:
            assert not {source for source, _ in copies} & {destination for _, destination in copies}
            self.memory.copy(copies)
            for name, tokens in new.items():
                self.tokens[name] += tokens

    @precondition(lambda self: self.tokens)
    @rule(number=pick)
    def compute(self, number):
        self.write(self.some(number))

    def write(self, sequence):
        self.memory.write(self.blocks, sequence, self.tokens[sequence])
        self.blocks.commit(sequence)

    @precondition(lambda self: self.tokens)
    @rule(number=pick)
    def fork(self, number):
        sequence = self.some(number)
        self.tokens[self.blocks.fork(sequence)] = list(self.tokens[sequence])

    @precondition(lambda self: self.tokens)
    @rule(number=pick, share=st.floats(0, 1))
    def truncate(self, number, share):
        sequence = self.some(number)
        length = int(share * len(self.tokens[sequence]))
        self.blocks.truncate(sequence, length)
        del self.tokens[sequence][length:]

    @precondition(lambda self: self.tokens)
    @rule(number=pick)
    def free(self, number):
        sequence = self.some(number)
        self.blocks.free(sequence)
        del self.tokens[sequence]

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for sequence, tokens in self.tokens.items():
            assert self.blocks.num_tokens(sequence) == len(tokens)
            held = self.memory.read(self.blocks, sequence)
            assert held == [tuple(tokens[: t + 1]) for t in range(self.blocks.num_written(sequence))]

    @invariant()
    def blocks_are_counted(self):
        tables = [self.blocks.block_table(name) for name in self.blocks.sequences]
        assert set(self.blocks.sequences) == {*self.tokens, *self.numbers}
        assert all(len(set(table)) == len(table) for table in tables)
        owners = [sum(block in table for table in tables) for block in range(self.blocks.num_blocks)]
        assert owners == [self.blocks.references(block) for block in range(self.blocks.num_blocks)]
        used = sum(number > 0 for number in owners)
        assert self.blocks.num_used_blocks == used and self.blocks.num_free_blocks == self.blocks.num_blocks - used
        slots = {slot for name in self.blocks.sequences for slot in self.blocks.slot_mapping(name)}
        assert self.blocks.tokens_held == len(slots)
        for name, table in zip(self.blocks.sequences, tables, strict=True):
            assert len(table) == self.blocks_of(self.blocks.num_tokens(name))

    def teardown(self):
        if hasattr(self, "blocks"):  # all of it can be had again, each block once
            for name in self.blocks.sequences:
                self.blocks.free(name)
            whole = self.blocks.allocate(self.blocks.num_blocks * self.blocks.block_size)
            assert sorted(self.blocks.block_table(whole)) == list(range(self.blocks.num_blocks))


PagedMemory.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPagedMemory = PagedMemory.TestCase


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_a_prompt_that_is_known_leaves_its_last_token_to_compute(length, found):
    blocks = manager()
    first = computed(blocks, range(9))
    second = blocks.allocate(range(length))
    assert blocks.num_written(second) == blocks.match(range(length)) == found
    ours, theirs = blocks.block_table(second), blocks.block_table(first)
    assert ours[: found // SIZE] == theirs[: found // SIZE]
    # What is still to be written is nobody else's.
    assert all(blocks.references(slot // SIZE) == 1 for slot in blocks.slot_mapping(second, found))


def test_a_block_that_is_not_written_yet_is_not_shared():
    blocks = manager()
    first = blocks.allocate(range(8))
    assert blocks.match(range(9)) == 0
    blocks.commit(first, 7)
    assert blocks.match(range(9)) == 4
    blocks.commit(first)
    assert blocks.match(range(9)) == 8


def test_the_same_ids_after_another_prefix_are_another_block():
    blocks = manager()
    computed(blocks, [1, 1, 1, 1, 5, 5, 5, 5])
    assert blocks.match([2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0
    assert blocks.match([5, 5, 5, 5, 0]) == 0
    assert blocks.match([1, 1, 1, 1, 5, 5, 5, 6, 0]) == 4


def test_a_fork_that_is_written_to_copies_the_last_block_once():
    blocks = manager()
    parent = computed(blocks, range(6))
    child = blocks.fork(parent)
    assert blocks.block_table(child) == blocks.block_table(parent) and blocks.num_used_blocks == 2
    shared = blocks.block_table(parent)[1]
    ((source, destination),) = blocks.append(child, [9])
    assert source == shared and blocks.block_table(child) == [blocks.block_table(parent)[0], destination]
    assert blocks.append(parent, [7]) == [] and blocks.block_table(parent)[1] == shared
    assert blocks.num_used_blocks == 3


def test_forks_of_a_full_block_copy_nothing():
    blocks = manager()
    parent = computed(blocks, range(8))
    child = blocks.fork(parent)
    assert blocks.append_all({parent: [1], child: [2]}) == []
    assert blocks.block_table(parent)[:2] == blocks.block_table(child)[:2]
    assert blocks.block_table(parent)[2] != blocks.block_table(child)[2]


def test_forks_that_go_on_together_need_one_copy_less_than_they_are():
    blocks = manager(num_blocks=4)
    parent = computed(blocks, range(6))
    family = [parent, blocks.fork(parent), blocks.fork(parent)]
    copies = blocks.append_all({name: [name] for name in family})
    assert len(copies) == 2 and blocks.num_free_blocks == 0


def test_a_cropped_block_that_is_written_to_is_found_no_more():
    blocks = manager()
    sequence = computed(blocks, range(8))
    blocks.truncate(sequence, 6)
    assert blocks.match(range(9)) == 8  # what was written lies there still
    blocks.append(sequence, [0])
    assert blocks.match(range(9)) == 4
    blocks.append(sequence, [0])
    blocks.commit(sequence)
    assert blocks.match([0, 1, 2, 3, 4, 5, 0, 0, 0]) == 8 and blocks.match(range(9)) == 4


def test_a_cropped_block_that_another_sequence_reads_is_copied():
    blocks = manager()
    first = computed(blocks, range(8))
    second = blocks.attach([*range(8), 0])
    blocks.truncate(second, 6)
    last = blocks.block_table(first)[1]
    assert [source for source, _ in blocks.append(second, [0])] == [last]
    assert blocks.block_table(first)[1] == last and blocks.match(range(9)) == 8


def test_freed_blocks_are_found_until_the_least_recently_used_goes():
    blocks = manager(num_blocks=3)
    for prompt in ([1] * SIZE, [2] * SIZE, [3] * SIZE):
        blocks.free(computed(blocks, prompt))
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (3, 3)
    blocks.free(blocks.attach([1] * SIZE + [0]))  # used again: now the second is the oldest
    blocks.allocate(1)
    assert [blocks.match([id] * SIZE + [0]) for id in (1, 2, 3)] == [SIZE, 0, SIZE]


def test_of_a_prefix_the_end_is_lost_first():
    blocks = manager(num_blocks=3)
    blocks.free(computed(blocks, range(12)))
    blocks.allocate(SIZE)
    assert blocks.match(range(13)) == 8


def test_unknown_blocks_go_before_known_ones():
    blocks = manager(num_blocks=3)
    blocks.free(computed(blocks, range(4)))
    blocks.free(blocks.allocate(8))
    blocks.allocate(8)
    assert blocks.match(range(5)) == 4


def test_a_prefix_in_use_costs_less_than_one_that_is_free():
    blocks = manager(num_blocks=3)
    first = computed(blocks, range(8))
    assert blocks.can_allocate(range(12))
    blocks.allocate(4)
    assert not blocks.can_allocate(range(12))
    blocks.free(first)
    assert blocks.num_free_blocks == 2
    assert not blocks.can_allocate(range(12))  # two of its three blocks are known, but they are the two that are free


@pytest.mark.parametrize(("watermark", "reserve"), [(0.0, 0), (0.01, 1), (0.25, 2), (3, 3), (1.0, 8), (1, 1)])
def test_the_watermark_is_kept_for_those_that_run(watermark, reserve):
    blocks = manager(watermark=watermark)
    assert blocks.reserved_blocks == reserve
    most = (blocks.num_blocks - reserve) * SIZE
    assert blocks.can_allocate(most) and not blocks.can_allocate(most + 1)
    sequence = blocks.allocate(most)
    assert blocks.append(sequence, reserve * SIZE) == [] and blocks.num_free_blocks == 0


def test_running_out_changes_nothing():
    blocks = manager(num_blocks=4)
    first = computed(blocks, range(6))
    second = blocks.fork(first)
    before = state(blocks)
    for refused in (
        lambda: blocks.allocate(9),
        lambda: blocks.allocate(range(4, 13)),
        lambda: blocks.append(first, range(9)),
        lambda: blocks.append_all({first: [1, 2, 3], second: [1, 2, 3]}),
    ):
        with pytest.raises(OutOfBlocks, match="are needed and 2 of 4 are free"):
            refused()
        assert state(blocks) == before


def test_without_prefix_caching_nothing_is_found():
    blocks = manager(prefix_caching=False)
    computed(blocks, range(8))
    assert blocks.match(range(9)) == blocks.num_cached_blocks == 0


def test_forgetting_prefixes_gives_the_blocks_back():
    blocks = manager()
    sequence = computed(blocks, range(8))
    with pytest.raises(ValueError, match="sequences: got .*; takes none"):
        blocks.forget_prefixes()
    blocks.free(sequence)
    blocks.forget_prefixes()
    assert blocks.match(range(9)) == blocks.num_cached_blocks == 0
    assert sorted(blocks.block_table(blocks.allocate(32))) == list(range(8))


def test_waste_counts_a_shared_slot_once():
    blocks = manager()
    assert (blocks.utilization, blocks.waste) == (1.0, 0.0)
    parent = computed(blocks, range(6))
    child = blocks.fork(parent)
    assert (blocks.tokens_held, blocks.slots_allocated, blocks.waste) == (6, 8, 0.25)
    blocks.truncate(child, 4)
    assert (blocks.tokens_held, blocks.slots_allocated) == (6, 8)
    blocks.append(child, [1])
    assert (blocks.tokens_held, blocks.slots_allocated) == (7, 12)


def test_a_snapshot_shows_tables_fill_and_sharing():
    blocks = manager()
    first = computed(blocks, range(8))
    second = blocks.allocate([*range(8), 8])
    shown = blocks.snapshot()
    shared = blocks.block_table(first)
    assert shown.tables == {first: tuple(shared), second: (*shared, blocks.block_table(second)[2])}
    assert shown.last_fill == {first: 4, second: 1} and shown.shared == frozenset(shared)
    assert len(shown.used) == 3 and (shown.block_size, shown.num_blocks) == (SIZE, 8)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda: BlockManager(0, 4), "num_blocks: got 0"),
        (lambda: BlockManager(4, 0), "block_size: got 0"),
        (lambda: BlockManager(4, 4, watermark=5), "watermark: got 5"),
        (lambda: BlockManager(4, 4, watermark=1.5), "watermark: got 1.5"),
        (lambda: BlockManager(4, 4, prefix_caching=1), "prefix_caching: got 1"),
        (lambda: manager().allocate(-1), "prompt: got -1"),
        (lambda: manager().allocate(["a"]), "tokens: got"),
        (lambda: manager().allocate([2**63]), "tokens: got"),
        (lambda: manager().free(0), "sequence: got 0"),
        (lambda: manager().attach(range(9), 4), "num_cached: got 4"),
        (lambda: manager().append(5, [1]), "sequence: got 5"),
    ],
)
def test_wrong_arguments_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        wrong()


def test_wrong_use_of_a_sequence_is_named():
    blocks = manager()
    by_ids, by_number = computed(blocks, range(8)), blocks.allocate(5)
    for wrong, named in [
        (lambda: blocks.append(by_ids, 1), "tokens: got 1; takes ids"),
        (lambda: blocks.append(by_number, [1]), "tokens: got .*; takes a number"),
        (lambda: blocks.append_all({by_number: 1, by_ids: 1}), "tokens: got 1"),
        (lambda: blocks.truncate(by_ids, 9), "length: got 9"),
        (lambda: blocks.commit(by_ids, 7), "length: got 7"),
        (lambda: blocks.slot_mapping(by_ids, 3, 9), "end: got 9"),
        (lambda: blocks.slot_mapping(by_ids, 3, 2), "begin: got 3"),
        (lambda: blocks.attach(range(9), 3), "num_cached: got 3"),
        (lambda: blocks.references(8), "block: got 8"),
    ]:
        with pytest.raises(ValueError, match=named):
            wrong()
    assert blocks.num_tokens(by_number) == 5
