"""Rounding to a grid: a scale and a zero point for each group of weights, codes, and the values they stand for."""

from dataclasses import dataclass

import torch

from labkit import _check
from labkit.kernels.bits import PACKED_BITS

GROUP_SIZES = (16, 128)
# What scales are stored in: a step of a 4-bit grid does not need more, and the packed matmuls read it.
SCALE_DTYPE = torch.bfloat16


def check_format(bits: int, group_size: int, sym: bool) -> None:
    """Refuse a weight format that cannot be had, by the field's name."""
    _check.choice("bits", _check.integer("bits", bits), PACKED_BITS)
    low, high = GROUP_SIZES
    whole = isinstance(group_size, int) and not isinstance(group_size, bool)
    ok = whole and (group_size == -1 or low <= group_size <= high)
    _check.require(ok, "group_size", group_size, f"{low} to {high}, or -1 for one group a row")
    _check.require(isinstance(sym, bool), "sym", sym, "True or False")


def group_length(in_features: int, group_size: int, name: str = "the matrix") -> int:
    """Columns a group. Errors: ValueError where they do not divide the matrix, with group sizes that do."""
    if group_size == -1:
        return in_features
    fitting = [size for size in (16, 32, 64, 96, 128) if in_features % size == 0]
    takes = f"a divisor of the {in_features} input features of {name}: {', '.join(map(str, [*fitting, -1]))}"
    _check.require(in_features % group_size == 0, "group_size", group_size, takes)
    return group_size


@dataclass(frozen=True)
class Grid:
    """w = (q - zeros) * scales with q from 0 to 2^bits - 1; scales and zeros `(out_features, groups)`, float32."""

    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int

    @property
    def top(self) -> int:
        """The highest code."""
        return (1 << self.bits) - 1

    def encode(self, weight: torch.Tensor) -> torch.Tensor:
        """`weight (out_features, groups, group)` to codes, whole numbers in float32, clipped to the grid."""
        scales, zeros = self.scales[..., None], self.zeros[..., None]
        return (weight / scales).round_().add_(zeros).clamp_(0, self.top)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of `codes (out_features, groups, group)`."""
        return (codes - self.zeros[..., None]) * self.scales[..., None]


def minmax_grid(weight: torch.Tensor, bits: int, sym: bool, shrink: float | torch.Tensor = 1.0) -> Grid:
    """The grid whose codes span each group of `weight (out_features, groups, group)`, float32.

    Asymmetric: from the least to the largest value, both moved to include 0, so that 0 stays exact. Symmetric: equally
    far to both sides, with the zero point in the middle. `shrink` narrows the range, as clipping searches do; one
    number or `(out_features, groups)`. Scales are rounded to the dtype in which they are stored, before any code is.
    """
    top = (1 << bits) - 1
    if sym:
        high = weight.abs().amax(-1) * shrink
        low = -high
    else:
        high, low = weight.amax(-1).clamp_min(0) * shrink, weight.amin(-1).clamp_max(0) * shrink
    scales = stored_scales((high - low) / top)
    zeros = torch.full_like(scales, 1 << (bits - 1)) if sym else (-low / scales).round_().clamp_(0, top)
    return Grid(scales, zeros, bits)


def stored_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as they come back from storage, float32; a group of zeros gets 1, so that nothing is divided by 0.

    Rounded up: a scale rounded down would clip the group's largest values, by half a code at 8 bits.
    """
    stored = scales.to(SCALE_DTYPE)
    infinity = torch.full_like(stored, torch.inf)
    stored = torch.where(stored.float() < scales, torch.nextafter(stored, infinity), stored).float()
    return torch.where(stored > 0, stored, 1.0)
