"""What kernels are given: weights, keys and values whose bytes are really small. `labkit.quantization` and
`labkit.kv_cache` fill them."""

from dataclasses import dataclass

import torch

from labkit import _check
from labkit.kernels._tensor_fields import TensorFields
from labkit.kernels.bits import PACKED_BITS, unpack_bits, words_per_row
from labkit.kernels.kv_types import QuantizedKV

__all__ = ["PackedWeight", "QuantizedKV", "TensorFields", "in_model_order", "sorted_by_group"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight(TensorFields):
    """A matrix `(out_features, in_features)` of integers of 2, 3, 4 or 8 bits with a scale for each group of columns.

    w[n, k] = (q[n, k] - z[n, g]) * s[n, g], where g is the group of column k.
    qweight: int32 `(out_features, ceil(in_features * bits / 32))`, rows packed as `labkit.kernels.bits` says.
    scales: `(out_features, groups)`, bfloat16, float16 or float32. zeros: uint8 `(out_features, groups)`; None for
    symmetric quantization, where z is 2^(bits - 1). g_idx: int32 `(in_features,)`, the group of each column; None where
    groups are consecutive columns, which act-order changes. Two are equal where they are one object: tensors have no
    truth value.
    Errors: ValueError for shapes or dtypes that do not fit together.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    g_idx: torch.Tensor | None
    bits: int
    group_size: int
    in_features: int

    def __post_init__(self) -> None:
        _check.choice("bits", _check.integer("bits", self.bits), PACKED_BITS)
        _check.tensor("scales", self.scales, ndim=2, dtypes=(torch.bfloat16, torch.float16, torch.float32))
        divides = self.group_size > 0 and self.in_features % self.group_size == 0
        _check.require(divides, "group_size", self.group_size, f"a divisor of in_features, {self.in_features}")
        shape = (self.out_features, words_per_row(self.in_features, self.bits))
        _check.tensor("qweight", self.qweight, ndim=2, dtypes=(torch.int32,))
        _check.require(tuple(self.qweight.shape) == shape, "qweight", f"shape {tuple(self.qweight.shape)}", f"{shape}")
        groups = (self.out_features, self.in_features // self.group_size)
        _check.require(tuple(self.scales.shape) == groups, "scales", f"shape {tuple(self.scales.shape)}", f"{groups}")
        if self.zeros is not None:
            _check.tensor("zeros", self.zeros, ndim=2, dtypes=(torch.uint8,))
            _check.require(tuple(self.zeros.shape) == groups, "zeros", f"shape {tuple(self.zeros.shape)}", f"{groups}")
        if self.g_idx is not None:
            _check.tensor("g_idx", self.g_idx, ndim=1, dtypes=(torch.int32,))
            _check.require(
                self.g_idx.shape[0] == self.in_features, "g_idx", self.g_idx.shape[0], f"{self.in_features} columns"
            )

    @property
    def out_features(self) -> int:
        return self.scales.shape[0]

    @property
    def device(self) -> torch.device:
        return self.qweight.device

    def codes(self) -> torch.Tensor:
        """The integers, uint8 `(out_features, in_features)`, in the order of the columns."""
        return unpack_bits(self.qweight, self.bits, self.in_features)

    def by_column(self, values: torch.Tensor) -> torch.Tensor:
        """`values (out_features, groups)` of groups as `(out_features, in_features)`, one for each column."""
        if self.g_idx is not None:
            return values[:, self.g_idx]
        return values.repeat_interleave(self.group_size, dim=1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the integers stand for, `(out_features, in_features)`; computed in `dtype`."""
        codes, scales = self.codes(), self.scales.to(dtype)
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.to(dtype)
        if self.g_idx is None:
            grouped = codes.unflatten(1, (-1, self.group_size)).to(dtype)
            zeros = zeros if self.zeros is None else zeros[..., None]
            return grouped.sub_(zeros).mul_(scales[..., None]).flatten(1)
        zeros = zeros if self.zeros is None else self.by_column(zeros)
        return codes.to(dtype).sub_(zeros).mul_(self.by_column(scales))


def sorted_by_group(weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes with each group's columns side by side, and which column stands at each place, int32 `(in_features,)`; None
    where each stands at its own."""
    if weight.g_idx is None:
        return weight.codes(), None
    order = torch.argsort(weight.g_idx, stable=True).to(torch.int32)
    return weight.codes()[:, order], order


def in_model_order(
    codes: torch.Tensor, order: torch.Tensor | None, group_size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The codes and the `g_idx` that `sorted_by_group` was given."""
    if order is None:
        return codes, None
    g_idx = torch.empty_like(order)
    g_idx[order] = torch.arange(len(order), dtype=torch.int32, device=order.device) // group_size
    return codes[:, torch.argsort(order)], g_idx
