"""Exercise `tiled_attention`: attention over blocks of keys, the last one ragged, causal, with no row of scores whole.

Dao et al. 2022, FlashAttention, Algorithm 1; the causal mask is aligned to the end, as FlashAttention 2.1 has it.
"""

import math

import torch
from torch import Tensor

from labkit.exercises._ch04_reference import attention, close, visible
from labkit.exercises._exercise import Answer, Exercise, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal
from labkit.exercises._watch import Seen, watched, without_fused_attention

_SIGNATURE = "tiled_attention(query, key, value, block_size, causal) -> output"
_OWN = ("attention/", "kernels/", "kv_cache/")
_BATCH, _HEADS, _HEAD_DIM = 2, 3, 8
# q_len, kv_len, block_size: whole blocks, ragged ends, primes, one query, one block, blocks of one key, more queries.
_SHAPES = (
    (16, 16, 8), (13, 13, 4), (7, 19, 5), (1, 17, 4), (11, 23, 23), (5, 11, 64), (3, 7, 1), (19, 7, 3), (31, 29, 2),
)  # fmt: skip


def _inputs(
    q_len: int, kv_len: int, scale: float = 1.0, batch: int = _BATCH, heads: int = _HEADS
) -> tuple[Tensor, ...]:
    """query (batch, heads, q_len, head_dim), key and value (batch, heads, kv_len, head_dim), float32. A scale below
    zero makes every score negative."""
    lengths = (q_len, kv_len, kv_len)
    query, key, value = (normal(i, batch, heads, n, _HEAD_DIM) for i, n in enumerate(lengths))
    return (scale * query, key, value) if scale > 0 else (scale * query.abs(), key.abs(), value)


def _run(answer: Answer, inputs: tuple[Tensor, ...], block_size: int, causal: bool, where: str) -> tuple[Tensor, Seen]:
    given = tuple(t.clone() for t in inputs)
    value, seen = without_labkit(lambda: watched(answer, *given, block_size, causal), _OWN)
    without_fused_attention(seen)
    kept = all(torch.equal(*pair) for pair in zip(given, inputs, strict=True))
    expect(kept, "query, key and value should stay as they are")
    return as_tensor(value, tuple(inputs[0].shape), f"the output for {where}"), seen


def _why(inputs: tuple[Tensor, ...], output: Tensor, block_size: int, causal: bool) -> str:
    """The usual mistake that gives this output."""
    query, key, value = inputs
    q_len, kv_len = query.shape[2], key.shape[2]
    seen, padding = visible(q_len, kv_len, causal), -kv_len % block_size
    whole, ones = kv_len - kv_len % block_size, torch.ones(q_len, kv_len, dtype=torch.bool)
    padded = [torch.nn.functional.pad(t, (0, 0, 0, padding)) for t in (key, value)]
    more = torch.cat([seen, torch.ones(q_len, padding, dtype=torch.bool)], -1)
    first = ones.clone()
    first[:, block_size:] = False
    last = ones.clone()
    last[:, : (kv_len - 1) // block_size * block_size] = False
    of_the_mask = {"the causal mask was laid where none was asked for": attention(*inputs, visible(q_len, kv_len))}
    if causal:
        of_the_mask = {
            "a query sees the keys after it": attention(*inputs, ones),
            "the causal mask is laid at the start: the last query stands at the last key": attention(
                *inputs, ones.tril()
            ),
            "a query does not see its own key": attention(*inputs, seen.tril(kv_len - q_len - 1)),
        }
    mistakes = of_the_mask | {
        "the scores are divided by sqrt(head_dim)": attention(*inputs, seen, 1.0),
        "the keys after the last whole block were left out": attention(
            query, key[:, :, :whole], value[:, :, :whole], seen[:, :whole]
        ),
        "the keys that fill up the last block are no keys: a score of 0 has a weight too": attention(
            query, *padded, more
        ),
        "the last block alone came through": attention(*inputs, seen & last),
        "the first block alone came through": attention(*inputs, seen & first),
    }
    return next((f": {text}" for text, wrong in mistakes.items() if close(output, wrong, 1e-4)), "")


def _test_shape(answer: Answer, q_len: int, kv_len: int, block_size: int, causal: bool, scale: float = 1.0) -> None:
    inputs = _inputs(q_len, kv_len, scale)
    words = f"{'causal, ' if causal else ''}{q_len} queries and {kv_len} keys in blocks of {block_size}"
    large = {1.0: "", 60.0: ", with scores in the hundreds"}.get(scale, ", with scores in the hundreds below zero")
    empty = ", where the first queries see no key and get zeros" if causal and q_len > kv_len else ""
    output, _ = _run(answer, inputs, block_size, causal, words + large + empty)
    seen = visible(q_len, kv_len, causal)
    blind = output[:, :, ~seen.any(-1)]
    expect(not blind.any(), f"{words}: the queries that see no key should get zeros")
    right = close(output, attention(*inputs, seen))
    told = f"{words}{large}: the output is not attention's"
    expect(right, told + ("" if right else _why(inputs, output, block_size, causal)))


def _test_memory(answer: Answer, causal: bool) -> float:
    """Elements that lived at the peak, as a share of the matrix of scores."""
    q_len, kv_len, block_size = 257, 389, 16
    output, seen = _run(answer, _inputs(q_len, kv_len, batch=1, heads=1), block_size, causal, "a long sequence")
    matrix = q_len * kv_len
    told = f"with {q_len} queries and {kv_len} keys in blocks of {block_size}"
    wide = [shape for shape in seen.shapes if kv_len in shape and _HEAD_DIM not in shape]
    widest = max(wide, key=lambda shape: (math.prod(shape), len(shape)), default=())
    expect(not wide, f"{told}, a tensor of {widest} was made: hold the scores of one block, not of all keys")
    share = seen.peak / matrix
    why = "a mask of that size counts, and so do tiles that are kept"
    expect(share < 0.5, f"{told}, your tensors hold {share:.0%} of a matrix of {q_len} x {kv_len} at once: {why}")
    right = close(output, attention(*_inputs(q_len, kv_len, batch=1, heads=1), visible(q_len, kv_len, causal)))
    expect(right, f"{told}, the output is not attention's")
    return share


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    for causal in (False, True):
        for shape in _SHAPES:
            _test_shape(answer, *shape, causal)
    for causal in (False, True):
        _test_shape(answer, 17, 29, 6, causal, scale=60.0)
        _test_shape(answer, 17, 29, 6, causal, scale=-120.0)
    share = max(_test_memory(answer, causal) for causal in (False, True))
    return f"any length, causal or not; at the peak your tensors hold {share:.0%} of what the scores would"


TILED_ATTENTION = Exercise(
    name="tiled_attention",
    chapter=4,
    task="Attention over blocks of keys: any length, causal or not, and never the scores of more than one block.",
    signature=_SIGNATURE,
    hints=(
        "Slicing past the end gives what is left, so a ragged block needs no padding. Which query sees which key, if "
        "the last query stands at the last key?",
        "For each block: scores, mask, then the step of the online softmax. Query i sees key j where "
        "j <= i + kv_len - q_len; a query that has seen nothing so far has the maximum -inf.",
        "rows = torch.arange(q_len)[:, None] + kv_len - q_len; columns = torch.arange(start, stop); "
        "scores.masked_fill(columns > rows, -inf). At the end weighted / total, where total > 0, and 0 elsewhere.",
    ),
    test=_test,
)
