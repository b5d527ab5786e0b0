"""Exercise `online_softmax`: one block of scores and values taken into a softmax that has not seen them all.

Milakov and Gimelshein 2018, Algorithm 3; Dao et al. 2022, FlashAttention, Algorithm 1, lines 10 to 12. Tested on what
the state stands for after each block, however the keys were split.
"""

import torch
from torch import Tensor

from labkit.exercises._ch04_reference import close
from labkit.exercises._exercise import Answer, Exercise, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "online_softmax(state, scores, values) -> state, which is (maximum, total, weighted)"
_OWN = ("attention/", "kernels/", "kv_cache/")
_NAMES = ("maximum", "total", "weighted")
_ROWS, _HEAD_DIM = 5, 3
State = tuple[Tensor, Tensor, Tensor]


def _start(dtype: torch.dtype = torch.float32) -> State:
    """Nothing seen: maximum -inf, total 0 and weighted 0; (rows, 1), (rows, 1), (rows, head_dim)."""
    return torch.full((_ROWS, 1), -torch.inf, dtype=dtype), *(
        torch.zeros(_ROWS, n, dtype=dtype) for n in (1, _HEAD_DIM)
    )


def _in_form(value: object, where: str) -> State:
    """The returned state in float64. The maximum alone may be infinite, where a row has seen nothing."""
    three = isinstance(value, tuple | list) and len(value) == 3
    expect(three, f"return three things, (maximum, total, weighted); got {type(value).__name__}")
    found = [t.detach().clone() if isinstance(t, Tensor) else t for t in value]
    shapes = ((_ROWS, 1), (_ROWS, 1), (_ROWS, _HEAD_DIM))
    if isinstance(found[0], Tensor) and found[0].is_floating_point():
        lowest = torch.finfo(torch.float32).min
        found[0] = torch.where(found[0] == -torch.inf, lowest, found[0].double())
    return tuple(as_tensor(t, s, f"{name} {where}") for t, s, name in zip(found, shapes, _NAMES, strict=True))


def _walk(answer: Answer, blocks: list[tuple[Tensor, Tensor]], told: str = "") -> list[State]:
    """The state after each block. The function gets copies of the blocks, and its own state back."""
    state, states = _start(blocks[0][0].dtype), []
    for at, (scores, values) in enumerate(blocks):
        given, kept = (scores.clone(), values.clone()), state
        state = without_labkit(lambda given=given, kept=kept: answer(kept, *given), _OWN)
        states.append(_in_form(state, f"after block {at + 1} of {len(blocks)}{told}"))
    return states


def _meaning(scores: Tensor, values: Tensor) -> State:
    """What the state should be once these scores were seen: (rows, seen) and (seen, head_dim)."""
    maximum = scores.double().amax(-1, keepdim=True)
    weights = (scores.double() - maximum).exp()
    return maximum, weights.sum(-1, keepdim=True), weights @ values.double()


def _mistake(found: State, before: State, scores: Tensor, values: Tensor) -> str:
    """What the state after a second block got wrong; before is the state after the first."""
    right = torch.maximum(before[0], scores.double().amax(-1, keepdim=True))
    weights, rescale = (scores.double() - right).exp(), (before[0] - right).exp()
    alone = weights @ values.double()
    whole = before[2] * rescale + alone
    total = before[1] * rescale + weights.sum(-1, keepdim=True)
    mistakes = {
        "weighted still holds terms under the old maximum: when the maximum moves, what was summed moves with it": (
            before[2] + alone
        ),
        "what was summed before was moved the wrong way when the maximum grew": before[2] / rescale + alone,
        "weighted is the sum itself: it is divided by total once, after the last block": whole / total,
        "weighted holds the last block alone": alone,
        "weighted was divided by total before the new block was added": before[2] / before[1] * rescale + alone,
    }
    of_total = {
        "total still holds terms under the old maximum": before[1] + weights.sum(-1, keepdim=True),
        "total was moved the wrong way when the maximum grew": before[1] / rescale + weights.sum(-1, keepdim=True),
        "total holds the last block alone": weights.sum(-1, keepdim=True),
    }
    for place, wrongs in ((1, of_total), (2, mistakes)):
        for text, wrong in wrongs.items():
            if close(found[place], wrong, 1e-5):
                return f": {text}"
    return ""


def _expect_state(found: State, scores: Tensor, values: Tensor, where: str, why: str = "") -> None:
    maximum, total, weighted = _meaning(scores, values)
    told = "maximum should be the largest score of the row so far, over all blocks"
    expect(close(found[0], maximum, 1e-5), f"{where}, {told}")
    right = close(found[1], total, 1e-4)
    told = "total should be the sum of exp(score - maximum) over all scores so far"
    expect(right, f"{where}, {told}{'' if right else why}")
    right = close(found[2], weighted, 1e-4)
    told = "weighted should be the sum of exp(score - maximum) times the value, over all scores so far"
    expect(right, f"{where}, {told}{'' if right else why}")


def _block(seed: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (3 * normal(seed, _ROWS, width)).to(dtype), normal(seed + 1, width, _HEAD_DIM).to(dtype)


def _joined(blocks: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    scores, values = zip(*blocks, strict=True)
    return torch.cat(scores, -1), torch.cat(values)


def _test_two_blocks(answer: Answer) -> None:
    """A first block; then one that raises every row's maximum, one that raises none, one that raises some."""
    for shift, where in ((6.0, "that raises every maximum"), (-9.0, "that raises no maximum"), (0.0, "")):
        blocks = [_block(10, 4), _block(20, 6)]
        blocks[1] = (blocks[1][0] + shift, blocks[1][1])
        first, second = _walk(answer, blocks)
        _expect_state(first, *blocks[0], "after a first block")
        why = _mistake(second, _meaning(*blocks[0]), *blocks[1])
        _expect_state(second, *_joined(blocks), f"after a second block {where}".rstrip(), why)


def _test_splits(answer: Answer) -> None:
    """Random scores split at random: after the last block weighted / total is softmax(scores) @ values."""
    choose = torch.Generator().manual_seed(0)
    for case in range(40):
        widths = torch.randint(1, 9, (int(torch.randint(1, 7, (), generator=choose)),), generator=choose).tolist()
        dtype = torch.float64 if case % 4 == 3 else torch.float32
        blocks = [_block(100 + 20 * case + i, width, dtype) for i, width in enumerate(widths)]
        scores, values = _joined(blocks)
        state = _walk(answer, blocks)[-1]
        _expect_state(state, scores, values, f"{sum(widths)} scores in blocks of {', '.join(map(str, widths))}")


def _test_huge(answer: Answer) -> None:
    """Scores in the thousands, growing and falling from block to block, and all far below zero."""
    for shifts in ((-2000.0, 0.0, 3000.0), (3000.0, 0.0, -2000.0), (-5000.0, -4990.0, -5005.0)):
        parts = [_block(seed, width) for seed, width in ((0, 4), (2, 2), (4, 5))]
        blocks = [(scores + shift, values) for shift, (scores, values) in zip(shifts, parts, strict=True)]
        where = f"with scores near {', '.join(f'{shift:g}' for shift in shifts)}, block by block"
        state = _walk(answer, blocks, f" ({where}: exp of such a score overflows or is 0)")[-1]
        _expect_state(state, *_joined(blocks), where)


def _test_masked(answer: Answer) -> None:
    """Blocks that are -inf for a whole row, first, in the middle and last; row 0 sees nothing at all."""
    blocks = [_block(30 + 2 * i, width) for i, width in enumerate((3, 4, 2, 3))]
    for row, hidden in ((0, (0, 1, 2, 3)), (1, (0,)), (2, (0, 1)), (3, (1, 3))):
        for at in hidden:
            blocks[at][0][row] = -torch.inf
    blocks[1][0][4, :2] = -torch.inf
    state = _walk(answer, blocks, ", where a row's scores are all -inf (-inf - -inf is NaN)")[-1]
    nothing = float(state[1][0]) == 0 and not state[2][0].any()
    expect(nothing, "a row that has seen only -inf has seen nothing: its total and weighted should be 0")
    expect(float(state[0][0]) < -1e29, "a row that has seen only -inf has no maximum yet: it should stay -inf")
    scores, values = _joined(blocks)
    maximum, total, weighted = _meaning(scores[1:], values)
    told = "a block that is -inf for a row should leave that row's state as it was"
    right = (close(state[0][1:], maximum, 1e-5), close(state[1][1:], total, 1e-4), close(state[2][1:], weighted, 1e-4))
    wrong = [name for name, ok in zip(_NAMES, right, strict=True) if not ok]
    expect(not wrong, f"{told}: {' and '.join(wrong)} changed")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_two_blocks(answer)
    _test_splits(answer)
    _test_huge(answer)
    _test_masked(answer)
    return "softmax, however the scores are split: in any order of maxima, in the thousands, and past masked blocks"


ONLINE_SOFTMAX = Exercise(
    name="online_softmax",
    chapter=4,
    task="One step of the online softmax: take a block of scores and values into the maximum, the sum and the weighted "
    "sum of all that came before.",
    signature=_SIGNATURE,
    hints=(
        "total and weighted are sums of exp(score - maximum). Which maximum were the old terms taken under, and by "
        "what factor do you move them to the new one?",
        "new = torch.maximum(maximum, scores.amax(-1, keepdim=True)); both old sums are multiplied by "
        "exp(maximum - new). Where new is still -inf, subtract 0 in its place.",
        "base = new.masked_fill(new == -inf, 0); p = (scores - base).exp(); r = (maximum - base).exp(); return new, "
        "total * r + p.sum(-1, keepdim=True), weighted * r + p @ values.",
    ),
    test=_test,
)
