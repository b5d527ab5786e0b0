"""Exercise `merge_heads`: the key or value heads of a projection merged into fewer, by the mean of neighbours.

Ainslie et al. 2023, GQA, section 2.1. Tested by what the merged projection computes: the mean of the keys that the
heads of a group computed before.
"""

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Exercise, Failed, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "merge_heads(weight, bias, num_key_value_heads, new_heads) -> (weight, bias)"
_OWN = ("attention/",)
_HIDDEN, _HEAD_DIM = 24, 8


def _run(answer: Answer, weight: Tensor, bias: Tensor | None, heads: int, new_heads: int) -> tuple[Tensor, ...]:
    """The merged weight, float64, and the merged bias if there is one. The function gets copies."""
    given = [t if t is None else t.clone() for t in (weight, bias)]
    value = without_labkit(lambda: answer(*given, heads, new_heads), _OWN)
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two things, (weight, bias); got {type(value).__name__}")
    kept = torch.equal(given[0], weight) and (bias is None or torch.equal(given[1], bias))
    expect(kept, "the weight and bias that you were given should stay as they are: return new ones")
    rows = weight.shape[0] // heads * new_heads
    merged = as_tensor(value[0], (rows, weight.shape[1]), f"the weight merged from {heads} heads to {new_heads}")
    same = value[0].dtype == weight.dtype
    expect(same, f"the merged weight should keep the dtype {weight.dtype}; got {value[0].dtype}")
    if bias is None:
        expect(value[1] is None, "bias is None for a projection without one, and stays None")
        return (merged,)
    return merged, as_tensor(value[1], (rows,), f"the bias merged from {heads} heads to {new_heads}")


def _pooled(tensor: Tensor, heads: int, new_heads: int) -> Tensor:
    """Head by head: the mean of each run of heads // new_heads neighbours; (heads * head_dim, ...) in and out."""
    split = tensor.double().split(tensor.shape[0] // heads)
    group = heads // new_heads
    return torch.cat([sum(split[i * group : (i + 1) * group]) / group for i in range(new_heads)])


def _mistake(weight: Tensor, merged: Tensor, heads: int, new_heads: int) -> str:
    """The usual mistake that the merged weight shows."""
    split, group = weight.double().reshape(heads, -1, weight.shape[1]), heads // new_heads
    by_row = weight.double().reshape(-1, group, weight.shape[1]).mean(1)
    columns = weight.double().reshape(-1, heads, weight.shape[1]).transpose(0, 1)
    mistakes = {
        "the heads of a group are those that follow one another, and not every so many-th": torch.cat(
            [split[i::new_heads].mean(0) for i in range(new_heads)]
        ),
        "the heads were added up: divide by the heads in a group": _pooled(weight, heads, new_heads) * group,
        "the first head of each group was kept: take the mean of all in it": split[::group].flatten(0, 1),
        "neighbouring rows were averaged: a row is one channel of one head, and channel i is merged with channel i of "
        "the other heads": by_row,
        "head h holds the rows from h * head_dim on; yours takes them from all over the weight": _pooled(
            columns.reshape(weight.shape), heads, new_heads
        ),
    }
    return next((text for text, wrong in mistakes.items() if torch.allclose(merged, wrong, atol=1e-5)), "")


def _test_case(answer: Answer, heads: int, new_heads: int, *, bias: bool = False) -> None:
    """The merged projection gives, for any input, the mean of its heads' outputs, group by group."""
    weight = normal(heads, heads * _HEAD_DIM, _HIDDEN)
    added = normal(heads + 100, heads * _HEAD_DIM) if bias else None
    merged = _run(answer, weight, added, heads, new_heads)
    inputs = normal(200, 5, _HIDDEN).double()
    where = f"{heads} heads merged to {new_heads}"
    target = _pooled((inputs @ weight.double().T).T, heads, new_heads).T
    right = torch.allclose(inputs @ merged[0].T, target, atol=1e-5)
    why = "" if right else _mistake(weight, merged[0], heads, new_heads)
    told = f"{where}: each new head should compute the mean of what the heads of its group computed"
    expect(right, f"{told}: {why}" if why else told)
    if added is None:
        return
    right = torch.allclose(merged[1], _pooled(added, heads, new_heads), atol=1e-5)
    expect(right, f"{where}: the bias is merged as the weight is, channel by channel over the heads of a group")


def _test_known(answer: Answer) -> None:
    """Head h holds nothing but h, so that a merged head shows which heads it came from."""
    weight = torch.arange(6.0).repeat_interleave(_HEAD_DIM)[:, None].expand(-1, _HIDDEN).contiguous()
    merged = _run(answer, weight, None, 6, 2)[0].reshape(2, -1)
    found = [round(float(head.mean()), 3) for head in merged]
    wanted = "with six heads full of 0, 1, 2, 3, 4 and 5, two merged heads should hold 1 and 4"
    usual = {
        (2, 3): ": yours took every second head, and a group is heads that follow one another",
        (3, 12): ": yours added the heads up",
        (0, 3): ": yours kept the first head of each group",
    }
    told = f"{wanted}; yours hold {found[0]:g} and {found[1]:g} in the mean"
    expect(found == [1, 4], told + usual.get(tuple(found), ""))


def _test_refused(answer: Answer) -> None:
    weight = normal(1, 6 * _HEAD_DIM, _HIDDEN)
    told = "6 heads cannot be merged evenly to 4: raise a ValueError that says so"
    try:
        _run(answer, weight, None, 6, 4)
    except Failed as failure:
        if isinstance(failure.__cause__, ValueError):
            return
        raise Failed(f"{told}; {failure}") from failure
    raise Failed(told)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_known(answer)
    for heads, new_heads in ((6, 2), (3, 1), (32, 8), (4, 4)):
        _test_case(answer, heads, new_heads)
    _test_case(answer, 9, 3, bias=True)
    half = normal(7, 4 * _HEAD_DIM, _HIDDEN).bfloat16()
    merged = _run(answer, half, None, 4, 2)[0]
    close = torch.allclose(merged, _pooled(half, 4, 2), atol=0.02)
    expect(close, "a bfloat16 weight should merge as well as a float32 one")
    _test_refused(answer)
    return "every merged head computes the mean of its neighbours' outputs, biases included, channel by channel"


MERGE_HEADS = Exercise(
    name="merge_heads",
    chapter=3,
    task="Merge the KV heads of k_proj or v_proj into fewer: each new head is the mean of heads that follow one "
    "another. A ValueError where the numbers do not divide.",
    signature=_SIGNATURE,
    hints=(
        "Which rows of the weight belong to head 0, and which to head 1? Query heads that share a KV head follow one "
        "another; so must the KV heads that are merged.",
        "Reshape the weight to (new_heads, heads in a group, head_dim, hidden_size). Over which dimension is the mean?",
        "group = num_key_value_heads // new_heads; w = weight.reshape(new_heads, group, -1, weight.shape[1]).mean(1)"
        ".flatten(0, 1); the bias likewise, reshaped to (new_heads, group, -1), or None.",
    ),
    test=_test,
)
