"""PyTorch's packed 4-bit matmul for the CPU, and weights in the layout that it reads.

The op, `aten::_weight_int4pack_mm_for_cpu`, takes bfloat16 activations, 4-bit codes in an order of its own that
depends on the processor, and for each group a bfloat16 scale s and offset b: w = (q - 8) * s + b. Codes of 8 bits lie
as two halves of 4 side by side, q = 16 h + l, so that w = (h - 8) * 16 s + (l - 8) * s + (136 - z) * s is one product
of twice the columns with x beside itself: the same bytes, and one rounding.
Of 4 bits, b = (8 - z) * s is rounded to bfloat16: exact where z is 0, 4, 6 to 10 or 12, else off by up to s / 37.
Columns out of group order (act-order) are sorted by group, and x's with them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.kernels.bits import pack_bits
from labkit.kernels.types import PackedWeight, TensorFields, in_model_order, sorted_by_group

GROUP_SIZES = (32, 64, 128, 256)
_OUT_MULTIPLE = 16
_MIDDLE = 8
# Rows of an identity matrix that go through the op at a time when a weight is read back.
_IDENTITY_ROWS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Int4PackWeight(TensorFields):
    """A `PackedWeight` of 4 or 8 bits in the order of the CPU's packed matmul; `unpack` gives it back bit by bit.

    packed: uint8 `(out_features, halves * in_features / 2)`, one half for 4 bits, low and high for 8.
    scales_and_offsets: bfloat16 `(halves * groups, out_features, 2)`. order: int32 `(in_features,)`, which column
    stands at each place, or None if each stands at its own. zeros: uint8 as in PackedWeight, which `unpack` needs.
    """

    packed: torch.Tensor
    scales_and_offsets: torch.Tensor
    order: torch.Tensor | None
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    in_features: int

    @classmethod
    def of(cls, weight: PackedWeight) -> "Int4PackWeight":
        """From the portable form. Call `why_not` first."""
        codes, order = sorted_by_group(weight)
        scales, zeros = weight.scales.float(), weight.zeros
        middle = 1 << (weight.bits - 1)
        offset = scales * (middle - (middle if zeros is None else zeros.float()))
        if weight.bits == 8:
            codes, scales, offset = _two_halves(codes, scales, offset)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        pairs = torch.stack((scales.T, offset.T), dim=-1).to(torch.bfloat16)
        return cls(packed, pairs.contiguous(), order, zeros, weight.bits, weight.group_size, weight.in_features)

    def unpack(self) -> PackedWeight:
        """The portable form; the op itself reads the codes, with an identity matrix for activations."""
        codes = self._packed_codes()
        if self.bits == 8:
            low, high = codes.split(self.in_features, dim=1)
            codes = low | high << 4
        codes, g_idx = in_model_order(codes, self.order, self.group_size)
        scales = self.scales_and_offsets[: self.in_features // self.group_size, :, 0].T.contiguous()
        words = pack_bits(codes, self.bits)
        return PackedWeight(words, scales, self.zeros, g_idx, self.bits, self.group_size, self.in_features)

    def _packed_codes(self) -> torch.Tensor:
        """The 4-bit codes, uint8 `(out_features, halves * in_features)`, columns in the order in which they lie."""
        pairs = torch.ones_like(self.scales_and_offsets)
        pairs[..., 1] = _MIDDLE
        pieces = []
        for rows in torch.arange(2 * self.packed.shape[1]).split(_IDENTITY_ROWS):
            identity = F.one_hot(rows, 2 * self.packed.shape[1]).to(torch.bfloat16)
            pieces.append(torch.ops.aten._weight_int4pack_mm_for_cpu(identity, self.packed, self.group_size, pairs))
        return torch.cat(pieces).T.to(torch.uint8)

    def bound(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`multiply` for bfloat16 x `(..., in_features)` with everything looked up: a small matrix takes about as long
        as the Python around it. The tensors are those of now."""
        op, packed, pairs = torch._weight_int4pack_mm_for_cpu, self.packed, self.scales_and_offsets
        order, group_size, halves = self.order, self.group_size, self.bits // 4
        in_features, out_features = self.in_features, self.out_features

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, in_features).contiguous()  # the last tokens of a batch are a view with gaps
            if order is not None:
                rows = rows.index_select(1, order)
            if halves == 2:
                rows = torch.cat((rows, rows), dim=1)
            return op(rows, packed, group_size, pairs).view(*x.shape[:-1], out_features)

        return run

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x (rows, in_features)` in bfloat16 to `(rows, out_features)`."""
        return self.bound()(x)

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def device(self) -> torch.device:
        return self.packed.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the integers stand for, `(out_features, in_features)`."""
        return self.unpack().dequantize(dtype)


def _two_halves(
    codes: torch.Tensor, scales: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and offsets of the low 4 bits of 8-bit codes and, beside them, of the high 4.

    (136 - z) * s has up to 16 bits. The high half takes what bfloat16 holds of it and the low one the rest, so that it
    is exact.
    """
    whole = offset + _MIDDLE * scales
    upper = whole.to(torch.bfloat16).float()
    pairs = ((codes & 15, codes >> 4), (scales, 16 * scales), (whole - upper, upper))
    return tuple(torch.cat(pair, dim=1) for pair in pairs)


def why_not(weight: PackedWeight) -> str | None:
    """Why the packed matmul cannot read this weight, or None."""
    if weight.device.type != "cpu":
        return f"it is for the CPU; the weight is on {weight.device}"
    if weight.bits not in (4, 8):
        return f"it reads 4 bits, and 8 as twice 4; the weight has {weight.bits}"
    if weight.group_size not in GROUP_SIZES:
        return f"it takes groups of {', '.join(map(str, GROUP_SIZES))}; the weight has groups of {weight.group_size}"
    if weight.out_features % _OUT_MULTIPLE:
        return f"it takes a multiple of {_OUT_MULTIPLE} output features; the weight has {weight.out_features}"
    if weight.scales.dtype is not torch.bfloat16:
        return f"it takes bfloat16 scales; the weight's are {str(weight.scales.dtype).removeprefix('torch.')}"
    return None
