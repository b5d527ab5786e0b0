"""Exercise `block_allocator`: blocks of a paged cache handed out, shared, copied on write and taken back, none lost.

Kwon et al. 2023, PagedAttention, section 4.
"""

import random
from collections.abc import Callable

from labkit.exercises._ch03_block_account import Account
from labkit.exercises._exercise import Answer, Exercise, without_labkit

_SIGNATURE = "block_allocator: BlockAllocator(num_blocks, block_size), with allocate, append, fork and free"
_OWN = ("kv_cache/",)


def _account(answer: Answer, num_blocks: int, block_size: int) -> Account:
    return Account(answer(num_blocks, block_size), num_blocks, block_size)


def _test_one_sequence(answer: Answer) -> None:
    """A prompt of exactly one block, of one token less, and of one more; then token by token."""
    for tokens in (4, 3, 5):
        account = _account(answer, 4, 4)
        account.allocate(0, tokens)
        for _ in range(16 - tokens + 1):
            account.append(0)
        account.expect_whole()


def _test_refusals(answer: Answer) -> None:
    """What is refused changes nothing, and takes no block."""
    account = _account(answer, 4, 4)
    account.allocate(0, 8)
    for _ in range(3):
        account.allocate(1, 12)
    account.allocate(1, 8)
    for _ in range(3):
        account.append(1)
    account.release(0)
    account.append(1)
    account.expect_whole()


def _test_forks(answer: Answer) -> None:
    """Copy on write for either side, a fork at a full block, a parent that goes first, and no room for the copy."""
    for tokens, order in ((6, (0, 1)), (6, (1, 0)), (8, (0, 1)), (8, (1, 0))):
        account = _account(answer, 6, 4)
        account.allocate(0, tokens)
        account.fork(0, 1)
        account.fork(1, 2)
        for _ in range(3):
            account.append(order[0])
        account.release(order[0])
        account.append(order[1])
        account.append(2)
        account.expect_whole()
    account = _account(answer, 2, 4)
    account.allocate(0, 6)
    account.fork(0, 1)
    account.append(1)
    account.release(0)
    account.append(1)
    account.expect_whole()


def _random_operation(account: Account, rng: random.Random, number: int) -> None:
    live = list(account.tables)
    choices: list[Callable[[], None]] = [lambda: account.allocate(number, rng.randint(1, 3 * account.block_size))]
    if live:
        seq = rng.choice(live)
        choices += [lambda: account.append(seq)] * 4
        choices += [lambda: account.fork(seq, number), lambda: account.release(seq)]
    rng.choice(choices)()


def _test_random(answer: Answer) -> int:
    """How many operations ran, over pools of several sizes; each pool must be whole at the end."""
    operations = 150
    sizes = ((12, 4), (5, 1), (7, 3), (30, 16))
    for seed, (num_blocks, block_size) in enumerate(sizes):
        account, rng = _account(answer, num_blocks, block_size), random.Random(seed)
        for number in range(operations):
            _random_operation(account, rng, number)
        account.expect_whole()
    return operations * len(sizes)


def _test_all(answer: Answer) -> int:
    _test_one_sequence(answer)
    _test_refusals(answer)
    _test_forks(answer)
    return _test_random(answer)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    operations = without_labkit(lambda: _test_all(answer), _OWN)
    return f"after {operations} random operations, forks and refusals among them, no block is lost or owned twice"


BLOCK_ALLOCATOR = Exercise(
    name="block_allocator",
    chapter=3,
    task="Hand out the blocks of a paged cache and take them back: allocate, append, fork with copy on write, free. "
    "No block may be lost, and none owned twice.",
    signature=_SIGNATURE,
    hints=(
        "Keep a list of free blocks, and for each sequence its block table and its length. When does one more token "
        "need a new block? Look at a prompt that fills its last block exactly.",
        "A fork shares blocks, so count for each block how many tables it stands in. It is free again when that count "
        "comes to 0, and not when the first of them lets go. Copy the list, too: two sequences, two tables.",
        "append: if length % block_size == 0, add a free block; else if the count of the last block is above 1, lower "
        "it and put a free block in its place. Check that enough are free before you change anything.",
    ),
    test=_test,
)
