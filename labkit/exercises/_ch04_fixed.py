"""Exercise `fixed_flash_attention`: tiled attention that is right for one head, one block, one prompt and no padding.

The form with the faults, as the notebook shows it:

    def flash_attention(query, key, value, padding_mask=None, block_size=16):
        groups, q_len, kv_len = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
        maximum = torch.full((*query.shape[:3], 1), float("-inf"))
        total, output = torch.zeros_like(maximum), torch.zeros_like(query)
        for start in range(0, kv_len, block_size):
            block = slice(start, start + block_size)
            scores = query @ key[:, :, block].mT / query.shape[-1] ** 0.5
            columns = torch.arange(kv_len)[block]
            scores = scores.masked_fill(columns > torch.arange(q_len)[:, None], float("-inf"))
            if padding_mask is not None:
                scores = scores.masked_fill(~padding_mask[:, None, None, block], float("-inf"))
            new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            weights = (scores - new).exp()
            total = total * (maximum - new).exp() + weights.sum(-1, keepdim=True)
            output = output + weights @ value[:, :, block]
            maximum = new
        return output / total

The heads of K and V are repeated in the wrong order, the causal mask is laid at the start, what was summed is not
rescaled with its sum when the maximum moves, and a row that is masked for a whole block turns into NaN.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit.exercises._ch04_reference import attention, close, visible
from labkit.exercises._exercise import Answer, Exercise, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal
from labkit.exercises._watch import watched, without_fused_attention

_SIGNATURE = "fixed_flash_attention(query, key, value, padding_mask=None, block_size=16) -> output"
_OWN = ("attention/", "kernels/", "kv_cache/")
_BATCH, _HEAD_DIM = 2, 8


@dataclass(frozen=True)
class _Case:
    """Causal attention: query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, kv_len, head_dim);
    padding_mask (batch, kv_len), False where a token is padding."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding_mask: Tensor | None = None
    block_size: int = 16

    @classmethod
    def of(cls, q_len: int, kv_len: int, heads: int = 2, kv_heads: int = 2, **more: object) -> "_Case":
        shapes = [(heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)]
        return cls(*(normal(i, _BATCH, n, length, _HEAD_DIM) for i, (n, length) in enumerate(shapes)), **more)

    @property
    def seen(self) -> Tensor:
        """bool (q_len, kv_len), or (batch, 1, q_len, kv_len) with padding."""
        causal = visible(self.query.shape[2], self.key.shape[2])
        return causal if self.padding_mask is None else causal & self.padding_mask[:, None, None]

    def target(self) -> Tensor:
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (self.key, self.value))
        return attention(self.query, key, value, self.seen)


def _run(answer: Answer, case: _Case, where: str, nan: str = "") -> Tensor:
    """The output; `nan` is what to say where it is not finite."""
    given = [t if t is None else t.clone() for t in (case.query, case.key, case.value, case.padding_mask)]
    value, seen = without_labkit(lambda: watched(answer, *given, case.block_size), _OWN)
    without_fused_attention(seen)
    if nan and isinstance(value, Tensor):
        bad = int((~torch.isfinite(value)).any(-1).sum())
        expect(bad == 0, f"{where}: {bad} rows of the output are NaN or infinite: {nan}")
    return as_tensor(value, tuple(case.query.shape), f"the output for {where}")


def _expect_right(answer: Answer, case: _Case, where: str, property_: str, nan: str = "") -> None:
    output = _run(answer, case, where, nan)
    expect(close(output, case.target()), f"{where}: {property_}")


def _test_plain(answer: Answer) -> None:
    """One block, a prompt from its start, as many KV heads as heads: what the faulty form gets right, too."""
    _expect_right(answer, _Case.of(12, 12), "12 tokens in one block", "the output is not causal attention's")


def _test_blocks(answer: Answer) -> None:
    """The split into blocks does not show, whether the largest scores come early or late, nor how large they are."""
    told = "the split into blocks should not change the output. Are all sums of a row kept under one maximum?"
    for block_size in (16, 7, 5, 1):
        case = _Case.of(33, 33, block_size=block_size)
        _expect_right(answer, case, f"33 tokens in blocks of {block_size}", told)
    large = replace(case, query=60 * case.query, block_size=8)
    words = "33 tokens in blocks of 8, with scores in the hundreds, above and below zero"
    _expect_right(answer, large, words, told, "exp of such a score overflows or is 0")


def _test_past(answer: Answer) -> None:
    """Fewer queries than keys: a step after a past; the last query stands at the last key."""
    for q_len, kv_len in ((1, 20), (5, 37)):
        words = f"{q_len} quer{'y' if q_len == 1 else 'ies'} after a past, {kv_len} keys in all"
        told = "a query should see every key up to its own place, and the last of them stands at the last key"
        _expect_right(answer, _Case.of(q_len, kv_len), words, told)


def _test_heads(answer: Answer) -> None:
    """GQA and MQA: query head h reads KV head h // groups."""
    for heads, kv_heads in ((4, 1), (6, 2), (6, 3)):
        case = _Case.of(12, 12, heads, kv_heads)
        told = "neighbouring query heads should share a KV head. Which of them does each query head read?"
        _expect_right(answer, case, f"{heads} query heads on {kv_heads} KV heads", told)


def _padding(kv_len: int, *rows: tuple[int, ...] | range) -> Tensor:
    mask = torch.ones(len(rows), kv_len, dtype=torch.bool)
    for row, hidden in enumerate(rows):
        mask[row, list(hidden)] = False
    return mask


def _test_masked(answer: Answer) -> None:
    """Padding on the left longer than a block, in holes, on the right; rows that see nothing at all give zeros."""
    nan = "a row may see nothing of a whole block, and then its largest score so far is -inf"
    for words, mask in (
        ("padding on the left, longer than a block", _padding(40, range(19), range(0))),
        ("padding in the middle, a whole block of it", _padding(40, range(8, 16), range(3, 30))),
        ("padding on the right", _padding(40, range(35, 40), range(20, 40))),
        ("one sequence of nothing but padding", _padding(40, range(40), range(1))),
    ):
        case = _Case.of(40, 40, padding_mask=mask, block_size=8)
        output = _run(answer, case, words, nan)
        blind = output.masked_select(~case.seen.any(-1, keepdim=True))
        expect(not blind.any(), f"{words}: a query that sees no key should give zeros")
        expect(close(output, case.target()), f"{words}: padding should have no weight, and the rest be as without it")
    words = "25 queries on 9 keys, so that the first see none"
    _expect_right(answer, _Case.of(25, 9, block_size=4), words, "a query that sees no key should give zeros", nan)


def _test_tiled(answer: Answer) -> None:
    """What comes back is right, and no matrix of scores was made on the way."""
    case = _Case(*(normal(i, 1, 1, 301, _HEAD_DIM) for i in range(3)), None, 16)
    value, seen = watched(answer, *(x.clone() for x in (case.query, case.key, case.value)), None, 16)
    share = seen.peak / 301**2
    expect(share < 0.5, f"301 tokens in blocks of 16: your tensors hold {share:.0%} of the matrix of scores at once")
    expect(close(value.double(), case.target()), "301 tokens in blocks of 16: the output is not causal attention's")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_plain(answer)
    _test_blocks(answer)
    _test_past(answer)
    _test_heads(answer)
    _test_masked(answer)
    _test_tiled(answer)
    return "however it is split, after a past, with shared heads and past any padding, it is attention, and still tiled"


FIXED_FLASH_ATTENTION = Exercise(
    name="fixed_flash_attention",
    chapter=4,
    task="Find the bugs: four faults in tiled attention, none of which shows on one head, one block, one prompt and no "
    "padding. Mend it.",
    signature=_SIGNATURE,
    hints=(
        "Change one thing at a time, and compare with one block: the block size, the number of KV heads, a past, "
        "padding on the left. Each of the four finds one fault.",
        "Two of the faults lie before the scores are masked. The other two lie where the maximum moves: what is summed "
        "under it, and what exp does when there is no maximum yet.",
        "repeat_interleave(groups, dim=1); torch.arange(q_len) + kv_len - q_len; output takes the factor that total "
        "takes; subtract 0 instead of a maximum of -inf, and divide by total only where it is over 0.",
    ),
    test=_test,
)
