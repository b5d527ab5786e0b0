"""Exercise `gptq_update`: one column of GPTQ, whose rounding error the columns after it make up for.

Frantar et al. 2023, Algorithm 1. What makes the update right is tested, not its formula: with the columns up to j
fixed, no change of the later ones lowers the output error tr(E H E^T), E the change of the weight.
"""

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Exercise, NotAttempted, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "gptq_update(weight, hessian_inverse_upper, column, quantized_column) -> weight"
_OWN = ("quantization/gptq", "quantization/primitives", "quantization/calibration", "quantization/api")
_ROWS, _COLUMNS = 6, 16


def _problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight (rows, columns), Hessian of correlated inputs, damped by 1%, and the upper Cholesky factor of its
    inverse, whose transpose times itself is the inverse; all float64."""
    inputs = (normal(seed, 64, _COLUMNS) @ normal(seed + 1, _COLUMNS, _COLUMNS)).double()
    hessian = 2 * inputs.T @ inputs / len(inputs)
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(_COLUMNS, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    return normal(seed + 2, _ROWS, _COLUMNS).double(), hessian, upper


def _grid(column: Tensor) -> Tensor:
    """Rounded to eighths of 4, a coarse grid that is the same for all columns."""
    return (column * 2).round().clamp(-4, 3) / 2


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5 * max(1e-6, float(b.abs().max()) if b.numel() else 0.0))


def _step(answer: Answer, weight: Tensor, upper: Tensor, column: int, quantized: Tensor) -> Tensor:
    """The weight after a step. The function gets copies, so that it may write to them."""
    given = weight.clone()
    try:
        value = without_labkit(lambda: answer(given, upper.clone(), column, quantized.clone()), _OWN)
    except NotAttempted:
        expect(torch.equal(given, weight), "your function changed the weight and returned nothing: return the weight")
        raise
    return as_tensor(value, tuple(weight.shape), "the weight that you return")


def _test_identity(answer: Answer) -> None:
    weight, _, _ = _problem(10)
    column = 3
    quantized = _grid(weight[:, column])
    after = _step(answer, weight, torch.eye(_COLUMNS, dtype=torch.float64), column, quantized)
    expect(
        _same(after[:, column], quantized),
        "column j should be the quantized column afterwards: that is what will be stored",
    )
    others = [c for c in range(_COLUMNS) if c != column]
    alone = "with U the identity the inputs are uncorrelated, and nothing but column j should change"
    changed = [c for c in others if not _same(after[:, c], weight[:, c])]
    expect(not changed, f"{alone}; with j = {column} columns {changed} changed")


def _mistake(change: Tensor, right: Tensor, diagonal: float) -> str:
    """What a wrong change of the columns after j looks like."""
    if not change.any():
        return "no column after j changed: take row j of U, U[j, j + 1:]; under the diagonal U holds zeros"
    usual = {
        "they moved the wrong way: the error is w_j - q_j, and it is taken away from the later columns": -right,
        "the error is not divided by the diagonal, U[j, j]": right * diagonal,
        "the error is divided by U[j, j] twice": right / diagonal,
    }
    why = next((text for text, wrong in usual.items() if _same(change, wrong)), None)
    return why or "is it (w_j - q_j) / U[j, j], times U[j, j + 1:]?"


def _test_step(answer: Answer, column: int) -> None:
    """One step at a column, from a weight whose earlier columns may be anything."""
    weight, hessian, upper = _problem(20)
    quantized = _grid(weight[:, column])
    after = _step(answer, weight, upper, column, quantized)
    where = f"at column {column} of {_COLUMNS}"
    earlier = [c for c in range(column) if not _same(after[:, c], weight[:, c])]
    expect(not earlier, f"{where}: the columns before j are stored already and must stay; columns {earlier} changed")
    stored = _same(after[:, column], quantized)
    expect(stored, f"{where}: column j should be the quantized column afterwards: that is what will be stored")
    change, error = after[:, column + 1 :] - weight[:, column + 1 :], weight[:, column] - quantized
    slope = (after - weight)[:, column:] @ hessian[column:, column + 1 :]
    scale = (error[:, None] * hessian[column, column + 1 :]).abs().max() if change.numel() else torch.tensor(1.0)
    best = not slope.numel() or float(slope.abs().max()) <= 1e-4 * float(scale)
    diagonal = upper[column, column]
    why = _mistake(change, -torch.outer(error / diagonal, upper[column, column + 1 :]), float(diagonal))
    left = "the columns after j should make up for the error of column j, and the output error could still be lower"
    expect(best, f"{where}: {left}: {why}")


def _test_all_columns(answer: Answer) -> float:
    """The output error after all columns, as a share of round-to-nearest's."""
    weight, hessian, upper = _problem(30)
    done = weight
    for column in range(_COLUMNS):
        done = _step(answer, done, upper, column, _grid(done[:, column]))
    on_grid = _same(done, _grid(done))
    expect(on_grid, "after the last column each weight should lie on the grid: a later step changed an earlier column")
    gptq, nearest = (float(((weight - w) @ hessian * (weight - w)).sum()) for w in (done, _grid(weight)))
    figures = f"the output error after all columns is {gptq:.3g}, and round-to-nearest's {nearest:.3g}"
    expect(gptq < nearest, f"{figures}: it should be below")
    return gptq / nearest


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_identity(answer)
    for column in (5, 0, _COLUMNS - 1):
        _test_step(answer, column)
    share = _test_all_columns(answer)
    return f"no later column could do better; after all columns {100 * share:.0f}% of round-to-nearest's output error"


GPTQ_UPDATE = Exercise(
    name="gptq_update",
    chapter=2,
    task="One column of GPTQ: set the column to its quantized values, and let the columns after it make up for it.",
    signature=_SIGNATURE,
    hints=(
        "Column j has just been rounded. Which columns may still change, and which row of U says by how much?",
        "The error is (w_j - q_j) / U[j, j], one number for each row of the weight. A later column k loses it times "
        "U[j, k].",
        "error = (weight[:, j] - quantized_column) / U[j, j]; then weight[:, j + 1:] -= torch.outer(error, "
        "U[j, j + 1:]) and weight[:, j] = quantized_column, on a copy of the weight; return it.",
    ),
    test=_test,
)
