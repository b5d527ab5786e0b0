"""Packed weights in the order that the Triton kernel reads.

Sixteen words of a row make a block of 16 * 32 / bits columns. A word holds one code for each field of `bits` bits; word
j holds in field i the column 16 i + j of its block. So the sixteen codes that one shift brings down are sixteen
neighbouring columns, which meet sixteen neighbouring elements of x: no code has to change its place in the registers.
Groups are multiples of 16 columns, so that a field of a block has one scale. Blocks come first, then rows, then words:
what a program loads at a time, some rows of one block, is one run of memory.
Columns out of group order (act-order) are sorted by group; the kernel takes x's by `order`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.kernels.bits import pack_bits
from labkit.kernels.types import PackedWeight, TensorFields, in_model_order, sorted_by_group

BITS = (4, 8)
WORDS = 16
# One ticket for each tile of rows that programs share (`triton.py`); no tile is smaller.
SMALLEST_TILE = 32


def block_columns(bits: int) -> int:
    """Columns in a block of sixteen words."""
    return WORDS * 32 // bits


@dataclass(frozen=True, slots=True, eq=False)
class InterleavedWeight(TensorFields):
    """A `PackedWeight` of 4 or 8 bits in the order of the Triton kernel; `unpack` gives it back bit by bit.

    words: int32 `(blocks, out_features, 16)`; the last block is filled up with zeros. pairs: int32 `(groups,
    out_features)`, the bfloat16 scale in the upper half and the zero point in the lowest byte, together as
    wide as what a GPU copies ahead of its use has to be at least. order: int32 `(in_features,)`, which column stands at
    each place, or None if each stands at its own. tickets: int32 zeros, by which programs that share a tile find out
    who is last; they are zeros again when a product is done, so that one weight serves one stream at a time. sym: the
    portable form has no zeros.
    """

    words: torch.Tensor
    pairs: torch.Tensor
    order: torch.Tensor | None
    tickets: torch.Tensor
    bits: int
    group_size: int
    in_features: int
    sym: bool

    @classmethod
    def of(cls, weight: PackedWeight) -> "InterleavedWeight":
        """From the portable form. Call `why_not` first."""
        codes, order = sorted_by_group(weight)
        columns = block_columns(weight.bits)
        padded = F.pad(codes, (0, -weight.in_features % columns))
        # (blocks, out_features, words, fields): a word's fields have to lie side by side to be packed.
        fields = padded.unflatten(1, (-1, columns // WORDS, WORDS)).permute(1, 0, 3, 2)
        words = pack_bits(fields.flatten(2), weight.bits)
        sym = weight.zeros is None
        zeros = 1 << (weight.bits - 1) if sym else weight.zeros.T
        pairs = (weight.scales.T.contiguous().view(torch.int16).int() << 16) | zeros
        tickets = torch.zeros(-(-weight.out_features // SMALLEST_TILE), dtype=torch.int32, device=weight.device)
        return cls(words, pairs, order, tickets, weight.bits, weight.group_size, weight.in_features, sym)

    def unpack(self) -> PackedWeight:
        """The portable form."""
        fields = 32 // self.bits
        shifts = torch.arange(0, 32, self.bits, dtype=torch.int32, device=self.device)
        codes = (self.words[..., None, :] >> shifts[:, None]) & ((1 << self.bits) - 1)
        codes = codes.transpose(0, 1).reshape(self.out_features, self.words.shape[0] * fields * WORDS)
        codes, g_idx = in_model_order(codes[:, : self.in_features].to(torch.uint8), self.order, self.group_size)
        scales = (self.pairs >> 16).to(torch.int16).view(torch.bfloat16).T.contiguous()
        zeros = None if self.sym else (self.pairs & 0xFF).to(torch.uint8).T.contiguous()
        words = pack_bits(codes, self.bits)
        return PackedWeight(words, scales, zeros, g_idx, self.bits, self.group_size, self.in_features)

    @property
    def out_features(self) -> int:
        return self.words.shape[1]

    @property
    def device(self) -> torch.device:
        return self.words.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight that the integers stand for, `(out_features, in_features)`."""
        return self.unpack().dequantize(dtype)


def why_not(weight: PackedWeight) -> str | None:
    """Why the Triton kernel cannot read this weight, or None."""
    if weight.bits not in BITS:
        return f"it reads 4 and 8 bits; the weight has {weight.bits}"
    if weight.group_size % WORDS and weight.group_size != weight.in_features:
        return f"it takes groups of a multiple of {WORDS} columns; the weight has groups of {weight.group_size}"
    if weight.scales.dtype is not torch.bfloat16:
        return f"it takes bfloat16 scales; the weight's are {str(weight.scales.dtype).removeprefix('torch.')}"
    return None
