"""GPTQ: round a matrix column by column, and let the columns to come make up for each rounding error.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023, Algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit import _check
from labkit.quantization.calibration import LayerResult, LayerTask, Replacement
from labkit.quantization.linear import packed_replacement
from labkit.quantization.packing import pack_weight
from labkit.quantization.primitives import Grid, check_format, group_length, minmax_grid

# Columns whose updates are gathered before they reach the rest of the matrix, in one product (section 3.3).
_BLOCK = 128
_MOST_DAMPING = 10.0


@dataclass(frozen=True)
class GPTQConfig:
    """`bits, group_size, sym` as in RTNConfig. `desc_act`: columns with the largest inputs first (act-order);
    `damp_percent`: what is added to the Hessian's diagonal, as a part of its mean."""

    bits: int = 4
    group_size: int = 64
    sym: bool = False
    desc_act: bool = True
    damp_percent: float = 0.01

    def __post_init__(self) -> None:
        check_format(self.bits, self.group_size, self.sym)
        _check.require(isinstance(self.desc_act, bool), "desc_act", self.desc_act, "True or False")
        _check.number("damp_percent", self.damp_percent, 0.0, 1.0)
        _check.require(self.damp_percent > 0, "damp_percent", self.damp_percent, "a number above 0, up to 1")


def inverse_cholesky(hessian: torch.Tensor, damp_percent: float, note: Callable[[str], None]) -> torch.Tensor:
    """Upper triangular U with U^T U = (H + d I)^-1, d a part of the mean of H's diagonal: `damp_percent` at first, then
    ten times as much each time that H + d I is not positive definite, up to ten times the mean.

    `note` is told of each time that it is raised. Errors: ValueError where even ten times the mean fails.
    """
    mean = hessian.diagonal().mean()
    damping = damp_percent
    while True:
        damped = hessian + damping * mean * torch.eye(len(hessian), device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed and bool(upper.isfinite().all()):
            return upper
        got = f"a Hessian that no damping up to {_MOST_DAMPING:g} times its mean makes positive definite"
        _check.require(damping < _MOST_DAMPING, "calibration", got, "inputs whose second moments are finite")
        damping = min(10 * damping, _MOST_DAMPING)
        note(f"the Hessian is not positive definite: damp_percent raised to {damping:g}")


@dataclass(frozen=True)
class Rounded:
    """What GPTQ makes of a matrix: codes `(out_features, in_features)` in the model's order of columns, their grid, and
    the group of each column where act-order was used."""

    codes: torch.Tensor
    grid: Grid
    g_idx: torch.Tensor | None


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, config: GPTQConfig, note: Callable[[str], None] = lambda _: None
) -> Rounded:
    """Quantize `weight (out_features, in_features)`; `hessian (in_features, in_features)`: its inputs' second moments.

    Works in float32. A column whose input is always zero is set to zero: it carries nothing.
    Errors: ValueError where the groups do not divide the columns, and for a Hessian that cannot be factored.
    """
    group = group_length(weight.shape[1], config.group_size)
    # A copy in every case: both are worked on in place.
    columns = weight.float().T.clone(memory_format=torch.contiguous_format)
    hessian = hessian.float().clone()
    inputs = hessian.diagonal().clone()
    dead = inputs == 0
    # As much as the others have, so that the damping, a part of the mean, does not depend on the inputs' scale.
    hessian.diagonal()[dead] = inputs[~dead].mean() if not bool(dead.all()) else 1.0
    columns[dead] = 0.0
    order = None
    if config.desc_act:
        order = torch.argsort(inputs, descending=True, stable=True)
        columns, hessian = columns[order], hessian[order][:, order]
    upper = inverse_cholesky(hessian, config.damp_percent, note)
    codes, grid = _round_columns(columns, upper, config, group)
    g_idx = None
    if order is not None:
        place = torch.argsort(order)
        codes = codes[place]
        # One group a row has nothing to look up.
        g_idx = place // group if group < len(place) else None
    return Rounded(codes.T, grid, g_idx)


def _round_columns(
    columns: torch.Tensor, upper: torch.Tensor, config: GPTQConfig, group: int
) -> tuple[torch.Tensor, Grid]:
    """Algorithm 1 on `columns (in_features, out_features)`, which is left as the values that were rounded.

    Transposed, so that a column is contiguous.
    """
    in_features = len(columns)
    codes, scales, zeros = torch.empty_like(columns), [], []
    # Whole groups a block: a group's grid is that of its columns as all earlier ones have left them.
    block = _BLOCK if group >= in_features else group * max(1, _BLOCK // group)
    for start in range(0, in_features, block):
        stop = min(start + block, in_features)
        errors = torch.empty_like(columns[start:stop])
        for i in range(start, stop):
            if i % group == 0:
                grid = minmax_grid(columns[i : i + group].T[:, None], config.bits, config.sym)
                scales.append(grid.scales)
                zeros.append(grid.zeros)
            codes[i] = grid.encode(columns[i][:, None, None])[:, 0, 0]
            rounded = grid.decode(codes[i][:, None, None])[:, 0, 0]
            error = (columns[i] - rounded) / upper[i, i]
            columns[i + 1 : stop].addr_(upper[i, i + 1 : stop], error, alpha=-1)
            errors[i - start] = error
        columns[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    return codes, Grid(torch.cat(scales, dim=1), torch.cat(zeros, dim=1), config.bits)


def quantize_layer(task: LayerTask) -> LayerResult:
    """Every matrix of the task; those that read one input go through together, as one tall matrix."""
    found: dict[str, Replacement] = {}
    for names in task.by_input():
        for bits, members in _by_bits(task, names).items():
            rounded = gptq(
                torch.cat([task.linears[name].weight for name in members]),
                task.statistics[members[0]].gram,
                task.config_of(members[0]),
                lambda text, members=members: task.notes.append(f"{', '.join(members)}: {text}"),
            )
            sizes = [task.linears[name].out_features for name in members]
            parts = zip(
                *(x.split(sizes) for x in (rounded.codes, rounded.grid.scales, rounded.grid.zeros)), strict=True
            )
            for name, (codes, scales, zeros) in zip(members, parts, strict=True):
                packed = pack_weight(codes, Grid(scales, zeros, bits), sym=task.config.sym, g_idx=rounded.g_idx)
                found[name] = packed_replacement(task.linears[name], packed)
    return LayerResult({name: found[name] for name in task.linears})


def _by_bits(task: LayerTask, names: list[str]) -> dict[int, list[str]]:
    """Names by the number of bits that each is to have."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(task.config_of(name).bits, []).append(name)
    return groups
